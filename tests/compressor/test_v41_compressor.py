"""Compressor of ratios 1 and 2 (DeepSeek-V4.1), against the torch form of the published model: no ape, no gate at ratio
1, softmax of a pair per channel at ratio 2, in float32, and SGLang's rounding of the sum before the norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla.compressor.api import compress_kv
from jax_sparse_mla.compressor.state import CompressorState
from jax_sparse_mla.rope import rope_interleaved

torch = pytest.importorskip("torch")
HEAD_DIM, MAX_REQUESTS, ROWS, EPS = 64, 4, 24, 1e-6
NO_ROPE = np.zeros(0, np.float32)
INV_FREQ = (160000.0 ** -(np.arange(8) / 8)).astype(np.float32)


def torch_entries(kv, score, norm_weight, *, rounds):
    """bfloat16 `[groups, d]` of a request's tokens, before rope; score None: every token is a group."""
    pooled = torch.from_numpy(kv)
    if score is not None:
        groups = len(kv) // 2 * 2
        pairs, scores = (torch.from_numpy(x[:groups]).unflatten(0, (-1, 2)) for x in (kv, score))
        pooled = (pairs * scores.softmax(dim=1)).sum(dim=1)
    pooled = pooled.bfloat16().float() if rounds else pooled.float()
    normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + EPS)
    return (torch.from_numpy(norm_weight) * normed).bfloat16().float().numpy()


def torch_rope(x, positions):
    angles = torch.from_numpy(positions.astype(np.float32))[:, None] * torch.from_numpy(INV_FREQ)
    pairs = torch.view_as_complex(torch.from_numpy(x[:, -16:]).unflatten(-1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return np.concatenate([x[:, :-16], rotated.bfloat16().float().numpy()], axis=1)


def assert_rounded_alike(got, want):
    """The same bfloat16 numbers but for a float32 sum's order, which moves one in a few hundred by a last place."""
    got = np.asarray(got, np.float32)
    assert (got != want).mean() < 5e-3
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)


def some_tokens(seed, length, *, gated):
    rng = np.random.default_rng(seed)
    kv, score = (rng.standard_normal((length, HEAD_DIM)).astype(np.float32) * s for s in (1, 3))
    return (kv, score) if gated else (kv.astype(jnp.bfloat16).astype(np.float32), None)


@pytest.mark.parametrize("ratio, rounds", [(1, True), (2, True), (2, False)])
def test_entries_are_the_torch_form_in_any_chunking(ratio, rounds):
    """Two requests in chunks that cut pairs, in one batch, among padding rows of NaN; the state holds NaN before."""
    gated = ratio == 2
    norm_weight = np.random.default_rng(9).uniform(0.5, 1.5, HEAD_DIM).astype(np.float32)
    lengths, req_rows = (17, 12), (2, 0)
    tokens = [some_tokens(seed, length, gated=gated) for seed, length in enumerate(lengths)]
    state = None
    if gated:
        state = jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan), CompressorState.zeros(MAX_REQUESTS, ratio=2, head_dim=HEAD_DIM)
        )
        assert state.kv.shape == (MAX_REQUESTS, 2, HEAD_DIM)
    step = jax.jit(compress_kv, static_argnames=("ratio", "norm_eps", "round_pooled"), donate_argnums=0)
    found, done = [{}, {}], [0, 0]
    for chunks in ((1, 0), (1, 3), (6, 2), (3, 1), (0, 5), (6, 1)):
        kv, score = (np.full((ROWS, HEAD_DIM), np.nan, np.float32) for _ in range(2))
        positions, request, starts, where = np.full(ROWS, -1, np.int32), np.full(ROWS, 1, np.int32), [0], {}
        for r, count in enumerate(chunks):
            rows, of = slice(starts[-1], starts[-1] + count), slice(done[r], done[r] + count)
            kv[rows], positions[rows], request[rows] = tokens[r][0][of], np.arange(ROWS)[of], req_rows[r]
            if gated:
                score[rows] = tokens[r][1][of]
            where |= {rows.start + i: (r, done[r] + i) for i in range(count)}
            starts, done[r] = [*starts, rows.stop], done[r] + count
        entries, rows, state = step(
            state,
            jnp.asarray(kv, jnp.float32 if gated else jnp.bfloat16),
            jnp.asarray(score) if gated else None,
            positions=positions,
            req_rows=request,
            query_start_loc=np.array(starts, np.int32),
            ape=None,
            norm_weight=norm_weight,
            inv_freq=NO_ROPE,
            ratio=ratio,
            round_pooled=rounds,
        )
        complete = [row for row, (_, position) in where.items() if (position + 1) % ratio == 0]
        np.testing.assert_array_equal(rows, complete + [-1] * (len(rows) - len(complete)))
        assert not np.asarray(entries, np.float32)[len(complete) :].any() and entries.dtype == jnp.bfloat16
        for row, entry in zip(complete, np.asarray(entries)):
            r, position = where[row]
            found[r][position // ratio] = entry
    assert done == list(lengths) and (state is None) == (ratio == 1)
    for r in range(2):
        got = np.stack([found[r][group] for group in range(lengths[r] // ratio)])
        assert_rounded_alike(got, torch_entries(*tokens[r], norm_weight, rounds=rounds))


def test_rope_after_the_compressor_stands_at_the_first_token():
    """As the layer does it: the rounded entry is rotated, at the position of the even token."""
    kv, score = some_tokens(5, ROWS, gated=True)
    state = CompressorState.zeros(1, ratio=2, head_dim=HEAD_DIM)
    positions = np.arange(ROWS, dtype=np.int32)
    common = dict(positions=positions, req_rows=0 * positions, query_start_loc=np.array([0, ROWS], np.int32), ape=None)
    entries, rows, _ = compress_kv(
        state, kv, score, **common, norm_weight=np.ones(HEAD_DIM, np.float32), inv_freq=NO_ROPE, ratio=2
    )
    first = (np.asarray(rows)[: ROWS // 2] - 1).astype(np.int32)
    got = rope_interleaved(entries[: ROWS // 2], first, INV_FREQ)
    want = torch_rope(np.asarray(entries[: ROWS // 2], np.float32), np.arange(0, ROWS, 2))
    assert_rounded_alike(got, want)


def test_rope_far_from_the_start():
    """An angle is the float32 product of position and frequency, as torch's is."""
    x = np.random.default_rng(6).standard_normal((6, HEAD_DIM)).astype(jnp.bfloat16).astype(np.float32)
    positions = np.array([0, 127, 65_535, 70_000, 1_000_000, 3], np.int32)
    turned = rope_interleaved(x, positions, INV_FREQ)
    np.testing.assert_allclose(turned, torch_rope(x, positions), rtol=2**-8, atol=1e-4)


def test_a_state_without_a_gate_is_refused():
    positions = np.zeros(2, np.int32)
    arguments = dict(
        positions=positions,
        req_rows=positions,
        query_start_loc=np.array([0, 2], np.int32),
        norm_weight=np.ones(4, np.float32),
        inv_freq=NO_ROPE,
    )
    kv = np.ones((2, 4), np.float32)
    state = CompressorState.zeros(1, ratio=1, head_dim=4)
    with pytest.raises(ValueError, match="compress_kv: state and ape must be None where score is"):
        compress_kv(state, kv, None, ape=None, ratio=1, **arguments)
    with pytest.raises(TypeError, match="compress_kv: state must be a CompressorState, got NoneType"):
        compress_kv(None, kv, None, ape=None, ratio=2, **arguments)
    with pytest.raises(TypeError, match=r"compress_kv: score must be .*, got None"):
        compress_kv(CompressorState.zeros(1, ratio=2, head_dim=4), kv, None, ape=None, ratio=2, **arguments)
    with pytest.raises(TypeError, match="compress_kv: round_pooled must be a static bool, got int"):
        compress_kv(state, kv, kv, ape=None, ratio=1, round_pooled=1, **arguments)
