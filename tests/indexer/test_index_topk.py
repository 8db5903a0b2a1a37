"""`index_topk`: the entries of the logits' top-k, without the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_sparse_mla as mla
from jax_sparse_mla.indexer import select as index_selection
from jax_sparse_mla.indexer.logits import IndexKeys

PAGED, RAGGED = mla.TopkTransform.PAGED, mla.TopkTransform.RAGGED
PAGES, PAGE_SIZE, REQUESTS, WIDTH, TOPK = 12, 16, 3, 5, 24
ROWS = 11


@functools.partial(jax.jit, static_argnames=("method",))
def by_logits(q, weights, cache, page_table, lengths, kv_page_table, row_to_request, offset, *, method):
    pages = page_table[row_to_request]
    logits = mla.index_logits(q, weights, cache, pages, lengths)
    return mla.topk_transform(
        logits,
        lengths,
        TOPK,
        method=method,
        page_table=kv_page_table,
        page_size=8,
        row_to_request=row_to_request,
        topk_indices_offset=offset,
    )


def arguments(seed: int):
    """Small whole numbers, so that many logits tie; tables with holes, hostile lengths."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-1, 2, (PAGES * PAGE_SIZE, 128)).astype(np.float32)
    cache = mla.write_index_k(
        jnp.full((PAGES, PAGE_SIZE * 132), 0xFF, jnp.uint8),
        jnp.arange(len(keys), dtype=jnp.int32),
        jax.device_put(keys),
    )
    q = jax.device_put(rng.integers(-1, 2, (ROWS, 2, 128)).astype(jnp.float8_e4m3fn))
    weights = jax.device_put(rng.integers(-1, 3, (ROWS, 2)).astype(np.float32))
    table = rng.integers(-1, PAGES + 1, (REQUESTS, WIDTH)).astype(np.int32)
    lengths = rng.choice([0, 1, TOPK - 1, TOPK, TOPK + 1, 50, 80, 81, -3, 2**31 - 1], ROWS).astype(np.int32)
    kv_table = rng.integers(-1, 40, (REQUESTS, 10)).astype(np.int32)
    request, offset = (rng.integers(0, n, ROWS).astype(np.int32) for n in (REQUESTS, 1000))
    return q, weights, cache, *map(jax.device_put, (table, lengths, kv_table, request, offset))


scratch = pytest.mark.parametrize("rows_at_a_time", [1, 4, 100])


@scratch
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), method=st.sampled_from([PAGED, RAGGED]))
def test_it_is_the_top_k_of_the_logits(rows_at_a_time, seed, method):
    q, weights, cache, table, lengths, kv_table, request, offset = arguments(seed)
    want = by_logits(q, weights, cache, table, lengths, kv_table, request, offset, method=method)
    got = in_chunks(rows_at_a_time)(q, weights, cache, table, lengths, kv_table, request, offset, method=method)
    np.testing.assert_array_equal(got, want)


@functools.cache
def in_chunks(rows: int):
    def run(q, weights, cache, table, lengths, kv_table, request, offset, *, method):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index_selection, "SCRATCH_BYTES", 4 * WIDTH * PAGE_SIZE * rows)
            options = {"kv_page_table": kv_table, "page_size": 8, "row_to_request": request}
            return mla.index_topk(
                q, weights, cache, table, lengths, TOPK, method=method, topk_indices_offset=offset, **options
            )

    return jax.jit(run, static_argnames="method")


def test_a_table_of_each_row_and_a_view_of_a_layer():
    q, weights, cache, table, lengths, kv_table, request, offset = arguments(1)
    want = by_logits(q, weights, cache, table, lengths, kv_table, request, offset, method=PAGED)
    pool = IndexKeys(data=jnp.concatenate([jnp.full_like(cache, 0xFF), cache]), num_layers=2).layer(1)
    got = mla.index_topk(
        q, weights, pool, table[request], lengths, TOPK, method=PAGED, kv_page_table=kv_table[request], page_size=8
    )
    np.testing.assert_array_equal(got, want)


def test_a_request_that_is_in_no_table_has_no_keys():
    q, weights, cache, table, lengths, kv_table, request, _ = arguments(2)
    hostile = jnp.asarray([-1, REQUESTS, 2**31 - 1, -(2**31), *request[4:]], jnp.int32)
    options = {"method": PAGED, "kv_page_table": kv_table, "page_size": 8}
    got = mla.index_topk(q, weights, cache, table, lengths, TOPK, row_to_request=hostile, **options)
    want = mla.index_topk(q, weights, cache, table, lengths, TOPK, row_to_request=request, **options)
    np.testing.assert_array_equal(got[:4], -1)
    np.testing.assert_array_equal(got[4:], want[4:])


@pytest.mark.parametrize("rows, requests", [(0, 3), (4, 0)])
def test_nothing_to_select(rows, requests):
    got = mla.index_topk(
        jnp.zeros((rows, 2, 128), jnp.float8_e4m3fn),
        jnp.zeros((rows, 2)),
        jnp.zeros((PAGES, PAGE_SIZE * 132), jnp.uint8),
        jnp.zeros((requests, WIDTH), jnp.int32),
        jnp.full(rows, 7, jnp.int32),
        TOPK,
        method=PAGED,
        kv_page_table=jnp.zeros((requests, 4), jnp.int32),
        row_to_request=jnp.zeros(rows, jnp.int32),
    )
    assert got.shape == (rows, TOPK) and not np.any(got != -1)


def test_a_long_context_needs_less_than_a_gib():
    """8,192 rows of one request of 1,048,576 entries, whose logits would be 32 GiB. Compiled, not run."""
    rows, pages = 8192, 1 << 14
    shapes = [
        jax.ShapeDtypeStruct((rows, 64, 128), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows, 64), jnp.float32),
        jax.ShapeDtypeStruct((pages + 1, 64 * 132), jnp.uint8),
        jax.ShapeDtypeStruct((1, pages), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    ]

    def select(q, weights, cache, table, lengths, request):
        options = {"method": PAGED, "kv_page_table": table, "page_size": 64, "row_to_request": request}
        return mla.index_topk(q, weights, cache, table, lengths, 512, **options)

    memory = jax.jit(select).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**30
