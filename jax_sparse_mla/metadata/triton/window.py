"""Triton kernels of the sliding window, by the rules of `jax_sparse_mla.indices.window`, and look-ups in tables."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output
from jax_sparse_mla.metadata.triton.schedules import count_at_most

_INT_MAX = tl.constexpr(2**31 - 1)

GATHER_OPTIONS = {"COLUMNS": 256, "num_warps": 4}


def request_options(num_requests: int) -> dict[str, int]:
    """Constants of the kernels that one program runs over all requests."""
    block = min(triton.next_power_of_2(num_requests + 1), 1024)
    return {"REQUESTS": block, "CHUNKS": triton.cdiv(num_requests + 1, block), "num_warps": 4}


# ---- look-ups: -1 where an index is outside its table, or the entry negative ----


@triton.jit
def take(table_ptr, index, size, mask):
    valid = mask & (index >= 0) & (index < size)
    return tl.maximum(tl.load(table_ptr + index, mask=valid, other=-1), -1)


@triton.jit
def take_2d(table_ptr, row, column, rows, columns, mask):
    valid = mask & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return tl.maximum(tl.load(table_ptr + row.to(tl.int64) * columns + column, mask=valid, other=-1), -1)


@triton.jit
def divide(slot, divisor):
    """Floor division, which keeps -1 at -1."""
    return tl.where(slot >= 0, slot // divisor, -1)


@triton.jit
def window_slots(
    position, table_row, req_to_token_ptr, full_to_swa_ptr, table_rows, table_columns, swa_entries,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slots of the last WINDOW tokens up to `position`, newest first, -1 padded to BLOCK."""
    back = tl.arange(0, BLOCK)
    column = tl.maximum(position, -1) - back
    full = take_2d(req_to_token_ptr, table_row, column, table_rows, table_columns, back < WINDOW)
    return take(full_to_swa_ptr, full, swa_entries, back < WINDOW)


@triton.jit
def swa_slots_kernel(
    positions_ptr,  # int32 [rows], as the next
    req_rows_ptr,
    req_to_token_ptr,  # int32 [table_rows, table_columns]
    full_to_swa_ptr,  # int32 [swa_entries]
    table_rows,
    table_columns,
    swa_entries,
    out_ptr,  # int32 [rows, WINDOW]
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slots = window_slots(
        tl.load(positions_ptr + row), tl.load(req_rows_ptr + row), req_to_token_ptr, full_to_swa_ptr,
        table_rows, table_columns, swa_entries, WINDOW, BLOCK,
    )  # fmt: skip
    back = tl.arange(0, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * WINDOW + back, slots, mask=back < WINDOW)


@triton.jit
def gather_lens_kernel(
    seq_lens_ptr,  # int32 [num_requests], as the next
    extend_lens_ptr,
    num_requests,
    first_pos_ptr,  # int32 [num_requests], as the next
    gather_lens_ptr,
    offsets_ptr,  # int32 [num_requests + 1]
    WINDOW: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    total = tl.zeros((), tl.int64)
    tl.store(offsets_ptr, 0)
    for chunk in range(CHUNKS):
        request = chunk * REQUESTS + tl.arange(0, REQUESTS)
        known = request < num_requests
        length = tl.maximum(tl.load(seq_lens_ptr + request, mask=known, other=0), 0)
        wanted = tl.minimum(tl.load(extend_lens_ptr + request, mask=known, other=0), _INT_MAX - (WINDOW - 1))
        gathered = tl.minimum(tl.maximum(wanted + (WINDOW - 1), 0), length)
        tl.store(first_pos_ptr + request, length - gathered, mask=known)
        tl.store(gather_lens_ptr + request, gathered, mask=known)
        ends = total + tl.cumsum(gathered.to(tl.int64))
        tl.store(offsets_ptr + 1 + request, tl.minimum(ends, _INT_MAX).to(tl.int32), mask=known)
        total += tl.sum(gathered.to(tl.int64))


@triton.jit
def gather_slots_kernel(
    first_pos_ptr,  # int32 [num_requests]
    offsets_ptr,  # int32 [num_requests + 1]
    req_rows_ptr,  # int32 [num_requests]
    req_to_token_ptr,
    full_to_swa_ptr,
    num_requests,
    table_rows,
    table_columns,
    swa_entries,
    capacity,
    slots_ptr,  # int32 [capacity]
    SEARCH_STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    held = (element < capacity) & (element < tl.load(offsets_ptr + num_requests))
    # The last request that starts at or before the element: those without tokens repeat its start.
    request = count_at_most(offsets_ptr, 1, num_requests, element, SEARCH_STEPS) - 1
    start = tl.load(offsets_ptr + request, mask=held, other=0)
    position = tl.load(first_pos_ptr + request, mask=held, other=0) + (element - start)
    row = tl.load(req_rows_ptr + request, mask=held, other=-1)
    full = take_2d(req_to_token_ptr, row, position, table_rows, table_columns, held)
    tl.store(slots_ptr + element, take(full_to_swa_ptr, full, swa_entries, held), mask=element < capacity)


# ---- launches: sizes are not zero ----


def swa_slots(execute: Executor, positions, req_rows, req_to_token, full_to_swa, *, window: int, out=None) -> Any:
    """As `jax_sparse_mla.swa_slots`."""
    rows, constants = positions.shape[0], {"WINDOW": window, "BLOCK": triton.next_power_of_2(window), "num_warps": 4}
    sizes, outputs = (*req_to_token.shape, full_to_swa.shape[0]), (Output((rows, window), "int32"),)
    launch = Launch(swa_slots_kernel, "swa_slots", (rows,), sizes, outputs, constants)
    return execute(launch, (positions, req_rows, req_to_token, full_to_swa), (out,))[0]


def swa_gather_plan(
    execute: Executor,
    seq_lens,
    extend_lens,
    req_rows,
    req_to_token,
    full_to_swa,
    *,
    window: int,
    capacity: int,
) -> tuple[Any, Any, Any, Any]:
    """As `jax_sparse_mla.swa_gather_plan`; the capacity may be zero."""
    requests = seq_lens.shape[0]
    each = Output((requests,), "int32")
    outputs, constants = (each, each, Output((requests + 1,), "int32")), {"WINDOW": window, **request_options(requests)}
    launch = Launch(gather_lens_kernel, "gather_lens", (1,), (requests,), outputs, constants)
    first_pos, gather_lens, offsets = execute(launch, (seq_lens, extend_lens))
    if not capacity:
        return offsets[:0], first_pos, gather_lens, offsets
    sizes = (requests, *req_to_token.shape, full_to_swa.shape[0], capacity)
    constants = {"SEARCH_STEPS": requests.bit_length(), **GATHER_OPTIONS}
    outputs, grid = (Output((capacity,), "int32"),), (triton.cdiv(capacity, GATHER_OPTIONS["COLUMNS"]),)
    launch = Launch(gather_slots_kernel, "gather_slots", grid, sizes, outputs, constants)
    (slots,) = execute(launch, (first_pos, offsets, req_rows, req_to_token, full_to_swa))
    return slots, first_pos, gather_lens, offsets
