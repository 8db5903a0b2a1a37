"""KPool: index keys of pools of tokens, and the tokens of selected pools; against numpy and transformers' indexer."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_sparse_mla.compressor.pools import pool_keys
from jax_sparse_mla.compressor.state import CompressorState
from jax_sparse_mla.indices import expand_pools, topk_positions

POOL, DIM, MAX_REQUESTS, INT_MAX = 4, 128, 5, 2**31 - 1
REQUEST_ROWS = (3, 0, 4)


def new_state(num_layers=1):
    state = CompressorState.zeros(MAX_REQUESTS, ratio=POOL, head_dim=DIM, num_layers=num_layers, overlap=False)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state)  # what an earlier request left


def keys_by_hand(k, score, ape):
    """float64 `[pools, DIM]` of a request's tokens."""
    k, score = (np.asarray(x, np.float64)[: len(x) // POOL * POOL].reshape(-1, POOL, DIM) for x in (k, score))
    weights = np.exp(score + ape)
    return (weights * k).sum(1) / weights.sum(1)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_any_chunking_gives_the_formula(dtype):
    """Three requests in changing order and chunks, in steps of one shape; the state is the middle layer of three."""
    rng = np.random.default_rng(0)
    lengths, num_rows, ape = (29, 17, 3), 12, rng.standard_normal((POOL, DIM)).astype(np.float32)
    tokens = [rng.standard_normal((2, n, DIM)).astype(dtype) for n in lengths]
    state, done, found = new_state(3).layer(1), [0, 0, 0], {}
    while any(d < n for d, n in zip(done, lengths)):
        k, score = rng.standard_normal((2, num_rows, DIM)).astype(dtype)
        positions, req_rows = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.int32)
        owners, at = [None] * num_rows, 0
        for r in rng.permutation(3):
            count = min(int(rng.integers(0, 8)), lengths[r] - done[r], num_rows - at)
            own, of_request = slice(at, at + count), slice(done[r], done[r] + count)
            k[own], score[own] = tokens[r][:, of_request]
            positions[own], req_rows[own] = np.arange(done[r], done[r] + count), REQUEST_ROWS[r]
            owners[own] = [r] * count
            at, done[r] = at + count, done[r] + count
        step = {"positions": positions, "req_rows": req_rows, "ape": ape, "pool": POOL, "num_requests": 3}
        keys, rows, state = pool_keys(state, k, score, **step)
        assert keys.shape == (num_rows // POOL + 3, DIM) and keys.dtype == jnp.float32
        for key, row in zip(np.asarray(keys), np.asarray(rows)):
            if row < 0:
                assert not key.any()
            else:
                found[owners[row], int(positions[row]) // POOL] = key
    assert sorted(found) == [(r, g) for r, n in enumerate(lengths) for g in range(n // POOL)]
    for (r, g), key in found.items():
        np.testing.assert_allclose(key, keys_by_hand(*tokens[r], ape)[g], rtol=2e-6, atol=2e-6)
    for of_layer in np.split(np.asarray(state.kv), 3)[::2]:
        assert np.isnan(of_layer).all()
    for r, row in enumerate(REQUEST_ROWS):
        last = [(lengths[r] - 1 - i) % POOL for i in range(min(POOL, lengths[r]))]
        wanted = tokens[r][0, ::-1][: len(last)].astype(np.float32)
        np.testing.assert_array_equal(np.asarray(state.kv)[MAX_REQUESTS + row, last], wanted)


def test_rejected_tokens_leave_the_ring_alone():
    """A ring of pool + drafts: what three rejected tokens wrote is not read when their positions come again."""
    rng = np.random.default_rng(1)
    k, score = rng.standard_normal((2, 9, DIM)).astype(np.float32)
    ape = np.zeros((POOL, DIM), np.float32)
    state = CompressorState.zeros(1, ratio=POOL, head_dim=DIM, ring=POOL + 3, overlap=False)

    def step(state, first, rows):
        options = {"req_rows": np.zeros(len(rows), np.int32), "ape": ape, "pool": POOL, "num_requests": 1}
        return pool_keys(
            state, *rows.swapaxes(0, 1), positions=np.arange(first, first + len(rows), dtype=np.int32), **options
        )

    tokens = np.stack([k, score], axis=1)
    _, _, state = step(state, 0, tokens[:6])
    _, _, state = step(state, 6, rng.standard_normal((3, 2, DIM)).astype(np.float32))
    keys, rows, _ = step(state, 6, tokens[6:])
    assert rows[0] == 1
    np.testing.assert_allclose(keys[0], keys_by_hand(k, score, ape)[1], rtol=2e-6, atol=2e-6)


def expanded_by_hand(pools, length, pool):
    tokens = [p * pool + i for p in pools if p >= 0 for i in range(pool)]
    tokens = [t if t <= INT_MAX else -1 for t in tokens]
    tokens += range(length - length % pool, length)
    return tokens + [-1] * (len(pools) * pool + pool - 1 - len(tokens))


@pytest.mark.parametrize("pool", [1, 4, 5])
def test_expanded_pools(pool):
    rng, k = np.random.default_rng(pool), 6
    lengths = np.array([0, -3, 1, pool - 1, pool, 6 * pool + 1, 40, 41, 42, 43, INT_MAX], np.int32)
    scores = rng.standard_normal((len(lengths), 64)).astype(np.float32)
    pools = np.asarray(topk_positions(scores, np.maximum(lengths, 0) // pool, k))
    got = np.asarray(expand_pools(pools, lengths, pool))
    assert got.shape == (len(lengths), k * pool + pool - 1)
    for row, of_row, length in zip(got, pools, np.maximum(lengths, 0).tolist()):
        np.testing.assert_array_equal(row, expanded_by_hand(of_row.tolist(), length, pool))
        count = min(length // pool * pool, k * pool) + length % pool
        assert (row >= 0).sum() == count and (row[:count] >= 0).all() and len(set(row[:count])) == count
    hostile = np.array([[0, INT_MAX // pool, INT_MAX]], np.int32)
    wanted = expanded_by_hand([0, INT_MAX // pool, INT_MAX], 0, pool)
    np.testing.assert_array_equal(expand_pools(hostile, np.zeros(1, np.int32), pool)[0], wanted)


def test_what_is_refused():
    k, ints = np.zeros((3, DIM), np.float32), np.zeros(3, np.int32)
    options = {"positions": ints, "req_rows": ints, "ape": np.zeros((POOL, DIM), np.float32)}
    options |= {"pool": POOL, "num_requests": 1}
    for state, changes, error, message in (
        (k, {}, TypeError, "state must be a CompressorState, got ndarray"),
        (new_state(2), {}, ValueError, "state holds 2 layers: pass the view of one"),
        (CompressorState.zeros(1, ratio=POOL, head_dim=DIM), {}, ValueError, r"state.kv must have shape .*128\]"),
        (
            CompressorState.zeros(1, ratio=3, head_dim=DIM),
            {},
            ValueError,
            "state must keep at least 4 tokens per request, got 3",
        ),
        (new_state(), {"ape": np.zeros((3, DIM), np.float32)}, ValueError, r"ape must have shape \[4, head_dim=128\]"),
        (new_state(), {"positions": np.zeros(3, np.int64)}, TypeError, "positions must be int32"),
        (new_state(), {"pool": 0}, ValueError, "pool must be >= 1, got 0"),
    ):
        with pytest.raises(error, match=f"pool_keys: {message}"):
            pool_keys(state, k, k, **options | changes)
    with pytest.raises(ValueError, match=r"expand_pools: lengths must have shape \[rows=2\], got \[3\]"):
        expand_pools(np.zeros((2, 4), np.int32), ints, 4)
    with pytest.raises(TypeError, match="expand_pools: pools must be int32"):
        expand_pools(np.zeros((3, 4), np.float32), ints, 4)


@pytest.mark.torch
def test_transformers_indexer():
    """Its pooled keys are ours, and of its scores our selection is its own, tails included."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    hidden, length, topk = 32, 75, 24
    sizes = {"hidden_size": hidden, "q_lora_rank": 16, "index_n_heads": 32, "num_hidden_layers": 4}
    config = modeling.Glm5NextTextConfig(**sizes, index_kpool=POOL, index_topk=topk)
    indexer = modeling.Glm5NextTextIndexer(config, 3)
    generator = torch.Generator().manual_seed(0)
    for parameter in indexer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    x, q_rank = (torch.randn(1, length, n, generator=generator) for n in (hidden, 16))
    with torch.no_grad():
        valid = torch.ones(1, length, dtype=torch.bool)
        wanted = indexer(x, q_rank, valid, None)[0].numpy()
        k = indexer.k_norm(indexer.wk(x))
        score = torch.nn.functional.linear(x, indexer.index_kpool_compress_gate)
        packed = torch.cat([k, score, valid[..., None]], dim=-1)
        pooled = indexer.get_pooled_states(packed)[0][0]
        q = indexer.wq_b(q_rank)[0].view(length, 32, DIM)
        per_head = torch.relu(torch.einsum("thd,pd->thp", q, pooled)) * DIM**-0.5
        scores = torch.einsum("thp,th->tp", per_head, indexer.weights_proj(x)[0]).numpy()
    options = {"positions": np.arange(length, dtype=np.int32), "req_rows": np.zeros(length, np.int32)}
    options |= {"ape": indexer.index_kpool_compress_ape.detach().numpy(), "pool": POOL, "num_requests": 1}
    keys, rows, _ = pool_keys(new_state(), k[0].numpy(), score[0].numpy(), **options)
    np.testing.assert_array_equal(rows, [*range(POOL - 1, length, POOL), -1])
    np.testing.assert_allclose(keys[:-1], pooled, rtol=1e-5, atol=1e-5)
    lengths = np.arange(1, length + 1, dtype=np.int32)
    got = np.asarray(expand_pools(topk_positions(scores, lengths // POOL, topk // POOL), lengths, POOL))
    assert got.shape == wanted.shape == (length, topk + POOL - 1)
    np.testing.assert_array_equal(np.sort(got, axis=1), np.sort(wanted, axis=1))
    assert (np.sum(got >= 0, axis=1) < lengths).sum() > 40
