"""From index queries to the selected entries in bounded memory: rows go through in chunks.

The logits of a prefill chunk over a long context are the largest array of a model's step: 8,192 rows of a context of
1,048,576 entries are 32 GiB. Here only `SCRATCH_BYTES` of them exist at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.indexer.logits import (
    INDEX_DIM,
    INVARIANT_ROWS,
    IndexKeys,
    as_index_keys,
    check_index_cache,
    check_logits,
    logits_of,
)
from jax_sparse_mla.indices import TopkTransform, topk_transform
from jax_sparse_mla.launch.transforms import shared
from jax_sparse_mla.sharding import PartitionRule

# Bytes of the logits that exist at a time; plain JAX keeps a few arrays of this size.
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

    An array `[rows, columns]` is never made: memory beside the arguments and the result does not grow with the rows.
    Where all logits fit `SCRATCH_BYTES`, as in a decode step, there is one chunk. Of equal logits the entries are the
    same, ties included; the last bits of a logit may depend on how many rows are computed together.

    Args:
      q, weights, index_cache, lengths: as in `index_logits`.
      page_table: int32 `[rows, P]`, the pages of each row's keys; with `row_to_request` `[R, P]`, of each request's.
      topk: how many entries, at least 1 (static).
      method: PAGED or RAGGED (static), as in `topk_transform`.
      kv_page_table: int32, the transform's `page_table` (PAGED): a row for each row, with `row_to_request` for each
        request.
      page_size: entries per page of `kv_page_table`, at least 1 (static).
      row_to_request: int32 `[rows]`, each row's row in both page tables. A row outside them has no entries.
      topk_indices_offset: int32 `[rows]` (RAGGED), as in `topk_transform`.

    Returns:
      int32 `[rows, topk]`, padded with −1.

    Raises:
      TypeError: a wrong dtype, a method that is not a TopkTransform.
      ValueError: shapes that do not agree, PAGED without `kv_page_table`, RAGGED without `topk_indices_offset`.
    """
    check = ArgumentChecks("index_topk")
    arrays = q, weights, index_cache, page_table, lengths
    rows_of, index_cache, page_table = _checked(check, *arrays, row_to_request, topk_indices_offset)
    requests = "rows" if row_to_request is None else "requests"
    kv_page_table = check.optional("kv_page_table", kv_page_table, (requests, None), INT32)
    topk = check.static_int("topk", topk, minimum=1)
    page_size = check.static_int("page_size", page_size, minimum=1)
    if not isinstance(method, TopkTransform):
        raise TypeError(f"index_topk: method must be TopkTransform.PAGED or TopkTransform.RAGGED, got {method!r}")
    needed = "kv_page_table" if method is TopkTransform.PAGED else "topk_indices_offset"
    if {"kv_page_table": kv_page_table, "topk_indices_offset": topk_indices_offset}[needed] is None:
        raise check.fail(f"{needed} is missing, and {method} needs it")
    selection = Selection(topk, method, page_size, False, SCRATCH_BYTES)
    return _index_topk(rows_of, index_cache, page_table, kv_page_table, selection=selection)


def selected_positions(
    q, weights, index_cache, page_table, lengths, topk: int, *, row_to_request=None, batch_invariant: bool = False
) -> jax.Array:
    """The positions of the top-k, by `index_topk`.

    Args:
      batch_invariant: a row's logits do not depend, to the bit, on how many rows there are: never more than
        `INVARIANT_ROWS` are computed together, by the kernels of a decode step (static).
    """
    arrays, none = (q, weights, index_cache, page_table, lengths), jnp.zeros_like(lengths)
    rows_of, index_cache, page_table = _checked(ArgumentChecks("index_topk"), *arrays, row_to_request, none)
    selection = Selection(topk, TopkTransform.RAGGED, 1, bool(batch_invariant), SCRATCH_BYTES)
    return _index_topk(rows_of, index_cache, page_table, None, selection=selection)


def _checked(check: ArgumentChecks, q, weights, index_cache, page_table, lengths, row_to_request, offset) -> tuple:
    """The arrays of rows, the index keys and the pages, as jax arrays."""
    rows_of = {
        "q": check("q", q, ("rows", "heads", INDEX_DIM), (jnp.float8_e4m3fn, *FLOATS)),
        "weights": check("weights", weights, ("rows", "heads"), FLOAT32),
        "lengths": check("lengths", lengths, ("rows",), INT32),
        "request": check.optional("row_to_request", row_to_request, ("rows",), INT32),
        "offset": check.optional("topk_indices_offset", offset, ("rows",), INT32),
    }
    index_cache = check_index_cache(check, index_cache)
    requests = "rows" if row_to_request is None else "requests"
    page_table = check("page_table", page_table, (requests, None), INT32)
    if row_to_request is None:
        rows_of["request"] = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    return rows_of, index_cache, page_table


class Selection(NamedTuple):
    """The static options of `index_topk` and `selected_positions`, and the bytes of logits at a time."""

    topk: int
    method: TopkTransform
    page_size: int
    batch_invariant: bool
    scratch_bytes: int


@functools.partial(jax.jit, static_argnames="selection")
def _index_topk(rows_of, index_cache, page_table, kv_page_table, *, selection):
    select = functools.partial(_by_chunks, selection)
    of_rows = jax.tree.map(lambda _: P("rows"), rows_of)
    rule = PartitionRule((of_rows, P(), P(), None if kv_page_table is None else P()), P("rows"))
    return shared(select, rule)(rows_of, index_cache, page_table, kv_page_table)


def _by_chunks(selection, rows_of, index_cache, page_table, kv_page_table):
    topk, batch_invariant = selection.topk, selection.batch_invariant
    requests, width = page_table.shape
    (rows,), capacity = rows_of["lengths"].shape, width * as_index_keys(index_cache).page_size
    if requests == 0:
        return jnp.full((rows, topk), -1, jnp.int32)

    def chunk(rows_of):
        request = rows_of["request"]
        known = (request >= 0) & (request < requests)
        pages = jnp.where(known[:, None], page_table[jnp.clip(request, 0, requests - 1)], -1)
        lengths = jnp.where(known, rows_of["lengths"], 0)
        arguments = rows_of["q"], rows_of["weights"], index_cache, pages, lengths
        rows_of_call = None if batch_invariant else rows
        # The top-k reads nothing past a length.
        logits = logits_of(*arguments, rows_of_call=rows_of_call, fill=False, alone=batch_invariant)
        return topk_transform(
            logits,
            lengths,
            topk,
            method=selection.method,
            page_table=kv_page_table,
            page_size=selection.page_size,
            row_to_request=request,
            topk_indices_offset=rows_of["offset"],
        )

    return in_chunks(chunk, rows_of, rows_at_once(capacity, selection.scratch_bytes, batch_invariant))


def logits_at_once(q, weights, index_cache, page_table, lengths, *, batch_invariant: bool = False) -> jax.Array | None:
    """The logits of a decode step, for a top-k, which reads none past a row's length: there they may be anything.

    Arguments and errors as of `index_logits`, `batch_invariant` as of `selected_positions`. None where the logits are
    too many for one array, or the rows too many to be computed together.
    """
    check_logits(ArgumentChecks("index_logits"), q, weights, index_cache, page_table, lengths)
    capacity = page_table.shape[1] * as_index_keys(index_cache).page_size
    if q.shape[0] > rows_at_once(capacity, SCRATCH_BYTES, batch_invariant):
        return None
    return logits_of(q, weights, index_cache, page_table, lengths, fill=False, alone=batch_invariant)


def rows_at_once(width: int, scratch_bytes: int, batch_invariant: bool = False) -> int:
    """Rows of which float32 `[rows, width]` takes `scratch_bytes` at most, and that may be computed together."""
    fit = max(1, scratch_bytes // max(1, 4 * width))
    return min(fit, INVARIANT_ROWS) if batch_invariant else fit


def in_chunks(function: Callable[[Any], Any], rows_of: Any, chunk: int) -> Any:
    """`function(rows_of)`, both of pytrees of arrays `[rows, …]`, of at most `chunk` rows at a time."""
    rows = jax.tree.leaves(rows_of)[0].shape[0]
    if rows <= chunk:
        return function(rows_of)
    chunks = -(-rows // chunk)
    # The last chunk begins earlier where the rows do not fill it; what it selects again is left out.
    first = jnp.minimum(jnp.arange(chunks, dtype=jnp.int32) * chunk, rows - chunk)
    results = lax.map(
        lambda start: function(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, chunk), rows_of)), first
    )
    left = rows - (chunks - 1) * chunk

    def joined(x):
        return jnp.concatenate([x[:-1].reshape(-1, *x.shape[2:]), x[-1, chunk - left :]])

    return jax.tree.map(joined, results)
