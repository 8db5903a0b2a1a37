"""compressor: entries, the carried state, and rope.

The oracle is a loop over the formula in float64. Whole models beside transformers' are in
`test_models_transformers.py`.
"""

from __future__ import annotations

import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compressor_engine import (
    HOSTILE,
    MAX_REQUESTS,
    Engine,
    Parameters,
    assert_entry,
    entry_by_hand,
    one_shot,
    rotate_by_hand,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.compressor import api as compressor
from jax_sparse_mla.compressor.api import compress_kv
from jax_sparse_mla.compressor.state import CompressorState, _replaced_later
from jax_sparse_mla.rope import rope_interleaved

BF16 = ml_dtypes.bfloat16
PROPERTY = settings(max_examples=14, deadline=None)


# --- entries ---------------------------------------------------------------------------------------

SMALL = {4: (16, 8), 128: (16, 8), 5: (6, 6)}  # ratio: head_dim, rope_dim


@pytest.mark.parametrize(
    "ratio, dtype, jit",
    [
        (4, np.float32, False),
        (128, np.float32, False),
        (5, np.float32, False),
        (4, BF16, True),
        (128, BF16, True),
    ],
)
def test_entries_are_the_formula(ratio, dtype, jit):
    p = Parameters(0, ratio, *SMALL[ratio])
    length = 2 * ratio + 3
    kv, score = p.tokens(1, length, dtype)
    engine = Engine(p, dtype=dtype, jit=jit)
    engine.step([("r", 2, 0, kv, score)])
    assert sorted(engine.entries) == [("r", 0), ("r", 1)]
    for (_, group), entry in engine.entries.items():
        assert_entry(entry, entry_by_hand(p, kv, score, (group + 1) * ratio - 1))


def chunkings(ratio):
    """Per step and request, how many tokens: 0, 1, a few, or more than a ring."""
    sizes = [0, 1, 1, 2, 3, ratio - 1, ratio, ratio + 1, min(2 * ratio + 3, 100)]
    return st.lists(st.lists(st.sampled_from(sizes), min_size=3, max_size=3), min_size=4, max_size=8)


@PROPERTY
@given(seed=st.integers(0, 2**32 - 1), ratio=st.sampled_from(list(SMALL)), data=st.data())
def test_any_chunking_gives_the_same_entries(seed, ratio, data):
    """Three requests in one batch, in changing order; their rows of the state hold NaN before."""
    p = Parameters(0, ratio, *SMALL[ratio])
    rng = np.random.default_rng(seed)
    req_row = rng.permutation(MAX_REQUESTS)[:3]
    chunks_of = data.draw(chunkings(ratio))
    lengths = np.sum(chunks_of, axis=0)
    tokens = [p.tokens(seed + r, lengths[r]) for r in range(3)]
    engine, done = Engine(p), np.zeros(3, int)
    for sizes in chunks_of:
        chunks = []
        for r in rng.permutation(3):
            part = slice(done[r], done[r] + sizes[r])
            chunks.append((r, req_row[r], done[r], tokens[r][0][part], tokens[r][1][part]))
        engine.step(chunks, garbage=1)
        done += sizes

        # The state: the last tokens of each request, bit for bit, and nothing else.
        ring = engine.state.kv.shape[1]
        want = np.full((2, *engine.state.kv.shape), np.nan, np.float32)
        for r in range(3):
            for position in range(max(0, done[r] - ring), done[r]):
                want[:, req_row[r], position % ring] = [x[position] for x in tokens[r]]
        np.testing.assert_array_equal(np.stack([engine.state.kv, engine.state.score]), want)

    assert len(engine.entries) == sum(lengths // ratio)
    for (r, group), entry in engine.entries.items():
        assert_entry(entry, entry_by_hand(p, *tokens[r], (group + 1) * ratio - 1))


def test_rejected_drafts_need_a_longer_ring():
    """A verify step writes 6 tokens of which 1 is accepted; the next step writes over the others."""
    p = Parameters(11, 4, *SMALL[4])
    kv, score = p.tokens(12, 40)
    drafts = p.tokens(13, 40)

    def entries(ring):
        engine = Engine(p, ring=ring, fill=0)
        engine.step([("r", 0, 0, kv[:9], score[:9])])
        for position in range(9, 24):
            draft = slice(position + 1, position + 6)
            step = [np.concatenate([x[position : position + 1], d[draft]]) for x, d in zip((kv, score), drafts)]
            engine.step([("r", 0, position, *step)])
        return [engine.entries["r", group] for group in range(6)]

    want = [entry_by_hand(p, kv, score, 4 * group + 3) for group in range(6)]
    for got, entry in zip(entries(8 + 5), want):
        assert_entry(got, entry)
    assert any(np.abs(got.astype(np.float64) - entry).max() > 0.1 for got, entry in zip(entries(8), want))


# --- hostile values and empty shapes ---------------------------------------------------------------


def call(p, state, kv, score, positions, req_rows, query_start_loc, **kwargs):
    return compress_kv(
        state,
        jax.device_put(kv),
        jax.device_put(score),
        positions=jnp.asarray(positions, jnp.int32),
        req_rows=jnp.asarray(req_rows, jnp.int32),
        query_start_loc=jnp.asarray(query_start_loc, jnp.int32),
        **{**p.arrays(), "ratio": p.ratio, **kwargs},
    )


def test_rows_of_no_request_are_inert():
    p = Parameters(14, 4, *SMALL[4])
    state = CompressorState.zeros(3, ratio=4, head_dim=16)
    kv, score = p.tokens(15, 16)
    for req_rows in ([v] * 16 for v in (*HOSTILE, 3)):
        entries, rows, after = call(p, state, kv, score, np.arange(16), req_rows, [0, 16])
        assert (np.asarray(rows) == -1).all() and not entries.astype(jnp.float32).any()
        chex.assert_trees_all_equal(after, state)
    for positions in ([v] * 16 for v in (-1, -7, -(2**31))):
        entries, rows, after = call(p, state, kv, score, positions, [1] * 16, [0, 16])
        assert (np.asarray(rows) == -1).all() and not entries.astype(jnp.float32).any()
        chex.assert_trees_all_equal(after, state)
    # Rows past the last request's.
    _, rows, after = call(p, state, kv, score, np.arange(16), [1] * 16, [0, 7])
    np.testing.assert_array_equal(rows, [3, -1, -1, -1, -1])
    assert not np.asarray(after.kv)[1, 7].any() and np.asarray(after.kv)[1, 6].all()


def test_padding_rows_before_a_request_do_not_hide_its_state():
    """Rows of no position that carry the request's own req_row."""
    p = Parameters(30, 4, *SMALL[4])
    kv, score = p.tokens(31, 8)
    state = CompressorState.zeros(3, ratio=4, head_dim=16)
    _, _, state = call(p, state, kv[:6], score[:6], np.arange(6), [1] * 6, [0, 6])
    garbage = np.full((5, p.width), np.nan, np.float32)
    kv_step, score_step = np.concatenate([garbage, kv[6:]]), np.concatenate([garbage, score[6:]])
    entries, rows, _ = call(p, state, kv_step, score_step, [-1] * 5 + [6, 7], [1] * 7, [0, 7])
    np.testing.assert_array_equal(rows, [6, -1])
    assert_entry(entries[0], entry_by_hand(p, kv, score, 7))


def test_no_place_of_the_ring_is_written_twice():
    """On the CPU the last write would stay; elsewhere that is not defined."""
    rng = np.random.default_rng(32)
    for ring in (2, 8, 128):
        req_rows = np.repeat(rng.permutation(6), rng.integers(0, 20, 6)).astype(np.int32)
        live = rng.random() < np.linspace(1.5, 0.5, len(req_rows))  # the end of the step is padding
        want = [
            any(live[j] and req_rows[j] == req_rows[i] and (j - i) % ring == 0 for j in range(i + 1, len(live)))
            for i in range(len(live))
        ]
        got = _replaced_later(jax.device_put(live), jax.device_put(req_rows), ring)
        np.testing.assert_array_equal(got, want)


def test_the_largest_position_does_not_wrap():
    p = Parameters(16, 4, *SMALL[4])
    kv, score = p.tokens(17, 4)
    last = 2**31 - 1
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    entries, rows, after = call(p, state, kv, score, np.arange(last - 3, last + 1), [1] * 4, [0, 4])
    np.testing.assert_array_equal(rows, [3, -1])
    assert np.isfinite(np.asarray(entries).astype(np.float32)).all()
    np.testing.assert_array_equal(np.asarray(after.kv)[1, 4:], kv)


def test_empty_shapes():
    p = Parameters(18, 4, *SMALL[4])
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    for tokens, requests in ((0, 2), (0, 0), (3, 0), (9, 0)):
        kv, score = p.tokens(19, tokens)
        starts = [0] * (requests + 1)
        entries, rows, after = call(p, state, kv, score, np.arange(tokens), [0] * tokens, starts)
        bound = min(tokens, tokens // 4 + requests)
        chex.assert_shape([entries, rows], [(bound, 16), (bound,)])
        assert (np.asarray(rows) == -1).all()
        chex.assert_trees_all_equal(after, state)


def test_scores_of_minus_infinity_give_no_nan():
    p = Parameters(20, 4, *SMALL[4])
    kv, _ = p.tokens(21, 8)
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    entries, rows, _ = call(p, state, kv, np.full_like(kv, -np.inf), np.arange(8), [0] * 8, [0, 8])
    np.testing.assert_array_equal(rows, [3, 7, -1])
    assert not np.isnan(np.asarray(entries).astype(np.float32)).any()


# --- state, memory, compilation --------------------------------------------------------------------


def test_state_shapes():
    for ratio, shape in {4: (5, 8, 1024), 128: (5, 128, 512), 2: (5, 2, 512)}.items():
        state = CompressorState.zeros(5, ratio=ratio, head_dim=512)
        chex.assert_shape([state.kv, state.score], shape)
        assert state.kv.dtype == state.score.dtype == jnp.float32
    chex.assert_shape(CompressorState.zeros(5, ratio=4, head_dim=512, ring=16).kv, (5, 16, 1024))
    assert len(jax.tree.leaves(state)) == 2
    with pytest.raises(ValueError, match=r"CompressorState\.zeros: ring must be >= 8, got 7"):
        CompressorState.zeros(5, ratio=4, head_dim=512, ring=7)


def compiled(ratio, tokens, donate=(0,)):
    p = Parameters(0, ratio, 512, 64)
    state = jax.eval_shape(lambda: CompressorState.zeros(64, ratio=ratio, head_dim=512))
    kv = jax.ShapeDtypeStruct((tokens, p.width), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    starts = jax.ShapeDtypeStruct((9,), jnp.int32)

    def step(state, kv, score, positions, req_rows, starts):
        return call(p, state, kv, score, positions, req_rows, starts)

    return jax.jit(step, donate_argnums=donate).lower(state, kv, kv, ints, ints, starts).compile(), state


def test_donated_state_is_updated_in_place():
    """Of ratio 128; a whole layer's of ratio 4 are in `test_step.py`."""

    def copies(donate):
        program, state = compiled(128, 256, donate)
        shape = re.escape("f32[" + ",".join(map(str, state.kv.shape)) + "]")
        assert re.search(shape, program.as_text())
        return re.findall(shape + r"\S* copy(?:-start)?\(", program.as_text())

    assert not copies((0,))
    assert copies(())  # the check can fail


def test_only_the_windows_that_complete_are_gathered():
    """A window per token would be 4096 * 128 * 512 * 4 bytes, a gigabyte."""
    program, _ = compiled(128, 4096)
    assert program.memory_analysis().temp_size_in_bytes < 3 * compressor.CHUNK_BYTES


def test_chunks_of_windows_give_the_same_entries(monkeypatch):
    p = Parameters(22, 4, *SMALL[4])
    kv, score = p.tokens(23, 57)
    want = one_shot(p, kv, score)
    monkeypatch.setattr(compressor, "CHUNK_BYTES", 3 * 4 * 4 * 8 * 16)
    untraced = jax.jit(compressor._compress_kv.__wrapped__, static_argnames=("ratio", "norm_eps", "round_pooled"))
    monkeypatch.setattr(compressor, "_compress_kv", untraced)
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    entries, rows, _ = call(p, state, kv, score, np.arange(57), [0] * 57, [0, 57])
    np.testing.assert_array_equal(rows, [*range(3, 57, 4), -1])
    np.testing.assert_allclose(np.asarray(entries[:14], np.float32), np.array(want, np.float32), rtol=2**-7, atol=1e-6)


# --- rope ------------------------------------------------------------------------------------------


def test_rope_and_back():
    rng = np.random.default_rng(28)
    inv_freq = np.float32([1, 0.3, 0.01])
    x, positions = rng.normal(size=(5, 9)).astype(np.float32), np.array([0, 1, 7, 1000, -1], np.int32)
    turned = rope_interleaved(jax.device_put(x), jax.device_put(positions), jax.device_put(inv_freq))
    for row, position, got in zip(x, positions, turned):
        np.testing.assert_allclose(got, rotate_by_hand(row, position, inv_freq), atol=1e-5)
    back = rope_interleaved(turned, jax.device_put(positions), jax.device_put(inv_freq), inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-5)
    np.testing.assert_array_equal(turned[:, :3], x[:, :3])
    bf16 = rope_interleaved(jnp.asarray(x, jnp.bfloat16), jax.device_put(positions), jax.device_put(inv_freq))
    assert bf16.dtype == jnp.bfloat16
    np.testing.assert_allclose(bf16.astype(np.float32), turned, rtol=2**-6, atol=2**-6)


# --- arguments -------------------------------------------------------------------------------------


def test_bad_arguments_of_rope():
    x, positions, inv_freq = jnp.zeros((2, 3, 8)), jnp.zeros((2, 3), jnp.int32), jnp.zeros((4,))
    with pytest.raises(ValueError, match="rope_interleaved: x must"):
        rope_interleaved(x, positions, jnp.zeros((5,)))
    with pytest.raises(ValueError, match=r"rope_interleaved: positions must broadcast to \[2, 3\], got \[2\]"):
        rope_interleaved(x, positions[:, 0], inv_freq)
    with pytest.raises(TypeError, match="rope_interleaved: positions must"):
        rope_interleaved(x, positions.astype(jnp.float32), inv_freq)
