"""Draft layers (multi-token prediction): their logits, and drafts that an engine makes by them."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support.draft_layers import Drafting
from support.hf_models import random_tokens
from support.serving_models import row_differences
from support.serving_steps import Steps, prefill_and_decode

from jax_sparse_mla import ForwardMode
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions

VOCABULARY, CHUNK = 256, 112
SELECTED = 256  # tokens, by an indexer of these models without a window
# Chosen with the lengths below for tokens and drafts of clear margins: half a percent of the best logit.
ECHO = 0.25


@dataclasses.dataclass(frozen=True)
class DraftLayer:
    """The draft layer in the place of its model. A token of this one is two: that of a position, and 256 times the one
    behind it."""

    model: Model

    @property
    def spec(self):
        return self.model.spec

    def new_caches(self, **sizes):
        return self.model.new_caches(**sizes), None

    def forward(self, params, caches, inputs, layers=None):
        model_caches, cache = caches
        first, second = inputs.tokens % VOCABULARY, inputs.tokens // VOCABULARY
        out = self.model.forward(params, model_caches, dataclasses.replace(inputs, tokens=first, trace=False))
        draft = self.model.draft(params, cache, dataclasses.replace(inputs, tokens=second), out.states)
        return dataclasses.replace(draft, caches=(out.caches, draft.caches))

    def logits(self, params, hidden):
        return self.model.logits(params, hidden)


def with_next(tokens):
    return [a + VOCABULARY * b for a, b in itertools.pairwise(tokens)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["v4", "v32", "glm5"])
def test_float32_logits_are_transformers(name):
    """In chunks and token by token, of requests longer than a window, a page of V4, and what V3.2 selects."""
    ours, texts = Drafting(name), [random_tokens(n, n) for n in (301, 60)]
    model, params = ours.jax_model
    random = jax.eval_shape(lambda: model.init_params(0, jnp.float32, draft_layer=True))
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), random, params)
    steps = Steps(DraftLayer(model), params, num_requests=2)
    draft = model.new_draft(params, max_requests=2, num_pages=64, num_swa_pages=64, bf16=True)
    steps.caches = steps.caches[0], draft.cache
    logits = prefill_and_decode(steps, [with_next(tokens) for tokens in texts], 2, CHUNK)
    for tokens, got in zip(texts, logits, strict=True):
        _, states, options = ours.run(tokens[:-1])
        wanted, _ = ours.predict(tokens[1:], states, options)
        rows = row_differences(got, wanted)
        # The others go to other experts, where a bfloat16 cache's rounding decides.
        assert np.median(rows) < 0.004 and np.mean(rows[: SELECTED if name == "glm5" else None] < 0.01) > 0.9
        if name == "glm5" and len(rows) > SELECTED:  # three layers rank entries by FP8 keys
            assert np.median(rows[SELECTED:]) < 0.05


# A short text shows a wrong row; chunks end within a text, and hold two. Both need as many rounds: one program.
@pytest.mark.long
@pytest.mark.parametrize("name, count, sizes", [("v4", 3, ((144, 12), (10, 13))), ("v32", 2, ((30, 16),))])
def test_an_engine_drafts_by_it(name, count, sizes):
    """What the layer keeps, what is drafted, how many drafts each round keeps; and tokens are transformers'."""
    ours = Drafting(name, echo=ECHO)
    options = EngineOptions(chunk_size=16, max_batch=len(sizes), max_len=320, bf16_cache=True, trace=True)
    engine = Engine(*ours.jax_model, dataclasses.replace(options, speculative_steps=count))
    assert engine.drafter == "draft layer"
    requests = [Request(random_tokens(n, n), new) for n, new in sizes]
    kept = {}

    def on_step(_, requests):
        for i, request in enumerate(requests):
            if request.row is not None and not request.in_prefill:
                kept[i, len(request.tokens)] = np.asarray(engine.state.draft.states[request.row])

    engine.run(requests, on_step)
    verified = {}
    for step in engine.trace:
        if step.plan.mode is ForwardMode.TARGET_VERIFY:
            logits = np.asarray(step.logits).reshape(-1, count + 1, VOCABULARY)
            for request, start, rows in zip(step.plan.requests, step.plan.starts, logits):
                verified[requests.index(request), int(start) + 1] = rows
    rounds = collections.Counter()
    for i, request in enumerate(requests):
        tokens, known = request.tokens, len(request.prompt) + 1
        logits, states, options = ours.run(tokens[:-1])
        assert logits[known - 2 :].argmax(-1).tolist() == request.output
        _, own = ours.predict(tokens[1:], states, options)
        while known < len(tokens):
            assert row_differences(kept[i, known].ravel(), own[0, known - 2].numpy().ravel()) < 0.001
            drafts = drafted(ours, tokens[:known], states[:, : known - 1], count)
            wanted = ours.run([*tokens[:known], *drafts])[0][known - 1 :]
            assert row_differences(verified[i, known], wanted).max() < 0.002
            right = [a == b for a, b in zip(drafts, tokens[known:-1])] + [False]
            rounds[right.index(False)] += 1
            known += 1 + right.index(False)
    assert engine.accepted == rounds and len(rounds) > 2


def drafted(ours, tokens, states, count):
    """What the draft layer makes behind these tokens, of the model's states of all but the last.

    Of the last one's position the model knows nothing yet: the layer's own states before it stand for the model's.
    """
    behind = tokens[1:]
    for _ in range(count):
        logits, own = ours.predict(behind, states, ours.run(behind)[2])
        behind, states = [*behind, int(logits[-1].argmax())], torch.cat([states, own[:, -1:]], dim=1)
    return behind[-count:]
