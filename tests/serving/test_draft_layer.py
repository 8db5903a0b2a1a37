"""Draft layers (multi-token prediction): their logits, and drafts that an engine makes by them."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.draft_layers import Drafting
from support.hf_models import random_tokens
from support.serving_models import row_differences
from support.serving_steps import Steps, prefill_and_decode

from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions

COMPILING = "PLAIN"  # see conftest.py
MODELS = ("v4", "v32")
VOCABULARY, CHUNK = 256, 112
ECHO = 0.2


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

    def forward(self, params, caches, batch, tables, tokens, positions, *, trace):
        own, cache = caches
        out = self.model.forward(params, own, batch, tables, tokens % VOCABULARY, positions)
        arguments = batch, tables, tokens // VOCABULARY, positions, out.states
        draft = self.model.draft(params, cache, *arguments)
        return dataclasses.replace(draft, caches=(out.caches, draft.caches))

    def logits(self, params, hidden):
        return self.model.logits(params, hidden)


def with_next(tokens):
    return [a + VOCABULARY * b for a, b in itertools.pairwise(tokens)]


@pytest.mark.parametrize("name", MODELS)
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
        assert np.median(rows) < 0.004 and np.mean(rows < 0.01) > 0.9


def drafts(ours, tokens, count):
    """What the draft layer makes behind these tokens: the drafts, and the least margin of one of them.

    The first is made of the model's states; for each other the layer's own states stand for the model's.
    """
    _, states, _ = ours.run(tokens[:-1])
    behind, made, margins = tokens[1:], [], []
    for _ in range(count):
        logits, own = ours.predict(behind, states, ours.run(behind)[2])
        second, best = np.sort(logits[-1])[-2:]
        made.append(int(logits[-1].argmax()))
        margins.append((best - second) / best)
        behind, states = [*behind, made[-1]], torch.cat([states, own[:, -1:]], dim=1)
    return made, min(margins)


# One request at a time is a program less.
@pytest.mark.parametrize("name, sizes, max_batch", [("v4", ((150, 14), (250, 8)), 2), ("v32", ((151, 14),), 1)])
def test_an_engine_drafts_by_it(name, sizes, max_batch):
    """Tokens are transformers' greedy ones, and each round keeps as many drafts as the draft layer has right."""
    ours = Drafting(name, echo=ECHO)
    options = EngineOptions(chunk_size=CHUNK, max_batch=max_batch, max_len=320, speculative_steps=2, bf16_cache=True)
    engine = Engine(*ours.jax_model, options)
    assert engine.drafter == "draft layer"
    requests = [Request(random_tokens(n, n), new) for n, new in sizes]
    engine.run(requests)
    rounds, least = collections.Counter(), 1.0
    for request in requests:
        tokens, length = request.tokens, len(request.prompt)
        logits, _, _ = ours.run(tokens[:-1])
        assert logits[length - 1 :].argmax(-1).tolist() == request.output
        at = length  # of the last token that is known
        while at < len(tokens) - 1:
            made, margin = drafts(ours, tokens[: at + 1], 2)
            right = [a == b for a, b in zip(made, tokens[at + 1 : -1])] + [False]
            rounds[right.index(False)] += 1
            at, least = at + 1 + right.index(False), min(least, margin)
    print(engine.accepted, rounds, least, min(map(min, (r.margins for r in requests))))
    assert engine.accepted == rounds and set(rounds) == {0, 1, 2}
