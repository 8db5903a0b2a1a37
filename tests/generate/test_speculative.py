"""Speculative decoding in the small engine: the tokens of plain decoding, whatever is drafted and rejected."""

import collections
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import DEVICE, MODELS, random_model, random_tokens, small_model, small_v4_config, snapshot
from sparse_mla_torch.hf import engine as hf_engine
from sparse_mla_torch.hf import layers as hf_layers
from sparse_mla_torch.hf.engine import Engine, EngineOptions, Request
from sparse_mla_torch.hf.speculative import SpeculativeDecoder

from jax_sparse_mla import ForwardMode, gather_kv, write_kv
from jax_sparse_mla.indexer.logits import write_index_k
from jax_sparse_mla.serving.speculative import MAX_MARGIN, DraftOracle, compare_with_plain

COMPILING = "OPTIMISED"  # see conftest.py
pytestmark = pytest.mark.torch

# Three requests, two at a time. The first two cross a page of V4 (256 tokens) and one of V3.2 (64) while drafts are
# rejected, the last two end before the first; V3.2 selects 64 of the first one's tokens.
OPTIONS = EngineOptions(bf16_cache=True, chunk_size=64, max_batch=2, max_len=300, speculative_steps=3)
SHAPES = ((250, 30), (61, 9), (3, 14))
VOCABULARY = 256


def new_requests(shapes=SHAPES):
    return [Request(random_tokens(length, seed), new) for seed, (length, new) in enumerate(shapes)]


@functools.cache
def engine_of(name):
    return Engine(small_model(name), OPTIONS)


@functools.cache
def plain(name):
    """`new_requests`, served by plain decoding."""
    requests = new_requests()
    engine_of(name).run(requests)
    return requests


def compilations():
    functions = hf_layers._run_v4, hf_layers._run_v32, hf_engine._build_step
    return [function._cache_size() for function in functions]


@dataclasses.dataclass
class Run:
    """The requests as speculative decoding has served them; steps: of the model, `(step, tokens, logits)`."""

    requests: list[Request]
    decoder: SpeculativeDecoder
    steps: list


class EveryLength(DraftOracle):
    """Of a request's rounds it gets the first draft wrong in the first, the second in the next, and so on; every
    `steps` + 1 rounds all drafts are right. So a request's rounds accept 0, 1, … `steps`, 0, … drafts."""

    def __init__(self, plain, steps):
        super().__init__(plain, probability=1, seed=0)
        self._steps, self._rounds = steps, collections.Counter()

    def propose(self, request, ahead):
        self._rounds[id(request)] += ahead == 0
        right = max(super().propose(request, ahead), 0)
        return right if ahead < (self._rounds[id(request)] - 1) % (self._steps + 1) else (right + 1) % VOCABULARY


def speculate(name, steps, oracle, on_step=lambda *_: None):
    engine = engine_of(name)
    decoder = SpeculativeDecoder(engine, steps, oracle)
    run = Run(new_requests(), decoder, [])
    forward = engine.forward

    def record(step, tokens, keep):
        logits = forward(step, tokens, keep)
        run.steps.append((step, tokens, logits.float()))
        return logits

    with mock.patch.object(engine, "forward", record):
        engine.run(run.requests, on_step, decoder.advance)
    return run


@functools.cache
def speculated(name):
    return speculate(name, 3, EveryLength(plain(name), 3))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "steps"),
    # cpu: see STEADY_MODELS
    [
        ("v4", 3),
        pytest.param("v32", 3, marks=pytest.mark.cpu),
        pytest.param("v32", 1, marks=pytest.mark.cpu),
    ],
)
def test_tokens_are_those_of_plain_decoding(name, steps):
    engine, expected = engine_of(name), plain(name)
    free, compiled = snapshot(engine.pool), None
    none, every, all_of_them = DraftOracle([], 0, 0), EveryLength(expected, steps), DraftOracle(expected, 1, 0)
    for oracle in (none, every, all_of_them):
        run = speculated(name) if (oracle, steps) == (every, 3) else speculate(name, steps, oracle)
        requests, accepted = run.requests, run.decoder.accepted
        differences = compare_with_plain(engine.run, requests, expected)
        assert len(differences) <= 1 and all(d.margin <= MAX_MARGIN for d in differences), differences
        assert [len(r.output) for r in requests] == [r.max_new_tokens for r in expected]
        assert all(r.computed == len(r.tokens) - 1 and len(r.margins) == len(r.output) for r in requests)
        # Each request's first token comes from its prefill.
        assert sum((count + 1) * times for count, times in accepted.items()) == sum(new - 1 for _, new in SHAPES)
        assert set(accepted) == set(range(steps + 1))
        if oracle is every:
            assert all(accepted.values()), accepted
        if oracle is all_of_them and not differences:
            assert accepted[steps] == sum((new - 1) // (steps + 1) for _, new in SHAPES)
        assert snapshot(engine.pool) == free
        # Other drafts, other acceptance lengths: the same step shapes.
        assert compiled in (None, compilations())
        compiled = compilations()


@pytest.mark.long
@pytest.mark.parametrize("first", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_a_first_layer_that_compresses(first):
    """Drafts then pass through its compressor's ring, and complete groups. As in V4-Pro.

    Either request has rounds enough to accept each number of drafts, and one at most leaves plain decoding.
    """
    kinds = small_v4_config().layer_types
    model = random_model(small_v4_config(layer_types=[first] + [kind for kind in kinds if kind != first]), seed=0)
    engine = Engine(model.to(DEVICE), OPTIONS)
    expected, requests = new_requests(((122, 14), (5, 20))), new_requests(((122, 14), (5, 20)))
    engine.run(expected)
    decoder = SpeculativeDecoder(engine, 3, EveryLength(expected, 3))
    engine.run(requests, advance=decoder.advance)
    differences = compare_with_plain(engine.run, requests, expected)
    assert len(differences) <= 1 and all(d.margin <= MAX_MARGIN for d in differences), differences
    assert all(decoder.accepted.values()), decoder.accepted


@pytest.mark.long
@pytest.mark.cpu  # eager's steps have other sizes: see STEADY_MODELS
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_the_first_layer_and_the_head(name):
    """Against transformers' own model of one layer, over the same tokens, rejected ones included."""
    run, model, spec = speculated(name), engine_of(name).model, engine_of(name).spec
    # Of more tokens than it selects V3.2 may choose others: eager's index keys are not quantised.
    longest = spec.index_topk if spec.window is None else 300
    texts, seen = {id(request): {} for request in run.requests}, 0
    for step, tokens, logits in run.steps:
        for request, position, token in zip(step.requests, step.positions, tokens):
            texts[request][position] = token
        if step.mode is not ForwardMode.DECODE:
            continue
        for request, position, ours in zip(step.requests, step.positions, logits):
            if position >= longest or seen == 30:
                continue
            text = torch.tensor([texts[request][p] for p in range(position + 1)], device=DEVICE)[None]
            with mock.patch.object(model.model, "layers", model.model.layers[:1]), torch.no_grad():
                eager = model(input_ids=text, use_cache=False).logits[0, -1]
            torch.testing.assert_close(ours, eager.float(), rtol=0, atol=0.02)
            seen += 1
    assert seen > 15


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_drafts_use_the_slots_of_the_verify_step(name):
    steps = [step for step, *_ in speculated(name).steps if step.mode is not ForwardMode.EXTEND]
    assert len(steps) > 20
    for i in range(0, len(steps), 4):
        *drafts, verify = steps[i : i + 4]
        assert verify.mode is ForwardMode.TARGET_VERIFY
        slots, lengths = np.asarray(verify.batch.out_cache_loc).reshape(-1, 4), np.asarray(verify.batch.seq_lens)
        for j, draft in enumerate(drafts):
            assert draft.mode is ForwardMode.DECODE
            assert np.array_equal(draft.batch.out_cache_loc, slots[:, j])
            assert np.array_equal(draft.batch.seq_lens, np.where(lengths > 0, lengths + j + 1, 0))
            assert np.array_equal(draft.positions, verify.positions[j::4])


# Rejected tokens.


def rejected_rows(step, requests):
    """(request, position, slot) of a verify step's rejected tokens."""
    by_id = {id(request): request for request in requests}
    rows = zip(step.requests, step.positions, np.asarray(step.batch.out_cache_loc))
    return [(by_id[key], int(p), int(slot)) for key, p, slot in rows if p >= by_id[key].computed]


@jax.jit
def poison_slots(cache, slots):
    cache = write_kv(cache, slots, jnp.full((len(slots), cache.layout.qk_dim), jnp.nan, jnp.bfloat16))
    return cache, jnp.isnan(gather_kv(cache, slots)).all(-1)


@jax.jit
def poison_keys(index_k, slots):
    return write_index_k(index_k, slots, jnp.full((len(slots), 128), jnp.nan, jnp.bfloat16))


@jax.jit
def poison_ring(state, rows, positions):
    place = rows, positions % state.kv.shape[1]
    return jax.tree.map(lambda x: x.at[place].set(jnp.nan, mode="drop"), state)


def poisoned_kv(cache, slots):
    cache, is_nan = poison_slots(cache, slots)
    assert np.array_equal(is_nan, slots >= 0)
    return cache


def poison_rejected(engine, step, rejected):
    """NaN wherever a rejected token has written: K rows, compressed entries, index keys, rings."""
    slots, positions, rows = (np.full(engine.options.max_batch * 4, fill, np.int32) for fill in (-1, 0, 10**6))
    for i, (request, position, slot) in enumerate(rejected):
        slots[i], positions[i] = slot, position
        if request.row is not None:  # else nobody's ring yet
            rows[i] = request.row
    for index, (layer, cache) in enumerate(zip(engine.layers, engine.caches)):
        if not engine.is_v4:
            changes = {"kv": poisoned_kv(cache.kv, slots), "index_k": poison_keys(cache.index_k, slots)}
            engine.caches[index] = dataclasses.replace(cache, **changes)
            continue
        changes = {"swa": poisoned_kv(cache.swa, np.asarray(step.tables.full_to_swa)[slots])}
        if layer.ratio:
            entries = np.where((slots >= 0) & (positions % layer.ratio == layer.ratio - 1), slots // layer.ratio, -1)
            changes["compressed"] = poisoned_kv(cache.compressed, entries)
            changes["state"] = poison_ring(cache.state, rows, positions)
        if layer.has_indexer:
            changes["index_k"] = poison_keys(cache.index_k, entries)
            changes["index_state"] = poison_ring(cache.index_state, rows, positions)
        engine.caches[index] = dataclasses.replace(cache, **changes)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_slots_of_rejected_tokens_are_used_again_and_never_read(name):
    """NaN in their place changes no bit of any later choice."""
    engine = engine_of(name)
    unpoisoned, waiting, reused, given_back = speculated(name), {}, 0, 0

    def on_step(step, requests):
        nonlocal reused, given_back
        if step.mode is not ForwardMode.TARGET_VERIFY:
            return
        for key, position, slot in zip(step.requests, step.positions, np.asarray(step.batch.out_cache_loc)):
            reused += waiting.pop((key, position), None) == slot
        rejected = rejected_rows(step, requests)
        for request, position, slot in rejected:
            if request.finished:
                continue
            mapped = engine.pool.req_to_token[request.row, position]
            assert mapped in (slot, -1)
            given_back += mapped == -1
            if mapped == slot:
                waiting[id(request), position] = slot
        poison_rejected(engine, step, rejected)

    poisoned = speculate(name, 3, EveryLength(plain(name), 3), on_step)
    assert reused > 10 and given_back > 0
    for (_, tokens, logits), (_, expected, expected_logits) in zip(poisoned.steps, unpoisoned.steps, strict=True):
        assert tokens == expected
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=0)


def test_everything_is_given_back_when_a_draft_raises():
    engine = engine_of("v32")
    free, layers = snapshot(engine.pool), list(engine.model.model.layers)

    class Broken(DraftOracle):
        def propose(self, request, ahead):
            if ahead == 1:
                raise KeyboardInterrupt
            return -1

    with pytest.raises(KeyboardInterrupt):
        engine.run(new_requests(), advance=SpeculativeDecoder(engine, 3, Broken([], 0, 0)).advance)
    assert snapshot(engine.pool) == free and list(engine.model.model.layers) == layers


@pytest.mark.parametrize("steps", [0, 4])
def test_steps_that_the_engine_has_no_room_for(steps):
    with pytest.raises(ValueError, match=f"steps must be 1 … 3, the engine's, got {steps}"):
        SpeculativeDecoder(engine_of("v32"), steps)


# The comparison with plain decoding.


@pytest.mark.cpu  # see STEADY_MODELS
def test_the_comparison_goes_on_behind_a_difference():
    engine, expected = engine_of("v32"), plain("v32")

    def with_token(request, index):
        """The request as decoding would have served it had it chosen another token at `index`."""
        other = (request.output[index] + 1) % 256
        output, margins = [*request.output[:index], other], [*request.margins[:index], 0.5]
        if rest := request.max_new_tokens - len(output):
            tail = Request(request.prompt + output, rest)
            engine.run([tail])
            output, margins = output + tail.output, margins + tail.margins
        return Request(request.prompt, request.max_new_tokens, output, margins)

    assert compare_with_plain(engine.run, expected, expected) == []
    twice = with_token(with_token(expected[1], 2), 5)
    requests = [expected[0], twice, with_token(expected[2], 13)]
    found = [(d.request, d.index, d.margin) for d in compare_with_plain(engine.run, requests, expected)]
    assert found == [(1, 2, 0.5), (1, 5, 0.5), (2, 13, 0.5)]


def test_margins_are_shares_of_the_best_logit():
    chosen = hf_engine.choose(torch.tensor([[4.0, 1.0, 5.0], [-2.0, -1.0, -2.0]], dtype=torch.bfloat16))
    assert [token for token, _ in chosen] == [2, 1]
    assert [margin for _, margin in chosen] == pytest.approx([0.2, 1.0])
    assert hf_engine.choose(torch.tensor([[7.0, 7.0, 0.0]]))[0][1] == 0


def test_the_oracle_proposes_plain_tokens():
    served = Request([5, 6], 4, output=[10, 11, 12, 13])
    asked = Request([5, 6], 9, output=[10])
    always, never = DraftOracle([served, Request([5, 6], 1, output=[10])], 1, 0), DraftOracle([served], 0, 0)
    assert [always.propose(asked, ahead) for ahead in range(4)] == [11, 12, 13, -1]
    assert [never.propose(asked, ahead) for ahead in range(4)] == [-1] * 4
    assert always.propose(Request([5], 4), 0) == -1
    often = DraftOracle([served], 0.7, 0)
    assert sum(often.propose(asked, 0) == 11 for _ in range(1000)) == pytest.approx(700, abs=60)
