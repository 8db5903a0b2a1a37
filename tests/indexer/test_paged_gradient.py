"""The gradient of paged `index_logits` in queries and weights, beside float64 autodiff, and its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from index_gradient import HOSTILE

from jax_sparse_mla import index_logits, write_index_k
from jax_sparse_mla.indexer import gradient
from jax_sparse_mla.indexer import logits as indexer
from jax_sparse_mla.indexer.keys import INDEX_DIM, IndexFormat
from jax_sparse_mla.indexer.logits import CHUNK_BYTES, IndexKeys, gather_index_k

pytestmark = pytest.mark.torch
DTYPES = "float32", "bfloat16", "float8_e4m3fn"


def oracle(q, weights, keys, seen, g):
    """The gradients of Σ g · logit over the logits that are seen, in float64; keys `[rows, columns, 128]`."""
    q, weights, keys = (torch.tensor(np.asarray(x, np.float64)) for x in (q, weights, keys))
    q.requires_grad_(), weights.requires_grad_()
    logits = (torch.relu(torch.einsum("rhd,rcd->rhc", q, keys)) * weights[..., None]).sum(1)
    (logits * torch.tensor(np.where(seen, np.asarray(g, np.float64), 0.0))).sum().backward()
    return q.grad.numpy(), weights.grad.numpy()


def gradients(q, weights, cache, table, lengths, g):
    _, pull = jax.vjp(lambda q, weights: index_logits(q, weights, cache, table, lengths), q, weights)
    return pull(g)


def case(rng, rows, heads, pages, page_size=8, dtype="float32", format=IndexFormat.FP8, lengths=None):
    """Arguments and g, the keys that each row sees, and which columns those are; what no row sees is NaN."""
    num_pages = 2 * pages + 1
    poison = jnp.full((3 * num_pages, page_size * format.key_bytes), 0xFF, jnp.uint8)
    cache = IndexKeys(data=poison, num_layers=3, format=format).layer(1)
    slots = jnp.arange(page_size, num_pages * page_size, dtype=jnp.int32)  # page 0 stays NaN
    cache = write_index_k(cache, slots, jnp.asarray(rng.standard_normal((len(slots), INDEX_DIM)), jnp.float32))
    table = rng.integers(1, num_pages, (rows, pages))
    table[rng.random(table.shape) < 0.2] = rng.choice([-1, num_pages, 2**31 - 1])
    lengths = rng.integers(-2, pages * page_size + 9, rows) if lengths is None else lengths
    columns = np.arange(pages * page_size)
    is_page = (table >= 0) & (table < num_pages)
    seen = np.repeat(is_page, page_size, 1) & (columns < np.asarray(lengths, np.int64)[:, None])
    at = np.repeat(np.where(is_page, table, 1), page_size, 1) * page_size + columns % page_size
    values, scales = gather_index_k(cache, jnp.asarray(at.reshape(-1), jnp.int32))
    scales = np.asarray(scales, np.float64).reshape(len(values), -1)  # of 128 numbers, or of 32
    keys = np.asarray(values, np.float64) * np.repeat(scales, INDEX_DIM // scales.shape[1], 1)
    q = jnp.asarray(rng.standard_normal((rows, heads, INDEX_DIM)), jnp.float32).astype(dtype)
    weights = jnp.asarray(rng.standard_normal((rows, heads)), jnp.float32)
    g = jnp.asarray(np.where(seen, rng.standard_normal(seen.shape), np.nan), jnp.float32)
    arguments = q, weights, cache, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32), g
    return arguments, keys.reshape(*at.shape, INDEX_DIM), seen


def check(arguments, keys, seen, found):
    q, weights, *_, g = arguments
    # 2^-4 is half a unit of FP8's last place, in which a gradient of FP8 queries comes.
    rounding = {"float32": 1e-5, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}[q.dtype.name]
    products = np.einsum("rhd,rcd->rhc", *(np.abs(np.asarray(x, np.float64)) for x in (q, keys)))
    least = 1e-6 * (products * np.where(seen, np.abs(g), 0)[:, None]).sum(2), 2.0**-9 if rounding > 0.01 else 1e-4
    for x, wanted, tolerance, atol, of in zip(
        found, oracle(q, weights, keys, seen, g), (rounding, 1e-5), least[::-1], (q, weights), strict=True
    ):
        assert x.dtype == of.dtype
        assert (np.abs(np.asarray(x, np.float64) - wanted) <= tolerance * np.abs(wanted) + atol).all()
    assert not np.asarray(found[0], np.float32)[~seen.any(1)].any()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 1, 1), (5, 3, 4), (9, 16, 7)]),
    dtype=st.sampled_from(DTYPES),
    format=st.sampled_from([IndexFormat.FP8, IndexFormat.FP4]),
)
def test_the_gradient_is_that_of_float64(seed, shape, dtype, format):
    arguments, keys, seen = case(np.random.default_rng(seed), *shape, dtype=dtype, format=format)
    check(arguments, keys, seen, gradients(*arguments))


@pytest.mark.parametrize("budget", [1, 40_000, 100_000])
def test_blocks_of_any_size(budget, monkeypatch):
    monkeypatch.setattr(indexer, "CHUNK_BYTES", budget)
    for rows in (1, 5, 8):
        arguments, keys, seen = case(np.random.default_rng(budget), rows, 4, 7)
        check(arguments, keys, seen, gradient._gradient(*arguments))


def test_lengths_of_any_value():
    arguments, keys, seen = case(np.random.default_rng(1), len(HOSTILE), 2, 3, lengths=HOSTILE)
    check(arguments, keys, seen, gradients(*arguments))


def test_a_row_without_a_key_and_empty_shapes():
    for rows, pages in ((0, 2), (3, 0)):
        q, weights = jnp.ones((rows, 2, INDEX_DIM)), jnp.ones((rows, 2))
        table, lengths = jnp.zeros((rows, pages), jnp.int32), jnp.full(rows, 9, jnp.int32)
        dq, dw = gradients(q, weights, jnp.zeros((1, 8 * 132), jnp.uint8), table, lengths, jnp.ones((rows, pages * 8)))
        assert dq.shape == q.shape and dw.shape == weights.shape and not dq.any() and not dw.any()


def test_a_bare_cache_under_jit_vmap_and_in_a_loss():
    (q, weights, cache, table, lengths, g), keys, seen = case(np.random.default_rng(2), 6, 4, 3)
    bare, g = cache.data[cache.num_pages : 2 * cache.num_pages], jnp.where(seen, g, 0)

    def loss(q, weights, table, lengths, g):
        logits = index_logits(q, weights, bare, table, lengths)
        return jnp.sum(jnp.where(jnp.isneginf(logits), 0, logits * g))

    arguments = q, weights, table, lengths, g
    found = jax.jit(jax.grad(loss, (0, 1)))(*arguments)
    check((q, weights, cache, table, lengths, g), keys, seen, found)
    halves = [x.reshape(2, 3, *x.shape[1:]) for x in arguments]
    for x, wanted in zip(jax.vmap(jax.grad(loss, (0, 1)))(*halves), found, strict=True):
        np.testing.assert_allclose(x.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-4)


def test_under_shard_map():
    """Weights that all devices have get the sum of their gradients."""
    (q, weights, cache, table, lengths, g), keys, seen = case(np.random.default_rng(3), 4, 4, 3)
    bare, g = cache.data[cache.num_pages : 2 * cache.num_pages], jnp.where(seen, g, 0)
    weights = jnp.broadcast_to(weights[:1], weights.shape)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    def loss(q, weights, table, lengths, g):
        logits = index_logits(q, jnp.broadcast_to(weights, q.shape[:2]), bare, table, lengths)
        return jax.lax.psum(jnp.sum(jnp.where(jnp.isneginf(logits), 0, logits * g)), "rows")

    cut = jax.shard_map(loss, mesh=mesh, in_specs=(rows, whole, rows, rows, rows), out_specs=whole)
    dq, dw = jax.grad(cut, (0, 1))(q, weights[:1], table, lengths, g)
    wanted = gradients(q, weights, cache, table, lengths, g)
    check((q, weights, cache, table, lengths, g), keys, seen, (dq, wanted[1]))
    np.testing.assert_allclose(dw, wanted[1].sum(0, keepdims=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "pages"), [(4096, 1024), (64, 16384)], ids=["chunk", "million"])
def test_memory(rows, pages):
    """4,096 rows of 65,536 keys and 64 heads, whose scores would be 64 GiB; compiled, not run. Beside the arguments and
    results there are some blocks, the padded g, and the results in float32."""
    heads, columns = 64, pages * 64
    given = [
        jax.ShapeDtypeStruct((rows, heads, INDEX_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        jax.ShapeDtypeStruct((pages, 64 * 132), jnp.uint8),
        jax.ShapeDtypeStruct((rows, pages), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
    ]
    used = jax.jit(gradient.index_logits_gradient).lower(*given).compile().memory_analysis().temp_size_in_bytes
    in_float32, of_g = 4 * rows * heads * INDEX_DIM, 4 * rows * columns
    assert used < 3 * in_float32 + 2 * of_g + 8 * CHUNK_BYTES, used / CHUNK_BYTES
    assert used < rows * heads * columns

    def loss(q, weights, cache, table, lengths, g):
        logits = index_logits(q, weights, cache, table, lengths)
        return jnp.sum(jnp.where(jnp.isneginf(logits), 0, logits * g))

    whole = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile().memory_analysis().temp_size_in_bytes
    assert whole < 3 * in_float32 + 5 * of_g + 8 * CHUNK_BYTES, whole / CHUNK_BYTES
