"""Triton kernels that select the top-k of each row of logits and map the positions, as `jax_sparse_mla.indices.topk`.

A row whose window fits a tile is selected in registers by `topk_select_kernel` alone: a search for the k-th largest
key by interpolation, then one prefix sum. A longer row is filtered first: a sample of it gives a threshold that a few
more than k logits reach (`_sample_threshold`), one pass over the row collects those (`topk_filter_kernel`), and the
selection reads only them. Where the sample misled (fewer than k candidates, or more than a tile, as ties can do) the
selection searches the row itself, pass by pass: slower, never wrong. Positions come out in ascending order, the same
in every run.

A key is an int32 in the order of the floats: -0.0 is +0.0, NaN is below every number, INT_MIN is no logit at all.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output, dtype_of

_INT_MAX = tl.constexpr(2**31 - 1)
_OUTSIDE_KEY = tl.constexpr(-(2**31))
_NAN_KEY = tl.constexpr(-(2**31) + 1)
# The transforms.
POSITIONS = tl.constexpr(0)
PAGED = tl.constexpr(1)
RAGGED = tl.constexpr(2)

_SAMPLE = 4096  # logits of a row that its threshold is chosen from
_PIECE = 8  # of them stand side by side: a sector of 32 bytes
_LARGEST_TILE = 16384  # the prefix sums are packed in 16 bits
_CHUNK = 4096  # columns that a program of a split row filters
SPLIT_BELOW_ROWS = 512  # with as many rows the GPU is full with a program a row


@dataclasses.dataclass(frozen=True)
class TopkPlan:
    """The launches of a call of one shape.

    Attributes:
      tile: keys that a program selects from in registers, and candidates a row may have.
      filtered: whether there may be rows longer than the tile.
      chunks: programs that filter a row; with one, it takes the row's sample itself.
      align: logits that are loaded together: rows start at multiples of it.
      select_warps: warps of the selection.
    """

    tile: int
    filtered: bool
    chunks: int
    align: int
    select_warps: int


def plan_topk(rows: int, columns: int, topk: int) -> TopkPlan:
    """For `[rows, columns]` logits, none of them 0; a function of the shape alone, as XLA programs need it."""
    tile = max(triton.next_power_of_2(columns), 256)
    filtered = tile > 8192
    if filtered:
        tile = 4096
        while tile < min(_candidates(columns, topk), _LARGEST_TILE):
            tile *= 2
    chunks = triton.cdiv(columns, _CHUNK) if rows < SPLIT_BELOW_ROWS else 1
    align = 4 if columns % 4 == 0 else 1
    return TopkPlan(tile, filtered, chunks, align, select_warps=min(max(tile // 512, 1), 16))


def _candidates(columns: int, topk: int) -> float:
    """How many logits of the longest row reach its threshold, at most, as a rule (`_sample_threshold`)."""
    expected = topk * _SAMPLE / columns
    rank = (expected + 4 * math.sqrt(expected) + 4) * 17 / 16
    return (rank + 2 * math.sqrt(rank)) * columns / _SAMPLE


# --- reading a row --------------------------------------------------------------------------------


@triton.jit
def _ordered(value):
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, _NAN_KEY, key)


@triton.jit
def _float_of(key):
    bits = tl.where(key < 0, (-key) | _OUTSIDE_KEY, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _window(lengths, row_starts, row, columns, HAS_STARTS: tl.constexpr, ALIGN: tl.constexpr):
    """(length, position of the window's first column, its first column rounded down to ALIGN, lead, stop): the
    window is columns lead ... stop - 1 after the rounded one. It is empty or has positions that fit int32."""
    length = tl.maximum(tl.load(lengths + row), 0)
    start = length.to(tl.int64) * 0
    if HAS_STARTS:
        start += tl.load(row_starts + row)
    first = tl.maximum(start, 0)
    end = tl.maximum(tl.minimum(start + length, columns), first)
    origin = first // ALIGN * ALIGN
    return length, (first - start).to(tl.int32), origin, (first - origin).to(tl.int32), (end - origin).to(tl.int32)


@triton.jit
def _load_inside(source, column, lead, stop, ALIGN: tl.constexpr):
    """(value, inside) of columns; what is loaded beside the window, to keep the loads wide, is not inside."""
    value = tl.load(source + column, mask=column // ALIGN < (stop + (ALIGN - 1)) // ALIGN, other=0.0)
    return value, (column >= lead) & (column < stop)


@triton.jit
def _load_keys(source, column, lead, stop, ALIGN: tl.constexpr):
    value, inside = _load_inside(source, column, lead, stop, ALIGN)
    return tl.where(inside, _ordered(value), _OUTSIDE_KEY)


# --- the k-th largest key -------------------------------------------------------------------------
#
# lo and hi bracket it: count_lo >= k keys are at least lo, count_hi < k at least hi (int64, since hi - lo may exceed
# INT_MAX). Each round counts the keys from a probe between them on. The search ends where exactly k keys are at least
# lo, or lo is the k-th key itself, with ties.


@triton.jit
def _probe(lo, hi, surplus, deficit, rounds):
    """Where the k-th key is if keys lie evenly; the middle in every second round of a search that takes long."""
    span = hi - lo
    step = (span.to(tl.float32) * (surplus / (surplus + deficit))).to(tl.int64)
    step = tl.where((rounds >= 16) & (rounds % 2 == 0), span // 2, step)
    return tl.minimum(tl.maximum(lo + step, lo + 1), hi - 1)


@triton.jit
def _narrow(k, probe, after, count, lo, hi, count_lo, count_hi, surplus, deficit, last):
    """The bracket when `count` keys are at least `probe`, and none lies between it and `after`.

    surplus and deficit are the counts' distances from k, halved each time their end stays where it was (the Illinois
    rule), lest one end never moves.
    """
    up = count >= k
    surplus = tl.where(up, (count - k).to(tl.float32), tl.where(last < 0, surplus * 0.5, (count_lo - k).to(tl.float32)))
    deficit = tl.where(up, tl.where(last > 0, deficit * 0.5, (k - count_hi).to(tl.float32)), (k - count).to(tl.float32))
    lo = tl.where(up, probe, lo)
    hi = tl.where(up, tl.minimum(hi, after), probe)
    return lo, hi, tl.where(up, count, count_lo), tl.where(up, count_hi, count), surplus, deficit, tl.where(up, 1, -1)


@triton.jit
def _search(keys, k, n, slack):
    """(lo, hi, count_hi) for `n` keys above INT_MIN; `slack` keys more than k are as good as k."""
    lo = tl.min(tl.where(keys == _OUTSIDE_KEY, _INT_MAX, keys), 0).to(tl.int64)
    hi = tl.max(keys, 0).to(tl.int64) + 1
    count_lo, count_hi = n, n * 0
    surplus, deficit = (n - k).to(tl.float32), (count_hi + k).to(tl.float32)
    last, rounds = 0, 0
    while (count_lo > k + slack) & (hi - lo > 1):
        probe = _probe(lo, hi, surplus, deficit, rounds)
        after = hi
        if rounds % 8 == 7:  # the largest key of the bracket: among ties it ends the search
            probe = tl.max(tl.where(keys < hi, keys, _OUTSIDE_KEY), 0).to(tl.int64)
            after = probe + 1
        count = tl.sum((keys >= probe).to(tl.int32), 0)
        lo, hi, count_lo, count_hi, surplus, deficit, last = _narrow(
            k, probe, after, count, lo, hi, count_lo, count_hi, surplus, deficit, last
        )
        rounds += 1
    return lo, hi, count_hi


@triton.jit
def _search_row(source, lead, stop, k, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """`_search` over a row of any length, which it reads once a round."""
    zero = lead.to(tl.int64) * 0
    lo, hi = zero + _INT_MAX, zero + _OUTSIDE_KEY
    for begin in range(0, stop, TILE):
        keys = _load_keys(source, begin + tl.arange(0, TILE), lead, stop, ALIGN)
        lo = tl.minimum(lo, tl.min(tl.where(keys == _OUTSIDE_KEY, _INT_MAX, keys), 0))
        hi = tl.maximum(hi, tl.max(keys, 0))
    hi += 1
    count_lo, count_hi = stop - lead, lead * 0
    surplus, deficit = (count_lo - k).to(tl.float32), (count_hi + k).to(tl.float32)
    last, rounds = 0, 0
    while (count_lo > k) & (hi - lo > 1):
        probe = _probe(lo, hi, surplus, deficit, rounds)
        after = hi
        if rounds % 8 == 7:
            probe = lo
            for begin in range(0, stop, TILE):
                keys = _load_keys(source, begin + tl.arange(0, TILE), lead, stop, ALIGN)
                probe = tl.maximum(probe, tl.max(tl.where(keys < hi, keys, _OUTSIDE_KEY), 0))
            after = probe + 1
        counts = tl.zeros((TILE,), tl.int32)
        for begin in range(0, stop, TILE):
            keys = _load_keys(source, begin + tl.arange(0, TILE), lead, stop, ALIGN)
            counts += (keys >= probe).to(tl.int32)
        lo, hi, count_lo, count_hi, surplus, deficit, last = _narrow(
            k, probe, after, tl.sum(counts, 0), lo, hi, count_lo, count_hi, surplus, deficit, last
        )
        rounds += 1
    return lo, hi, count_hi


@triton.jit
def _places(keys, lo, hi, ties, seen_ties):
    """(chosen, rank, number of keys from hi on, number of ties): the chosen are the keys from hi on and, of those
    from lo on, the first `ties`, of which `seen_ties` came before; rank counts the chosen of these keys."""
    sure = (keys >= hi).to(tl.int32)
    tie = (keys >= lo).to(tl.int32) - sure
    both = sure | (tie << 16)
    before = tl.cumsum(both, 0) - both
    total = tl.sum(both, 0)
    tie_rank = seen_ties + (before >> 16)
    chosen = (sure > 0) | ((tie > 0) & (tie_rank < ties))
    rank = (before & 0xFFFF) + tl.minimum(tie_rank, ties) - tl.minimum(seen_ties, ties)
    return chosen, rank, total & 0xFFFF, total >> 16


# --- the transforms -------------------------------------------------------------------------------


@triton.jit
def _transformed(
    position, live, row, tables, METHOD: tl.constexpr, HAS_REQUESTS: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """The live positions transformed by the tables that the kernel gets, and -1 for the others."""
    page_table, row_to_request, offsets, num_requests, num_pages = tables
    if METHOD == PAGED:
        request = row
        if HAS_REQUESTS:
            request = tl.load(row_to_request + row).to(tl.int64)
        known = (request >= 0) & (request < num_requests)
        pages = page_table + tl.where(known, request, 0) * num_pages
        page_at = position // PAGE_SIZE
        page = tl.load(pages + page_at, mask=live & (page_at < tl.where(known, num_pages, 0)), other=-1)
        offset = position % PAGE_SIZE
        most: tl.constexpr = _INT_MAX // PAGE_SIZE  # the page that INT_MAX lies on
        fits = (page >= 0) & ((page < most) | ((page == most) & (offset <= _INT_MAX - most * PAGE_SIZE)))
        index = tl.where(fits, tl.where(fits, page, 0) * PAGE_SIZE + offset, -1)
    elif METHOD == RAGGED:
        base = tl.load(offsets + row)
        fits = live & (base >= 0) & (position <= _INT_MAX - tl.maximum(base, 0))
        index = tl.where(fits, tl.where(fits, position, 0) + tl.maximum(base, 0), -1)
    else:
        index = tl.where(live, position, -1)
    return index


# --- the kernels ----------------------------------------------------------------------------------


@triton.jit
def _sample_threshold(source, lead, stop, topk, SAMPLE: tl.constexpr, PIECE: tl.constexpr):
    """A float that somewhat more than topk of the window's logits reach, by a sample of them.

    Of a random sample, topk · SAMPLE / n of the window's topk largest are expected, give or take the root of that:
    4 roots more make fewer than topk candidates a matter of one row in tens of thousands. The sample's pieces lie one
    in each of as many equal parts, at places that follow no period the logits might have.
    """
    n = stop - lead
    part = n // (SAMPLE // PIECE)
    column = tl.arange(0, SAMPLE)
    piece = column // PIECE
    shift = ((piece * 40503 & 0xFFFF) >> 4) % tl.maximum(part - (PIECE - 1), 1)
    keys = _ordered(tl.load(source + (lead + piece * part + shift + column % PIECE)))
    expected = topk * (SAMPLE * 1.0) / n.to(tl.float32)
    rank = (expected + 4 * tl.sqrt(expected) + 4).to(tl.int32)
    rank = tl.minimum(rank, SAMPLE - 1)
    lo, _, _ = _search(keys, rank, rank * 0 + SAMPLE, rank // 16)
    return _float_of(lo.to(tl.int32))


@triton.jit
def topk_threshold_kernel(
    logits,  # [rows, width · ALIGN]
    lengths,  # int32 [rows]
    row_starts,  # int32 [rows], read if HAS_STARTS
    width,
    chunks,
    thresholds,  # float32 [rows]
    progress,  # int32 [rows, chunks]: zeroed here
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    SAMPLE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The threshold from which the programs of `topk_filter_kernel` that share a row start."""
    row = tl.program_id(0).to(tl.int64)
    _, _, origin, lead, stop = _window(lengths, row_starts, row, width * ALIGN, HAS_STARTS, ALIGN)
    if stop - lead > TILE:
        source = logits + (row * width * ALIGN + origin)
        tl.store(thresholds + row, _sample_threshold(source, lead, stop, TOPK, SAMPLE, PIECE))
        for begin in range(0, chunks, 128):
            chunk = begin + tl.arange(0, 128)
            tl.store(progress + row * chunks + chunk, tl.zeros_like(chunk), mask=chunk < chunks)


@triton.jit
def _count_before(progress, chunk, ALL_CHUNKS: tl.constexpr):
    """The candidates of the row's earlier chunks. Their programs started before this one, so they will finish."""
    each = tl.arange(0, ALL_CHUNKS)
    done, total = 0, 0
    while done == 0:
        seen = tl.load(progress + each, mask=each < chunk, other=1, volatile=True)
        done = tl.min(seen, 0)
        total = tl.sum(seen - 1, 0)
    return total


@triton.jit
def _hits(source, threshold, begin, lead, stop, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr):
    """(columns, values, whether they are candidates), [ROWS, COLUMNS] in row-major order."""
    column = begin + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    value, inside = _load_inside(source, column, lead, stop, ALIGN)
    return column, value, inside & (value >= threshold)


@triton.jit
def _append(column, value, hit, count, first_slot, first_position, candidates, candidate_positions, TILE: tl.constexpr):
    """Writes the hits, `count` of each row, from slot `first_slot` on; hits without a slot are lost."""
    # Two short prefix sums are several times cheaper than one over all.
    each = hit.to(tl.int32)
    slot = (first_slot + tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(each, 1) - each
    slot = tl.where(hit & (slot < TILE), slot, -1)
    tl.store(candidates + slot, value, mask=slot >= 0)
    tl.store(candidate_positions + slot, first_position + column, mask=slot >= 0)


@triton.jit
def topk_filter_kernel(
    logits,
    lengths,
    row_starts,
    width,
    chunks,  # programs that share a row
    thresholds,  # float32 [rows], read if they are several, as the next
    progress,  # int32 [rows, chunks]: 1 + the candidates of a chunk, once it is counted
    candidates,  # as logits, [rows, TILE]
    candidate_positions,  # int32 [rows, TILE], ascending
    num_candidates,  # int32 [rows]; past TILE it counts those that found no slot
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,  # the power of two from chunks on
    ALIGN: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    SAMPLE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Collects the logits of a row longer than TILE that reach its threshold, in order."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    _, position, origin, lead, stop = _window(lengths, row_starts, row, width * ALIGN, HAS_STARTS, ALIGN)
    source = logits + (row * width * ALIGN + origin)
    candidates += row * TILE
    candidate_positions += row * TILE
    first_position = position - lead
    if (stop - lead > TILE) & (chunk * CHUNK < stop):
        if ALL_CHUNKS > 1:
            threshold = tl.load(thresholds + row)
            column, value, hit = _hits(source, threshold, chunk * CHUNK, lead, stop, CHUNK // 32, 32, ALIGN)
            count = tl.sum(hit.to(tl.int32), 1)
            total = tl.sum(count, 0)
            progress += row * chunks
            tl.atomic_xchg(progress + chunk, total + 1)
            written = _count_before(progress, chunk, ALL_CHUNKS)
            _append(column, value, hit, count, written, first_position, candidates, candidate_positions, TILE)
            if chunk * CHUNK + CHUNK >= stop:
                tl.store(num_candidates + row, written + total)
        else:
            threshold = _sample_threshold(source, lead, stop, TOPK, SAMPLE, PIECE)
            written = 0
            for begin in range(0, stop, CHUNK):
                column, value, hit = _hits(source, threshold, begin, lead, stop, CHUNK // 32, 32, ALIGN)
                count = tl.sum(hit.to(tl.int32), 1)
                _append(column, value, hit, count, written, first_position, candidates, candidate_positions, TILE)
                written += tl.sum(count, 0)
            tl.store(num_candidates + row, written)


@triton.jit
def topk_select_kernel(
    logits,  # float32 or bfloat16 [rows, width · ALIGN]
    lengths,  # int32 [rows]
    row_starts,  # int32 [rows], read if HAS_STARTS
    page_table,  # int32 [num_requests, num_pages], read if PAGED
    row_to_request,  # int32 [rows], read if PAGED and HAS_REQUESTS
    offsets,  # int32 [rows], read if RAGGED
    candidates,  # from topk_filter_kernel, read if FILTERED, as the next two
    candidate_positions,
    num_candidates,
    width,
    num_requests,
    num_pages,
    out,  # int32 [rows, TOPK]
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    FILTERED: tl.constexpr,
    ALIGN: tl.constexpr,
    METHOD: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_REQUESTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length, position, origin, lead, stop = _window(lengths, row_starts, row, width * ALIGN, HAS_STARTS, ALIGN)
    source = logits + (row * width * ALIGN + origin)
    tables = page_table, row_to_request, offsets, num_requests, num_pages
    out += row * TOPK
    slot = tl.arange(0, TILE)
    n = stop - lead
    # A short row gives every position, whether the logits have it or not.
    num_chosen = tl.where(length <= TOPK, length, n)
    if num_chosen <= TOPK:
        shift = tl.where(length <= TOPK, 0, position)
        for begin in range(0, TOPK, TILE):
            live = begin + slot < num_chosen
            index = _transformed(shift + begin + slot, live, row, tables, METHOD, HAS_REQUESTS, PAGE_SIZE)
            tl.store(out + begin + slot, index, mask=begin + slot < TOPK)
    else:
        in_registers = n <= TILE
        if FILTERED:
            num_found = tl.load(num_candidates + row, mask=n > TILE, other=0)
            filtered = (n > TILE) & (num_found >= TOPK) & (num_found <= TILE)
            in_registers = in_registers | filtered
            source_here = tl.where(filtered, candidates + row * TILE, source)
            lead_here = tl.where(filtered, 0, lead)
            stop_here = tl.where(filtered, num_found, stop)
        else:
            source_here = source
            lead_here = lead
            stop_here = stop
        if in_registers:
            keys = _load_keys(source_here, slot, lead_here, stop_here, ALIGN)
            lo, hi, count_hi = _search(keys, TOPK, stop_here - lead_here, 0)
            chosen, rank, _, _ = _places(keys, lo, hi, TOPK - count_hi, 0)
            at = position - lead + slot
            if FILTERED:
                found_at = tl.load(candidate_positions + row * TILE + slot, mask=filtered & chosen, other=0)
                at = tl.where(filtered, found_at, at)
            index = _transformed(at, chosen, row, tables, METHOD, HAS_REQUESTS, PAGE_SIZE)
            tl.store(out + rank, index, mask=chosen)
        else:
            if FILTERED:
                lo, hi, count_hi = _search_row(source, lead, stop, TOPK, TILE, ALIGN)
                ties = TOPK - count_hi
                sure_before, ties_before = 0, 0
                for begin in range(0, stop, TILE):
                    keys = _load_keys(source, begin + slot, lead, stop, ALIGN)
                    chosen, rank, sure, tied = _places(keys, lo, hi, ties, ties_before)
                    at = position - lead + begin + slot
                    index = _transformed(at, chosen, row, tables, METHOD, HAS_REQUESTS, PAGE_SIZE)
                    tl.store(out + sure_before + tl.minimum(ties_before, ties) + rank, index, mask=chosen)
                    sure_before += sure
                    ties_before += tied


# Warps of the kernels whose tiles do not depend on the call.
THRESHOLD_WARPS = 8
FILTER_WARPS = 4


def threshold_constants(plan: TopkPlan, topk: int, has_starts: bool) -> dict:
    constants = {"TOPK": topk, "TILE": plan.tile, "ALIGN": plan.align, "HAS_STARTS": has_starts}
    return constants | {"SAMPLE": _SAMPLE, "PIECE": _PIECE, "num_warps": THRESHOLD_WARPS}


def filter_constants(plan: TopkPlan, topk: int, has_starts: bool) -> dict:
    chunks = {"CHUNK": _CHUNK, "ALL_CHUNKS": triton.next_power_of_2(plan.chunks), "num_warps": FILTER_WARPS}
    return threshold_constants(plan, topk, has_starts) | chunks


def select_constants(
    plan: TopkPlan, topk: int, method: int, page_size: int, has_starts: bool, has_requests: bool
) -> dict:
    constants = {"TOPK": topk, "TILE": plan.tile, "FILTERED": plan.filtered, "ALIGN": plan.align}
    constants |= {"METHOD": method, "HAS_STARTS": has_starts, "HAS_REQUESTS": has_requests}
    return constants | {"PAGE_SIZE": page_size, "num_warps": plan.select_warps}


# --- launches -------------------------------------------------------------------------------------


class Transform(NamedTuple):
    """The arrays that make slots or rows of positions, as in `topk_transform`; without any they stay positions."""

    page_table: Any = None
    page_size: int = 1
    row_to_request: Any = None
    offsets: Any = None


def topk(execute: Executor, logits, lengths, *, topk, row_starts=None, transform: Transform, out=None) -> Any:
    """int32 `[rows, topk]`: positions; slots with a page table; rows of the concatenated KV with offsets."""
    page_table, page_size, row_to_request, offsets = transform
    rows, columns = logits.shape
    plan = plan_topk(rows, max(columns, 1), topk)
    has_starts, width = row_starts is not None, columns // plan.align
    row = (logits, lengths, row_starts if has_starts else lengths)
    shared, candidates = (lengths, lengths), (logits, lengths, lengths)  # not read
    if plan.filtered:
        sizes = (width, plan.chunks)
        if plan.chunks > 1:
            outputs = Output((rows,), "float32"), Output((rows, plan.chunks), "int32")
            constants = threshold_constants(plan, topk, has_starts)
            threshold = Launch(topk_threshold_kernel, "topk_threshold", (rows,), sizes, outputs, constants)
            shared = execute(threshold, row)
        candidates = Output((rows, plan.tile), dtype_of(logits))
        outputs = candidates, Output((rows, plan.tile), "int32"), Output((rows,), "int32")
        constants, grid = filter_constants(plan, topk, has_starts), (rows * plan.chunks,)
        candidates = execute(
            Launch(topk_filter_kernel, "topk_filter", grid, (), outputs, constants), (*row, *sizes, *shared)
        )
    method = PAGED if page_table is not None else RAGGED if offsets is not None else POSITIONS
    tables = [lengths if x is None else x for x in (page_table, row_to_request, offsets)]
    sizes = (width, *((0, 0) if page_table is None else page_table.shape))
    constants = select_constants(plan, topk, method.value, page_size, has_starts, row_to_request is not None)
    outputs = (Output((rows, topk), "int32"),)
    select = Launch(topk_select_kernel, "topk_select", (rows,), sizes, outputs, constants)
    return execute(select, (*row, *tables, *candidates), (out,))[0]
