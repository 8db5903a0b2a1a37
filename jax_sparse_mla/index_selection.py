"""From index queries to the selected entries in bounded memory: rows go through in chunks.

The logits of a prefill chunk over a long context are the largest array of a model's step: 8,192 rows of a context of
1,048,576 entries are 32 GiB. Here only `SCRATCH_BYTES` of them exist at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla._checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.indexer import INDEX_DIM, IndexKeys, check_index_cache, index_logits, page_size_of
from jax_sparse_mla.indices import TopkTransform, topk_transform

# Bytes of the logits that exist at a time. Plain JAX keeps a few arrays of this size; on a GPU chunks of so many bytes
# are still hundreds of rows, which fill it.
SCRATCH_BYTES = 256 << 20


def index_topk(
    q: jax.Array,
    weights: jax.Array,
    index_cache: jax.Array | IndexKeys,
    page_table: jax.Array,
    lengths: jax.Array,
    topk: int,
    *,
    method: TopkTransform,
    kv_page_table: jax.Array | None = None,
    page_size: int = 1,
    row_to_request: jax.Array | None = None,
    topk_indices_offset: jax.Array | None = None,
) -> jax.Array:
    """The entries of `topk_transform(index_logits(q, weights, index_cache, page_table, lengths), lengths, topk, …)`.

    Ties included, they are the same, but an array `[rows, columns]` is never made: memory beside the arguments and the
    result does not grow with the rows. Where all logits fit `SCRATCH_BYTES`, as in a decode step, there is one chunk.

    Args:
      q, weights, index_cache, lengths: as in `index_logits`.
      page_table: int32 `[rows, P]`, the pages of each row's keys; with `row_to_request` `[R, P]`, of each request's.
      topk: how many entries, at least 1 (static).
      method: PAGED or RAGGED (static), as in `topk_transform`.
      kv_page_table: int32, the transform's `page_table` (PAGED): a row for each row, with `row_to_request` for each
        request.
      page_size: entries per page of `kv_page_table`, at least 1 (static).
      row_to_request: int32 `[rows]`, each row's row in both page tables. A row outside them has no keys.
      topk_indices_offset: int32 `[rows]` (RAGGED), as in `topk_transform`.

    Returns:
      int32 `[rows, topk]`, padded with −1.

    Raises:
      TypeError: a wrong dtype, a method that is not a TopkTransform.
      ValueError: shapes that do not agree, PAGED without `kv_page_table`, RAGGED without `topk_indices_offset`.
    """
    check = ArgumentChecks("index_topk")
    rows_of = {
        "q": check("q", q, ("rows", "heads", INDEX_DIM), (jnp.float8_e4m3fn, *FLOATS)),
        "weights": check("weights", weights, ("rows", "heads"), FLOAT32),
        "lengths": check("lengths", lengths, ("rows",), INT32),
        "request": check.optional("row_to_request", row_to_request, ("rows",), INT32),
        "offset": check.optional("topk_indices_offset", topk_indices_offset, ("rows",), INT32),
    }
    index_cache = check_index_cache(check, index_cache)
    requests = "rows" if row_to_request is None else "requests"
    page_table = check("page_table", page_table, (requests, None), INT32)
    kv_page_table = check.optional("kv_page_table", kv_page_table, (requests, None), INT32)
    topk = check.static_int("topk", topk, minimum=1)
    page_size = check.static_int("page_size", page_size, minimum=1)
    if not isinstance(method, TopkTransform):
        raise TypeError(f"index_topk: method must be TopkTransform.PAGED or TopkTransform.RAGGED, got {method!r}")
    needed = "kv_page_table" if method is TopkTransform.PAGED else "topk_indices_offset"
    if {"kv_page_table": kv_page_table, "topk_indices_offset": topk_indices_offset}[needed] is None:
        raise check.fail(f"{needed} is missing, and {method} needs it")
    if row_to_request is None:
        rows_of["request"] = jnp.arange(lengths.shape[0], dtype=jnp.int32)

    def some(rows_of):
        request = rows_of["request"]
        pages = jnp.where(
            _names_a_row(request, page_table)[:, None], page_table[jnp.clip(request, 0, len(page_table) - 1)], -1
        )
        logits = index_logits(rows_of["q"], rows_of["weights"], index_cache, pages, rows_of["lengths"])
        return topk_transform(
            logits,
            rows_of["lengths"],
            topk,
            method=method,
            page_table=kv_page_table,
            page_size=page_size,
            row_to_request=request,
            topk_indices_offset=rows_of["offset"],
        )

    rows, capacity = lengths.shape[0], page_table.shape[1] * page_size_of(index_cache)
    chunk = max(1, SCRATCH_BYTES // max(1, 4 * capacity))
    if rows <= chunk or len(page_table) == 0:
        return some(rows_of) if len(page_table) else jnp.full((rows, topk), -1, jnp.int32)
    chunks = -(-rows // chunk)
    chunk = -(-rows // chunks)
    # The last rows again where they do not fill a chunk: their entries are the same.
    first = jnp.minimum(jnp.arange(chunks, dtype=jnp.int32) * chunk, rows - chunk)

    def one_chunk(start, entries):
        share = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first[start], chunk), rows_of)
        return lax.dynamic_update_slice(entries, some(share), (first[start], 0))

    return lax.fori_loop(0, chunks, one_chunk, jnp.full((rows, topk), -1, jnp.int32))


def _names_a_row(request: jax.Array, table: jax.Array) -> jax.Array:
    return (request >= 0) & (request < table.shape[0])
