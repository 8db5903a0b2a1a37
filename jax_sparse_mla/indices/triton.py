"""Triton kernels that merge index lists, by the rules of `jax_sparse_mla.indices`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output

_INT_MAX = tl.constexpr(2**31 - 1)

# Rows and columns of a tile. Widths are multiples of 128. A program of the first merge makes one tile; of the second,
# whose rows cost more to set up, all tiles of its rows.
SWA_EXTRA_OPTIONS = {"ROWS": 8, "COLUMNS": 128, "num_warps": 4}
TOPK_SWA_OPTIONS = {"ROWS": 4, "COLUMNS": 128, "num_warps": 4}


@triton.jit
def _add_or_minus_one(index, base):
    """`index + base`, and -1 where either is negative or the sum does not fit int32."""
    valid = (index >= 0) & (base >= 0) & (index <= _INT_MAX - tl.maximum(base, 0))
    return tl.where(valid, tl.where(valid, index, 0) + tl.where(valid, base, 0), -1)


@triton.jit
def combine_swa_extra_kernel(
    swa_ptr,  # int32 [n, SWA_WIDTH]
    swa_lengths_ptr,  # int32 [n]
    extra_ptr,  # int32 [n, EXTRA_WIDTH]
    extra_lengths_ptr,  # int32 [n]
    num_swa_rows_ptr,  # int32 scalar
    n,
    out_ptr,  # int32 [n, WIDTH]
    lengths_ptr,  # int32 [n]
    SWA_WIDTH: tl.constexpr,
    EXTRA_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < n
    swa_length = tl.load(swa_lengths_ptr + row, mask=in_rows, other=0)
    swa_length = tl.minimum(tl.maximum(swa_length, 0), SWA_WIDTH)
    extra_length = tl.load(extra_lengths_ptr + row, mask=in_rows, other=0)
    extra_length = tl.minimum(tl.maximum(extra_length, 0), EXTRA_WIDTH)
    length = (swa_length + extra_length)[:, None]
    num_swa_rows = tl.load(num_swa_rows_ptr)
    if tl.program_id(1) == 0:
        tl.store(lengths_ptr + row, swa_length + extra_length, mask=in_rows)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = row.to(tl.int64)[:, None]
    in_swa = column < swa_length[:, None]
    swa = tl.load(swa_ptr + row * SWA_WIDTH + column, mask=in_swa, other=-1)
    swa = tl.where((swa >= 0) & (swa < num_swa_rows), swa, -1)
    in_extra = (column < length) & (column >= swa_length[:, None])
    extra = tl.load(extra_ptr + row * EXTRA_WIDTH + (column - swa_length[:, None]), mask=in_extra, other=-1)
    merged = tl.where(in_swa, swa, _add_or_minus_one(extra, num_swa_rows))
    tl.store(out_ptr + row * WIDTH + column, merged, mask=in_rows[:, None])


@triton.jit
def _take(table_ptr, request, mask):
    """`table[request]`, no less than -1, which also stands for "no such request"."""
    return tl.maximum(tl.load(table_ptr + request, mask=mask, other=-1), -1)


@triton.jit
def combine_topk_swa_kernel(
    topk_ptr,  # int32 [n, TOPK_STRIDE]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    query_pos_ptr,  # int32 [n]
    seq_lens_ptr,  # int32 [num_requests], as the next three
    gather_lens_ptr,
    compressed_base_ptr,
    swa_base_ptr,
    n,
    num_requests,
    out_ptr,  # int32 [n, WIDTH]
    lengths_ptr,  # int32 [n]
    TOPK_STRIDE: tl.constexpr,
    TOPK: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,  # bits of num_requests
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < n

    # The last request that starts at or before the row.
    origin = tl.load(query_start_loc_ptr)
    low = tl.zeros_like(row)
    high = tl.zeros_like(row) + num_requests
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        searching = low < high
        starts_before = searching & (tl.load(query_start_loc_ptr + middle, mask=searching, other=0) - origin <= row)
        high = tl.where(searching & (starts_before == 0), middle, high)
        low = tl.where(starts_before, middle + 1, low)
    request = low - 1
    known = in_rows & (request >= 0)
    seq_len = _take(seq_lens_ptr, request, known)
    gather_len = _take(gather_lens_ptr, request, known)
    compressed_base = _take(compressed_base_ptr, request, known)
    swa_base = _take(swa_base_ptr, request, known)
    pos = tl.load(query_pos_ptr + row, mask=in_rows, other=-1)
    live = (row < tl.load(query_start_loc_ptr + num_requests) - origin) & (pos >= 0) & (seq_len > 0)
    pos = tl.where(live, pos, 0)

    # min((pos + 1) // RATIO, TOPK) and min(pos + 1, WINDOW) without pos + 1, which wraps at INT_MAX.
    completes_entry = (pos % RATIO == RATIO - 1).to(tl.int32)
    topk_len = tl.minimum(tl.minimum(pos // RATIO, TOPK) + completes_entry, TOPK)
    swa_len = tl.minimum(pos, WINDOW - 1) + 1
    topk_len = tl.where(live, topk_len, 0)
    span = tl.where(live, topk_len + swa_len, 0)
    tl.store(lengths_ptr + row, span, mask=in_rows)

    # Whether an entry is valid comes down to limits of the row, so that an element costs few instructions: entries
    # 0 ... last_entry (no further than the request's own, and their sum with the base fits int32) ...
    last_entry = tl.minimum(seq_len // RATIO - 1, _INT_MAX - tl.maximum(compressed_base, 0))
    last_entry = tl.where(live & (compressed_base >= 0), last_entry, -1)
    # ... and window columns first ... end - 1. Column c stands for the token that lies `c + shift` rows after the
    # first gathered one: neither before it, nor past the request's last one, nor past INT_MAX.
    oldest = (pos - (swa_len - 1)).to(tl.int64)
    gathered = tl.maximum(gather_len, 0).to(tl.int64)
    shift = oldest - topk_len - (seq_len - gathered)
    first = tl.maximum(topk_len, -shift)
    end = tl.minimum(span, topk_len + (seq_len - oldest))
    end = tl.minimum(end, _INT_MAX - tl.maximum(swa_base, 0).to(tl.int64) - shift + 1)
    end = tl.where(swa_base >= 0, end, 0)
    first = tl.minimum(first, WIDTH).to(tl.int32)[:, None]
    end = tl.maximum(end, 0).to(tl.int32)[:, None]
    to_slot = (shift + swa_base).to(tl.int32)[:, None]
    last_entry = last_entry[:, None]
    compressed_base = compressed_base[:, None]
    topk_len = topk_len[:, None]
    row = row.to(tl.int64)[:, None]
    in_rows = in_rows[:, None]

    entry = _load_entries(topk_ptr, row, 0, topk_len, TOPK_STRIDE, TOPK, COLUMNS)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        # The next block is on its way while this one is stored.
        ahead = _load_entries(topk_ptr, row, start + COLUMNS, topk_len, TOPK_STRIDE, TOPK, COLUMNS)
        compressed = tl.where((entry >= 0) & (entry <= last_entry), entry + compressed_base, -1)
        swa = tl.where((column >= first) & (column < end), column + to_slot, -1)
        tl.store(out_ptr + row * WIDTH + column, tl.where(column < topk_len, compressed, swa), mask=in_rows)
        entry = ahead


@triton.jit
def _load_entries(topk_ptr, row, start, topk_len, TOPK_STRIDE, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns start ... of the rows' entries; -1, or anything, from topk_len on."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    if start < TOPK:
        # A mask that is the same for four neighbours keeps the loads 16 bytes wide.
        inside = (column // 4 < (topk_len + 3) // 4) & (column < TOPK_STRIDE)
        return tl.load(topk_ptr + row * TOPK_STRIDE + column, mask=inside, other=-1)
    else:
        return tl.zeros_like(column + topk_len) - 1


# --- launches: `width` are columns of the result, a multiple of 128; there are rows and columns ---


def combine_swa_extra(
    execute: Executor, swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows, *, width: int, out=None
) -> tuple[Any, ...]:
    """As `jax_sparse_mla.combine_swa_extra_indices`, `num_swa_rows` an int32 scalar."""
    n, swa_width = swa_indices.shape
    constants = {"SWA_WIDTH": swa_width, "EXTRA_WIDTH": extra_indices.shape[1], "WIDTH": width, **SWA_EXTRA_OPTIONS}
    grid = triton.cdiv(n, SWA_EXTRA_OPTIONS["ROWS"]), triton.cdiv(width, SWA_EXTRA_OPTIONS["COLUMNS"])
    outputs = Output((n, width), "int32"), Output((n,), "int32")
    launch = Launch(combine_swa_extra_kernel, "combine_swa_extra", grid, (n,), outputs, constants)
    return execute(launch, (swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows), out)


def combine_topk_swa(
    execute: Executor, topk_indices, query_pos, *requests, window, compress_ratio, topk, width, out=None
) -> tuple[Any, ...]:
    """As `jax_sparse_mla.combine_topk_swa_indices`; requests are its five arrays of them."""
    (n, stride), (num_requests,) = topk_indices.shape, requests[1].shape
    constants = {"TOPK_STRIDE": stride, "TOPK": topk, "WINDOW": window, "RATIO": compress_ratio, "WIDTH": width}
    constants |= {"SEARCH_STEPS": num_requests.bit_length(), **TOPK_SWA_OPTIONS}
    grid = (triton.cdiv(n, TOPK_SWA_OPTIONS["ROWS"]),)
    outputs = Output((n, width), "int32"), Output((n,), "int32")
    launch = Launch(combine_topk_swa_kernel, "combine_topk_swa", grid, (n, num_requests), outputs, constants)
    return execute(launch, (topk_indices, requests[0], query_pos, *requests[1:]), out)
