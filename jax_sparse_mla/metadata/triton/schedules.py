"""Triton kernels of the schedules, by the rules of `jax_sparse_mla.metadata.schedules`; one program each.

The kernels keep what they need of the batch in their own outputs, so no batch is too large for a shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output

_INT_MAX = tl.constexpr(2**31 - 1)
_BLOCK_TOKENS = tl.constexpr(64)  # keys that a FlashMLA block covers
_OVERHEAD = tl.constexpr(5)  # what starting on a request costs a partition, in blocks

_RESIDENT_BATCH = 256  # requests whose starts the walk keeps in one warp's registers
_LARGE_CHUNK = 1024


def flashmla_constants(topk: int, extra_topk: int, batch: int, num_sm_parts: int) -> dict[str, int]:
    """Constants of `flashmla_kernel`."""
    # A step of the walk is a reduction: quickest in one warp, from registers. Large batches have more work around it.
    resident = batch <= _RESIDENT_BATCH
    rows = max(triton.next_power_of_2(batch), 32) if resident else _LARGE_CHUNK
    return {
        "TOPK": topk,
        "EXTRA_TOPK": extra_topk,
        "PARTS": num_sm_parts,
        "PARTS_BLOCK": triton.next_power_of_2(num_sm_parts),
        "WINDOW": max(triton.next_power_of_2(walk_window(num_sm_parts)), 32),
        "RESIDENT": resident,
        "STARTS_STEPS": (batch + 1).bit_length(),
        "PARTS_STEPS": num_sm_parts.bit_length(),
        "ROWS": rows,
        "CHUNKS": triton.cdiv(batch + 1, rows),
        "num_warps": 1 if resident else 4,
    }


def walk_window(num_sm_parts: int) -> int:
    """How many requests' starts a step of the walk may have to look at, at most.

    Where partition i begins is known but for 5 i places; starts are at least 6 apart, and one lies before them.
    """
    return 5 * (num_sm_parts - 1) // 6 + 2


def paged_mqa_constants(num_rows: int, num_sms: int, split_kv: int) -> dict[str, int]:
    """Constants of `paged_mqa_kernel`."""
    rows = min(triton.next_power_of_2(num_rows), 512)
    return {
        "NUM_SMS": num_sms,
        "SMS_BLOCK": triton.next_power_of_2(num_sms + 1),
        "SPLIT_KV": split_kv,
        "INDEXER_ROWS": rows,
        "INDEXER_CHUNKS": triton.cdiv(num_rows, rows),
        "num_warps": 1 if num_rows <= _RESIDENT_BATCH else 4,
    }


@triton.jit
def count_at_most(values_ptr, stride, n, bound, STEPS: tl.constexpr):
    """How many of `n` ascending values are <= bound; STEPS is n's bit length."""
    low = bound * 0
    high = low + n
    for _ in range(STEPS):
        middle = low + (high - low) // 2
        searching = low < high
        below = searching & (tl.load(values_ptr + middle * stride, mask=searching, other=0) <= bound)
        high = tl.where(searching & (below == 0), middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def _row_costs(main_ptr, extra_ptr, row, in_batch, TOPK: tl.constexpr, EXTRA_TOPK: tl.constexpr):
    """Blocks of each row and the overhead; 0 outside the batch."""
    keys = tl.load(main_ptr + row, mask=in_batch, other=0)
    keys = tl.maximum(tl.minimum(keys, TOPK), 1)
    if EXTRA_TOPK > 0:
        extra = tl.load(extra_ptr + row, mask=in_batch, other=0)
        extra = tl.maximum(tl.minimum(extra, EXTRA_TOPK), 0)
        keys = ((keys - 1) // _BLOCK_TOKENS + 1) * _BLOCK_TOKENS + extra
    return tl.where(in_batch, (keys - 1) // _BLOCK_TOKENS + 1 + _OVERHEAD, 0)


@triton.jit
def flashmla_kernel(
    main_ptr,  # int32 [batch]
    extra_ptr,  # int32 [batch], not read where EXTRA_TOPK is 0
    batch,
    tiles_ptr,  # int32 [PARTS, 8]
    splits_ptr,  # int32 [batch + 1]; holds the requests' starts until its own values are known
    TOPK: tl.constexpr,
    EXTRA_TOPK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    RESIDENT: tl.constexpr,
    STARTS_STEPS: tl.constexpr,
    PARTS_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    # The requests' costs on one line: request r covers [starts[r], starts[r + 1]), its overhead at the end.
    tl.store(splits_ptr, 0)
    if RESIDENT:
        row = tl.arange(0, ROWS)
        in_batch = row < batch
        ends = tl.cumsum(_row_costs(main_ptr, extra_ptr, row, in_batch, TOPK, EXTRA_TOPK))
        total = tl.max(ends)
        cuts = _walk_resident(tl.where(in_batch, ends, _INT_MAX), tiles_ptr, total, PARTS)
        tl.store(splits_ptr + 1 + row, row + 1 + cuts, mask=in_batch)
    else:
        starts_ptr = splits_ptr
        total = 0
        for chunk in range(CHUNKS):
            row = chunk * ROWS + tl.arange(0, ROWS)
            in_batch = row < batch
            costs = _row_costs(main_ptr, extra_ptr, row, in_batch, TOPK, EXTRA_TOPK)
            tl.store(starts_ptr + 1 + row, total + tl.cumsum(costs), mask=in_batch)
            total += tl.sum(costs)
        tl.debug_barrier()
        _walk(starts_ptr, tiles_ptr, batch, total, PARTS, PARTS_BLOCK, WINDOW, STARTS_STEPS)
    tl.debug_barrier()

    part = tl.arange(0, PARTS_BLOCK)
    in_parts = part < PARTS
    tile = tiles_ptr + 8 * part
    begin_req = tl.load(tile, mask=in_parts, other=0)
    begin_block = tl.load(tile + 2, mask=in_parts, other=0)
    next_req = tl.load(tile + 8, mask=part + 1 < PARTS, other=batch)
    next_block = tl.load(tile + 10, mask=part + 1 < PARTS, other=0)
    cut = next_block > 0
    end_req = next_req - (next_block == 0).to(tl.int32)
    whole = _row_costs(main_ptr, extra_ptr, end_req, in_parts, TOPK, EXTRA_TOPK) - _OVERHEAD
    one_request = begin_req == end_req
    tl.store(tile + 1, end_req, mask=in_parts)
    tl.store(tile + 3, tl.where(cut, next_block, whole), mask=in_parts)
    tl.store(tile + 5, ((begin_block > 0) | (one_request & cut)).to(tl.int32), mask=in_parts)
    tl.store(tile + 6, (cut | (one_request & (begin_block > 0))).to(tl.int32), mask=in_parts)
    if not RESIDENT:
        # Request k begins after k requests, and after the cuts of those before it: all that precede the first
        # partition that begins at request k or later.
        for chunk in range(CHUNKS):
            row = chunk * ROWS + tl.arange(0, ROWS)
            in_splits = row <= batch
            parts_before = count_at_most(tiles_ptr, 8, PARTS, row - 1, PARTS_STEPS)
            cuts = tl.load(tiles_ptr + 8 * parts_before - 1, mask=in_splits & (parts_before > 0), other=0)
            tl.store(splits_ptr + row, row + cuts, mask=in_splits)
        tl.debug_barrier()
    tl.store(tile + 7, part * 0, mask=in_parts)


@triton.jit
def _budget(total, PARTS: tl.constexpr):
    return (total + PARTS - 1) // PARTS + _OVERHEAD


@triton.jit
def _walk_resident(ends, tiles_ptr, total, PARTS: tl.constexpr):
    """Columns 0, 2 and 4 of every partition. Returns how many cuts there are before each next request.

    A partition reaches `budget` places on. Taken whole are the requests that end within reach; of the next, what fits
    together with its overhead. So the next one begins at the last start within reach, or 5 before the reach's end.
    """
    budget = _budget(total, PARTS)
    cuts_before = tl.zeros_like(ends)
    position, request, block, split = 0, 0, 0, 0
    for part in range(PARTS):
        tile = tiles_ptr + 8 * part
        tl.store(tile, request)
        tl.store(tile + 2, block)
        tl.store(tile + 4, split)

        reach = position + tl.minimum(budget, total - position)
        within = ends <= reach
        start = tl.max(tl.where(within, ends, 0))
        next_request = tl.sum(within.to(tl.int32))
        position = tl.maximum(reach - _OVERHEAD, start)
        block = position - start
        cut = (block > 0).to(tl.int32)
        cuts_before += tl.where(ends > start, cut, 0)
        split = tl.where(next_request == request, split, 0) + cut
        request = next_request
    return cuts_before


@triton.jit
def _walk(
    starts_ptr, tiles_ptr, batch, total,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, WINDOW: tl.constexpr, STARTS_STEPS: tl.constexpr,
):  # fmt: skip
    """As `_walk_resident`, of starts in memory; column 7 has how many cuts there were up to a partition's beginning."""
    # Partition i begins at i * share or up to 5 i places later: column 1 keeps the last request that starts no later
    # than the least place its budget reaches, so that a step of the walk waits for no search.
    budget = _budget(total, PARTS)
    part = tl.arange(0, PARTS_BLOCK)
    least_reach = tl.minimum(part.to(tl.int64) * (budget - _OVERHEAD) + budget, total).to(tl.int32)
    first_low = count_at_most(starts_ptr, 1, batch + 1, least_reach, STARTS_STEPS) - 1
    tl.store(tiles_ptr + 8 * part + 1, first_low, mask=part < PARTS)
    tl.debug_barrier()

    # Each step's starts are loaded a step ahead, and where they begin two steps ahead.
    lane = tl.arange(0, WINDOW)
    low = tl.load(tiles_ptr + 1)
    next_low = tl.load(tiles_ptr + 9, mask=PARTS > 1, other=0)
    starts = tl.load(starts_ptr + low + lane, mask=low + lane <= batch, other=_INT_MAX)
    position, request, block, split, cuts = 0, 0, 0, 0, 0
    for step in range(PARTS):
        tile = tiles_ptr + 8 * step
        ahead = tl.load(starts_ptr + next_low + lane, mask=next_low + lane <= batch, other=_INT_MAX)
        low_after = tl.load(tile + 17, mask=step + 2 < PARTS, other=0)
        tl.store(tile, request)
        tl.store(tile + 2, block)
        tl.store(tile + 4, split)
        tl.store(tile + 7, cuts)

        reach = position + tl.minimum(budget, total - position)
        within = starts <= reach
        start = tl.max(tl.where(within, starts, 0))
        next_request = low + tl.sum(within.to(tl.int32)) - 1
        position = tl.maximum(reach - _OVERHEAD, start)
        block = position - start
        cut = (block > 0).to(tl.int32)
        split = tl.where(next_request == request, split, 0) + cut
        cuts += cut
        request = next_request
        starts = ahead
        low = next_low
        next_low = low_after


@triton.jit
def _splits(context_ptr, row, num_rows, SPLIT_KV: tl.constexpr):
    length = tl.maximum(tl.load(context_ptr + row, mask=row < num_rows, other=0), 0)
    return (length // SPLIT_KV + (length % SPLIT_KV > 0).to(tl.int32)).to(tl.int64)


@triton.jit
def _first_sm(split, share, pivot):
    """The first SM that starts at `split` or later: SMs from pivot on have one more than `share`."""
    with_share = (split - 1) // tl.maximum(share, 1) + 1
    past_pivot = split - pivot * share
    with_more = pivot + (past_pivot - 1) // (share + 1) + 1
    return tl.where(split <= 0, 0, tl.where(past_pivot <= 0, with_share, with_more))


@triton.jit
def paged_mqa_kernel(
    context_ptr,  # int32 [num_rows]
    num_rows,
    out_ptr,  # int32 [NUM_SMS + 1, 2]
    NUM_SMS: tl.constexpr,
    SMS_BLOCK: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    INDEXER_ROWS: tl.constexpr,
    INDEXER_CHUNKS: tl.constexpr,
):
    # Sums in int64, then no more than INT_MAX: as the plain code's, which stop there.
    total = tl.zeros((), tl.int64)
    for chunk in range(INDEXER_CHUNKS):
        total += tl.sum(_splits(context_ptr, chunk * INDEXER_ROWS + tl.arange(0, INDEXER_ROWS), num_rows, SPLIT_KV))
    total = tl.minimum(total, _INT_MAX).to(tl.int32)
    share = total // NUM_SMS
    pivot = NUM_SMS - total % NUM_SMS

    every = tl.arange(0, SMS_BLOCK)
    tl.store(out_ptr + 2 * every, every * 0 + num_rows, mask=every <= NUM_SMS)
    tl.store(out_ptr + 2 * every + 1, every * 0, mask=every <= NUM_SMS)
    tl.debug_barrier()

    # Each row writes the SMs that start in it.
    before = tl.zeros((), tl.int64)
    for chunk in range(INDEXER_CHUNKS):
        row = chunk * INDEXER_ROWS + tl.arange(0, INDEXER_ROWS)
        splits = _splits(context_ptr, row, num_rows, SPLIT_KV)
        ends = before + tl.cumsum(splits)
        start = tl.minimum(ends - splits, _INT_MAX).to(tl.int32)
        end = tl.minimum(ends, _INT_MAX).to(tl.int32)
        first_sm = _first_sm(start, share, pivot)
        end_sm = _first_sm(end, share, pivot)
        sm = first_sm
        while tl.max((sm < end_sm).to(tl.int32)) > 0:
            target = sm * share + tl.maximum(sm - pivot, 0)
            tl.store(out_ptr + 2 * sm, row, mask=sm < end_sm)
            tl.store(out_ptr + 2 * sm + 1, target - start, mask=sm < end_sm)
            sm += 1
        before += tl.sum(splits)


# ---- launches: sizes are not zero ----


def paged_mqa(execute: Executor, context_lens, *, num_sms: int, split_kv: int, out=None) -> Any:
    """As `jax_sparse_mla.paged_mqa_schedule`."""
    num_rows, outputs = context_lens.shape[0], (Output((num_sms + 1, 2), "int32"),)
    constants = paged_mqa_constants(num_rows, num_sms, split_kv)
    launch = Launch(paged_mqa_kernel, "paged_mqa_schedule", (1,), (num_rows,), outputs, constants)
    return execute(launch, (context_lens,), (out,))[0]


def flashmla(
    execute: Executor,
    topk_length,
    extra_topk_length,
    *,
    topk: int,
    extra_topk: int,
    num_sm_parts: int,
    out: Sequence[Any] | None = None,
) -> tuple[Any, ...]:
    """As `jax_sparse_mla.metadata.schedules.flashmla_schedule_reference`."""
    batch = topk_length.shape[0]
    constants = flashmla_constants(topk, extra_topk, batch, num_sm_parts)
    outputs = Output((num_sm_parts, 8), "int32"), Output((batch + 1,), "int32")
    launch = Launch(flashmla_kernel, "flashmla_schedule", (1,), (batch,), outputs, constants)
    return execute(launch, (topk_length, extra_topk_length), out)
