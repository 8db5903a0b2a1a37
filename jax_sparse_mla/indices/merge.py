"""Merges two index lists into one, for a sparse kernel that reads both caches through a single table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.indices.lookup import add_or_minus_one, take_or_minus_one
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import launching

# Sparse prefill kernels scan indices in blocks of 64 or 128 (FlashMLA: 128 with 128 heads).
_WIDTH_MULTIPLE = 128


def merged_width(columns: int) -> int:
    """Columns of a merged list, for so many of its parts."""
    return -(-columns // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


def combine_swa_extra_indices(
    swa_indices: jax.Array,
    swa_lengths: jax.Array,
    extra_indices: jax.Array,
    extra_lengths: jax.Array,
    num_swa_rows: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One index list for a table that holds the sliding-window rows and, behind them, the extra rows.

    A row is `[SWA prefix | extra prefix + num_swa_rows | −1]`. Holes stay where they are; the order is kept.

    Args:
      swa_indices: int32 `[T, Ws]`; valid are `0 <= index < num_swa_rows`.
      swa_lengths: int32 `[T]`, how many leading columns count; clipped to `[0, Ws]`.
      extra_indices: int32 `[T, We]`, from 0 on; valid are indices >= 0 whose sum with `num_swa_rows` fits
        int32.
      extra_lengths: int32 `[T]`, clipped to `[0, We]`.
      num_swa_rows: rows that stand before the extra ones: an int >= 0 or an int32 scalar (data).

    Returns:
      `(indices, lengths)`: int32 `[T, width]` with `width` = `Ws + We` rounded up to a multiple of 128, −1
      for every invalid entry and past the length; int32 `[T]`, the two clipped lengths' sum, holes included.

    Raises:
      TypeError: an array that is not int32.
      ValueError: shapes that do not agree, an int `num_swa_rows` that is negative or does not fit int32.
    """
    check = ArgumentChecks("combine_swa_extra_indices")
    swa_indices = check("swa_indices", swa_indices, ("T", "Ws"), INT32)
    swa_lengths = check("swa_lengths", swa_lengths, ("T",), INT32)
    extra_indices = check("extra_indices", extra_indices, ("T", "We"), INT32)
    extra_lengths = check("extra_lengths", extra_lengths, ("T",), INT32)
    if isinstance(num_swa_rows, (int, np.integer)):
        num_swa_rows = jnp.int32(check.static_int("num_swa_rows", num_swa_rows, minimum=0))
    num_swa_rows = check("num_swa_rows", num_swa_rows, (), INT32)
    return _combine_swa_extra(swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows)


@jax.jit
def _combine_swa_extra(*args):
    swa_indices, _, extra_indices, *_ = args
    if swa_indices.shape[0] == 0 or swa_indices.shape[1] + extra_indices.shape[1] == 0:
        return combine_swa_extra_reference(*args)

    width = merged_width(swa_indices.shape[1] + extra_indices.shape[1])
    return dispatch(launching("indices.triton.combine_swa_extra", width=width), combine_swa_extra_reference, *args)


def combine_swa_extra_reference(swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows):
    """`combine_swa_extra_indices` in plain JAX."""
    swa_width, extra_width = swa_indices.shape[1], extra_indices.shape[1]
    swa_lengths = jnp.clip(swa_lengths, 0, swa_width)
    extra_lengths = jnp.clip(extra_lengths, 0, extra_width)

    width = merged_width(swa_width + extra_width)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    swa = jnp.where((swa_indices >= 0) & (swa_indices < num_swa_rows), swa_indices, -1)
    extra = add_or_minus_one(extra_indices, num_swa_rows)
    # Each column of the result picks its entry from the two lists side by side.
    both = jnp.pad(jnp.concatenate([swa, extra], 1), ((0, 0), (0, width - swa_width - extra_width)))
    in_swa = column < swa_lengths[:, None]
    source = jnp.where(in_swa, column, column - swa_lengths[:, None] + swa_width)
    lengths = swa_lengths + extra_lengths
    filled = column < lengths[:, None]
    picked = jnp.take_along_axis(both, jnp.where(filled, source, 0), axis=1, mode="promise_in_bounds")
    return jnp.where(filled, picked, -1), lengths


def combine_topk_swa_indices(
    topk_indices: jax.Array,
    query_start_loc: jax.Array,
    query_pos: jax.Array,
    seq_lens: jax.Array,
    gather_lens: jax.Array,
    compressed_base: jax.Array,
    swa_base: jax.Array,
    *,
    window: int,
    compress_ratio: int,
    topk: int,
) -> tuple[jax.Array, jax.Array]:
    """The rows of a prefill workspace that each query reads: its top-k compressed entries, then its window.

    The workspace holds each request's compressed entries from `compressed_base` on and its last `gather_lens`
    tokens from `swa_base` on (`swa_gather_plan`). A row of a query at position p of request r is, as SGLang
    builds it,

        [ topk_indices[j] + compressed_base[r]              for j < topk_len
        | swa_base[r] + position - (seq_len - gather_len)   for positions p − swa_len + 1 … p, ascending
        | −1 ]

    with `topk_len = min((p + 1) // compress_ratio, topk)` and `swa_len = min(p + 1, window)`.

    Row i belongs to the last request with `query_start_loc[r] - query_start_loc[0] <= i`, so a slice of a
    batch's `query_start_loc` serves, and so do requests without query rows.

    Args:
      topk_indices: int32 `[N, K]`, compressed positions counted from the start of the row's request; K >=
        topk. Valid are `0 <= index < seq_lens[r] // compress_ratio`: no other entry is the request's own.
      query_start_loc: int32 `[B + 1]`, the first row of each request, and the end of the last one.
      query_pos: int32 `[N]`, the absolute position of each query row; negative marks a padding row.
      seq_lens: int32 `[B]`, tokens of each request, this chunk included; at most 0 marks a padding request.
      gather_lens: int32 `[B]`, how many of each request's last tokens the workspace holds.
      compressed_base, swa_base: int32 `[B]`, where each request's rows start in the workspace.
      window: tokens of the sliding window, at least 1 (static).
      compress_ratio: tokens per compressed entry, at least 1 (static), also where topk is 0.
      topk: how many leading columns of `topk_indices` may count; 0 for layers with a window only (static).

    Returns:
      `(indices, lengths)`: int32 `[N, width]` with `width` = `topk + window` rounded up to a multiple of 128;
      int32 `[N]`, `topk_len + swa_len`, a span that includes the holes. Invalid entries, and tokens that were
      not gathered, are −1 at their place. Padding rows, rows past the last request and rows of padding
      requests are all −1 with length 0.

    Raises:
      TypeError: an array that is not int32, a static argument that is not an int.
      ValueError: shapes that do not agree, K < topk, a static argument out of range.
    """
    check = ArgumentChecks("combine_topk_swa_indices")
    topk_indices = check("topk_indices", topk_indices, ("N", "K"), INT32)
    query_pos = check("query_pos", query_pos, ("N",), INT32)
    seq_lens = check("seq_lens", seq_lens, ("B",), INT32)
    query_start_loc = check("query_start_loc", query_start_loc, (check.dims["B"] + 1,), INT32)
    gather_lens = check("gather_lens", gather_lens, ("B",), INT32)
    compressed_base = check("compressed_base", compressed_base, ("B",), INT32)
    swa_base = check("swa_base", swa_base, ("B",), INT32)
    window = check.static_int("window", window, minimum=1)
    compress_ratio = check.static_int("compress_ratio", compress_ratio, minimum=1)
    topk = check.static_int("topk", topk, minimum=0)
    if topk > check.dims["K"]:
        raise check.fail(f"topk_indices must have at least topk={topk} columns, got {check.dims['K']}")
    requests = (query_start_loc, seq_lens, gather_lens, compressed_base, swa_base)
    return _combine_topk_swa(topk_indices, query_pos, requests, window, compress_ratio, topk)


@functools.partial(jax.jit, static_argnames=("window", "compress_ratio", "topk"))
def _combine_topk_swa(topk_indices, query_pos, requests, window, compress_ratio, topk):
    kernel = launching(
        "indices.triton.combine_topk_swa",
        window=window,
        compress_ratio=compress_ratio,
        topk=topk,
        width=merged_width(topk + window),
    )
    plain = functools.partial(combine_topk_swa_reference, window=window, compress_ratio=compress_ratio, topk=topk)
    if topk_indices.size == 0 or requests[1].size == 0:  # no row, no column to point at, or no request
        return plain(topk_indices, query_pos, requests)
    return dispatch(kernel, plain, topk_indices, query_pos, requests)


def combine_topk_swa_reference(topk_indices, query_pos, requests, window, compress_ratio, topk):
    """`combine_topk_swa_indices` in plain JAX."""
    query_start_loc, seq_lens, gather_lens, compressed_base, swa_base = requests
    rows = jnp.arange(topk_indices.shape[0], dtype=jnp.int32)
    starts = query_start_loc - query_start_loc[0]
    request = jnp.searchsorted(starts[:-1], rows, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    # −1 stands for "no such request" in all four, which makes the row a padding row by its sequence length.
    seq_len, gather_len, compressed_start, swa_start = (
        take_or_minus_one(table, request)[:, None] for table in (seq_lens, gather_lens, compressed_base, swa_base)
    )
    pos = query_pos[:, None]
    live = (rows[:, None] < starts[-1]) & (pos >= 0) & (seq_len > 0)
    pos = jnp.where(live, pos, 0)

    # min((pos + 1) // ratio, topk) and min(pos + 1, window) without pos + 1, which wraps at INT_MAX.
    completes_entry = (pos % compress_ratio == compress_ratio - 1).astype(jnp.int32)
    topk_len = jnp.minimum(jnp.minimum(pos // compress_ratio, topk) + completes_entry, topk)
    swa_len = jnp.minimum(pos, window - 1) + 1

    width = merged_width(topk + window)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    entry = jnp.pad(topk_indices[:, :topk], ((0, 0), (0, width - topk)), constant_values=-1)
    compressed = add_or_minus_one(jnp.where(entry < seq_len // compress_ratio, entry, -1), compressed_start)

    in_window = (column >= topk_len) & (column < topk_len + swa_len)
    position = pos - (swa_len - 1) + (column - topk_len)
    # Negative for what was not gathered. A position past the last token is masked before it can wrap.
    relative = position - (seq_len - jnp.maximum(gather_len, 0))
    swa = add_or_minus_one(jnp.where(in_window & (position < seq_len), relative, -1), swa_start)

    indices = jnp.where(live, jnp.where(column < topk_len, compressed, swa), -1)
    return indices, jnp.where(live, topk_len + swa_len, 0)[:, 0]
