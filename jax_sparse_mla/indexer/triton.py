"""Triton kernels of the indexer: its quantisers, for queries and into the key cache, and the logits.

The rules are those of `jax_sparse_mla.indexer.logits`. HARDWARE_FP8 says whether the GPU multiplies and converts e4m3
numbers (SM89 and up). The quantisers' rules are those of FP8 keys; logits are of FP8 and of FP4 keys
(`index_scores`).

Two kernels walk over the columns. Decode: every program takes an equal share of all rows' blocks, whatever the lengths.
Prefill: a tile of rows that share their pages scores a block of keys at once; rows of a tile that do not share them are
scored one by one. What no row's length reaches is filled with -inf, and costs that only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from jax_sparse_mla.indexer.triton_scores import FP4_BYTES, FP8_BYTES, score
from jax_sparse_mla.kv_cache.number_formats import float32_to_e4m3
from jax_sparse_mla.kv_cache.triton import _locate, at_page
from jax_sparse_mla.launch.describe import Executor, Launch, Output, dtype_of

_DIM = tl.constexpr(128)  # values of a key
TOKEN_BYTES = FP8_BYTES
_TOKEN_BYTES, _FP4_BYTES = tl.constexpr(TOKEN_BYTES), tl.constexpr(FP4_BYTES)

_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_F32_MAX_BITS = tl.constexpr(0x7F7FFFFF)
_F32_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4, the smallest largest magnitude that a scale is made of
_E4M3_MAX = tl.constexpr(448.0)

_FILL = tl.constexpr(2048)  # columns that one store fills

# By the queries' dtype. The kernel of a layer takes other lines at a time; the bits are the same.
QUANTIZE_OPTIONS = {
    "bfloat16": {"LINES": 64, "STAGES": 3, "num_warps": 4},
    "float32": {"LINES": 32, "STAGES": 3, "num_warps": 4},
}
QUANTIZE_PROGRAMS_PER_SM = 2
WRITE_OPTIONS = {"TOKENS": 16, "num_warps": 4}
DECODE_OPTIONS = {"BLOCK": 64, "STAGES": 3, "num_warps": 4}
PREFILL_OPTIONS = {"ROWS": 4, "COLUMNS": 4096, "BLOCK": 64, "STAGES": 3, "num_warps": 4}
# Fewer registers than the compiler would take, so that four programs fit on a multiprocessor.
FP4_DECODE_OPTIONS = {"BLOCK": 128, "STAGES": 3, "num_warps": 4, "maxnreg": 128}
FP4_PREFILL_OPTIONS = PREFILL_OPTIONS

# Programs of the decode kernel per multiprocessor: as many as fit beside each other, for their loads in flight.
DECODE_PROGRAMS_PER_SM = 4
# From this many rows on they are taken in tiles; fewer are other requests' most likely, with nothing to share.
PREFILL_ROWS = 256


class LogitsPlan(NamedTuple):
    """How the logits of a shape are launched; constants include num_warps."""

    kernel: Any
    programs: int
    constants: dict[str, int]


def plan_logits(
    rows: int, heads: int, runs: int, page_size: int, sm_count: int, *, run: int | None = None, fp4: bool = False
) -> LogitsPlan:
    """For `[rows, heads, 128]` queries over `runs` runs of `run` keys each, by default of a page; no size is zero."""
    run = run or page_size
    capacity = runs * run  # no constant of the kernels: an eager engine's page tables grow from step to step
    constants = {"PAGE_SIZE": page_size, "RUN": run, "HEADS": heads, "FP4": fp4}
    constants["HEADS_POW2"] = max(triton.next_power_of_2(heads), 16)  # what a tensor core's operand has at least
    if rows < PREFILL_ROWS:
        constants |= (FP4_DECODE_OPTIONS if fp4 else DECODE_OPTIONS) | {"ROWS_POW2": triton.next_power_of_2(rows)}
        return LogitsPlan(index_logits_decode_kernel, DECODE_PROGRAMS_PER_SM * sm_count, constants)
    constants |= FP4_PREFILL_OPTIONS if fp4 else PREFILL_OPTIONS
    tiles, columns = triton.cdiv(rows, constants["ROWS"]), constants["COLUMNS"]
    # Enough programs that the last ones to end are few; two run side by side on a multiprocessor.
    while columns > 512 and tiles * triton.cdiv(capacity, columns) < 8 * sm_count:
        columns //= 2
    constants["COLUMNS"] = columns
    constants["SLOTS_POW2"] = triton.next_power_of_2(triton.cdiv(columns, run) + 1)
    return LogitsPlan(index_logits_prefill_kernel, tiles * triton.cdiv(capacity, columns), constants)


# --- quantising ------------------------------------------------------------------------------------


@triton.jit
def _sylvester():
    """Sylvester's matrix [128, 128] of signs, bfloat16: -1 where row and column share an odd number of set bits."""
    i = tl.arange(0, _DIM)
    common = i[:, None] & i[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _hadamard(x, signs):
    """x [n, 128], bfloat16 or float32, times the signs and 128^-0.5: float32."""
    if x.dtype == tl.bfloat16:
        transformed = tl.dot(x, signs)
    else:
        # Three bfloat16 numbers hold a float32, and their products with a sign are exact.
        high = x.to(tl.bfloat16)
        remainder = x - high.to(tl.float32)
        middle = remainder.to(tl.bfloat16)
        low = (remainder - middle.to(tl.float32)).to(tl.bfloat16)
        transformed = tl.dot(low, signs)
        transformed = tl.dot(middle, signs, transformed)
        transformed = tl.dot(high, signs, transformed)
    return transformed * 0.08838834764831845


@triton.jit
def _quantize(x, HARDWARE_FP8: tl.constexpr):
    """(e4m3 bytes, float32 scales) of rows of 128 values."""
    # Bits of magnitudes order as the magnitudes do, and a NaN does not get lost among them.
    amax = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=1)
    amax = tl.minimum(tl.maximum(amax, _F32_FLOOR_BITS), _F32_MAX_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + _E4M3_MAX)
    value = x * tl.div_rn(tl.zeros_like(amax) + 1.0, scale)[:, None]
    value = tl.where(value > _E4M3_MAX, _E4M3_MAX, tl.where(value < -_E4M3_MAX, -_E4M3_MAX, value))
    return float32_to_e4m3(value, HARDWARE_FP8), scale


@triton.jit
def quantize_index_q_kernel(
    q_ptr,  # bfloat16 or float32 [n, 128]
    n,
    values_ptr,  # e4m3 [n, 128]
    scale_ptr,  # float32 [n]
    HADAMARD: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
):
    if HADAMARD:
        signs = _sylvester()
    for first in tl.range(tl.program_id(0) * LINES, n, tl.num_programs(0) * LINES, num_stages=STAGES):
        line = first + tl.arange(0, LINES)
        inside = line < n
        at = line.to(tl.int64)[:, None] * _DIM + tl.arange(0, _DIM)[None, :]
        q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
        values, scale = _quantize(_hadamard(q, signs) if HADAMARD else q.to(tl.float32), HARDWARE_FP8)
        tl.store(values_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + at, values, mask=inside[:, None])
        tl.store(scale_ptr + line, scale, mask=inside)


@triton.jit
def store_keys(
    k,  # float32 [n, 128], transformed where they are
    slot,  # int32 [n]
    cache_ptr,  # uint8, the first page of the cache
    num_pages,
    PAGE_SIZE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """Quantises keys into their slots; those that do not exist are skipped."""
    valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
    values, scale = _quantize(k, HARDWARE_FP8)
    start = page * (PAGE_SIZE * _TOKEN_BYTES)
    # Limits a thread's vector to the 8 values that it loaded: 16 would send all of them through shared memory.
    target = (start + offset * _DIM)[:, None] + tl.max_contiguous(tl.arange(0, _DIM)[None, :], (1, 8))
    tl.store(cache_ptr + target, values, mask=valid[:, None])
    scale_ptr = (cache_ptr + start + PAGE_SIZE * _DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scale_ptr + offset, scale, mask=valid)


@triton.jit
def load_keys(k_ptr, slots_ptr, n, HADAMARD: tl.constexpr, TOKENS: tl.constexpr):
    """(float32 [TOKENS, 128], slots) of the program's keys; −1 is the slot of those behind the last."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
    at = token.to(tl.int64)[:, None] * _DIM + tl.arange(0, _DIM)[None, :]
    k = tl.load(k_ptr + at, mask=(token < n)[:, None], other=0.0)
    return _hadamard(k, _sylvester()) if HADAMARD else k.to(tl.float32), slot


@triton.jit
def write_index_k_kernel(
    slots_ptr,  # int32 [n]
    k_ptr,  # bfloat16 or float32 [n, 128]
    cache_in_ptr,  # the same buffer as cache_ptr
    n,
    num_pages,  # of the cache, which begins with the page first_page of the buffer
    first_page,
    cache_ptr,  # uint8 [pages, PAGE_SIZE * 132]
    PAGE_SIZE: tl.constexpr,
    HADAMARD: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    TOKENS: tl.constexpr,
):
    cache_ptr = at_page(cache_ptr, first_page, PAGE_SIZE * _TOKEN_BYTES)
    k, slot = load_keys(k_ptr, slots_ptr, n, HADAMARD, TOKENS)
    store_keys(k, slot, cache_ptr, num_pages, PAGE_SIZE, HARDWARE_FP8)


# --- logits ----------------------------------------------------------------------------------------


@triton.jit
def _fill(out_ptr, start, stop):
    """-inf in columns start ... stop - 1 of a row."""
    for first in range(start // 4 * 4, stop, _FILL):
        column = first + tl.arange(0, _FILL)
        tl.store(out_ptr + column, float("-inf"), mask=(column >= start) & (column < stop))


@triton.jit
def _blocks_end(length, BLOCK: tl.constexpr):
    """The columns of the blocks that a length reaches into."""
    return (length + (BLOCK - 1)) // BLOCK * BLOCK


@triton.jit
def index_logits_decode_kernel(
    q_ptr,  # [rows, HEADS, 128], e4m3 for FP8 keys, bfloat16 for FP4 keys
    weights_ptr,  # float32 [rows, HEADS]
    cache_ptr,  # uint8 [pages, PAGE_SIZE * 132], or 68 for FP4 keys
    runs_ptr,  # int32 [rows, capacity / RUN]: pages, or parts of them
    lengths_ptr,  # int32 [rows]
    rows,
    num_pages,
    first_page,
    out_ptr,  # float32 [rows, capacity]
    capacity,  # a constant under XLA, where nothing is said of a number's divisors, on which wide stores depend
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    ROWS_POW2: tl.constexpr,
    FP4: tl.constexpr,
    FILL: tl.constexpr,  # whether -inf is written behind the block that holds a row's last key
    HARDWARE_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    cache_ptr = at_page(cache_ptr, first_page, PAGE_SIZE * (_FP4_BYTES if FP4 else _TOKEN_BYTES))
    program, programs = tl.program_id(0), tl.num_programs(0)
    if FILL:
        pieces = tl.cdiv(capacity, _FILL)
        piece = program
        while piece < rows * pieces:
            row = piece // pieces
            first = piece % pieces * _FILL
            length = tl.minimum(tl.maximum(tl.load(lengths_ptr + row), 0), capacity)
            start = tl.maximum(_blocks_end(length, BLOCK), first)
            _fill(out_ptr + row.to(tl.int64) * capacity, start, tl.minimum(first + _FILL, capacity))
            piece += programs

    # Blocks of all rows follow each other; each program takes the next share of them.
    row = tl.arange(0, ROWS_POW2)
    length = tl.load(lengths_ptr + row, mask=row < rows, other=0)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    blocks = _blocks_end(length, BLOCK) // BLOCK
    row_end = tl.cumsum(blocks, axis=0)
    total = tl.sum(blocks, axis=0)
    share, left_over = total // programs, total % programs
    block = program * share + tl.minimum(program, left_over)
    last = block + share + (program < left_over).to(tl.int32)
    one = tl.arange(0, 1)
    while block < last:
        current = tl.sum((row_end <= block).to(tl.int32), axis=0)
        end = tl.sum(tl.where(row == current, row_end, 0), axis=0)
        begin = end - tl.sum(tl.where(row == current, blocks, 0), axis=0)
        limit = tl.sum(tl.where(row == current, length, 0), axis=0)
        stop = tl.minimum(end, last)
        score(
            *(q_ptr, weights_ptr, current, rows),
            (cache_ptr, num_pages, runs_ptr + current.to(tl.int64) * (capacity // RUN)),
            (limit + one, out_ptr + (current.to(tl.int64) * capacity + one), one == 0),
            ((block - begin) * BLOCK, (stop - begin) * BLOCK, capacity),
            *(PAGE_SIZE, RUN, HEADS, HEADS_POW2, 1, FP4, HARDWARE_FP8, BLOCK, STAGES),
        )
        block = stop


@triton.jit
def index_logits_prefill_kernel(
    q_ptr,  # [rows, HEADS, 128], e4m3 for FP8 keys, bfloat16 for FP4 keys
    weights_ptr,  # float32 [rows, HEADS]
    cache_ptr,  # uint8 [pages, PAGE_SIZE * 132], or 68 for FP4 keys
    runs_ptr,  # int32 [rows, capacity / RUN]: pages, or parts of them
    lengths_ptr,  # int32 [rows]
    rows,
    num_pages,
    first_page,
    out_ptr,  # float32 [rows, capacity]
    capacity,  # a constant under XLA, where nothing is said of a number's divisors, on which wide stores depend
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    SLOTS_POW2: tl.constexpr,  # at least the runs that COLUMNS columns touch
    FP4: tl.constexpr,
    FILL: tl.constexpr,  # whether -inf is written behind the block that holds a row's last key
    HARDWARE_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    cache_ptr = at_page(cache_ptr, first_page, PAGE_SIZE * (_FP4_BYTES if FP4 else _TOKEN_BYTES))
    # Programs that run at the same time share their rows: the queries are read once, the keys stay in the L2.
    chunks = tl.cdiv(capacity, COLUMNS)
    table_width = capacity // RUN
    first_row = tl.program_id(0) // chunks * ROWS
    start = tl.program_id(0) % chunks * COLUMNS
    stop = tl.minimum(start + COLUMNS, capacity)
    row = first_row + tl.arange(0, ROWS)
    in_rows = row < rows
    length = tl.load(lengths_ptr + row, mask=in_rows, other=0)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    longest = tl.max(length, axis=0)
    scored = tl.maximum(tl.minimum(_blocks_end(longest, BLOCK), stop), start)
    out = out_ptr + row.to(tl.int64) * capacity

    if start < scored:
        # The runs that a row reads must be those of the longest.
        leader = tl.max(tl.where(length == longest, row, 0), axis=0)
        place = start // RUN + tl.arange(0, SLOTS_POW2)[None, :]
        reads = (place < table_width) & (place * RUN < stop)
        theirs = tl.load(runs_ptr + leader.to(tl.int64) * table_width + place, mask=reads, other=-1)
        read = reads & (place * RUN < length[:, None])
        of_row = tl.load(runs_ptr + row.to(tl.int64)[:, None] * table_width + place, mask=read, other=-1)
        differ = tl.max(tl.max((read & (of_row != theirs)).to(tl.int32), axis=1), axis=0)
        if differ == 0:
            score(
                *(q_ptr, weights_ptr, first_row, rows),
                (cache_ptr, num_pages, runs_ptr + leader.to(tl.int64) * table_width),
                (length, out, in_rows),
                (start, scored, capacity),
                *(PAGE_SIZE, RUN, HEADS, HEADS_POW2, ROWS, FP4, HARDWARE_FP8, BLOCK, STAGES),
            )
        else:
            one = tl.arange(0, 1)
            single = first_row
            while single < tl.minimum(first_row + ROWS, rows):
                limit = tl.sum(tl.where(row == single, length, 0), axis=0)
                end = tl.maximum(tl.minimum(_blocks_end(limit, BLOCK), scored), start)
                if FILL:
                    _fill(out_ptr + single.to(tl.int64) * capacity, end, scored)
                score(
                    *(q_ptr, weights_ptr, single, rows),
                    (cache_ptr, num_pages, runs_ptr + single.to(tl.int64) * table_width),
                    (limit + one, out_ptr + (single.to(tl.int64) * capacity + one), one == 0),
                    (start, end, capacity),
                    *(PAGE_SIZE, RUN, HEADS, HEADS_POW2, 1, FP4, HARDWARE_FP8, BLOCK, STAGES),
                )
                single += 1
    if FILL:
        single = first_row
        while single < tl.minimum(first_row + ROWS, rows):
            _fill(out_ptr + single.to(tl.int64) * capacity, scored, stop)
            single += 1


# --- launches: sizes are not zero ------------------------------------------------------------------
# `pages` are the first page and the number of pages of the cache in its buffer; None: the buffer is the cache.


def quantize_index_q(execute: Executor, q, *, hadamard: bool, out: Sequence[Any] | None = None) -> tuple[Any, ...]:
    """float8_e4m3fn, shaped as q, and float32 scales, for a last axis of 128."""
    shape = tuple(q.shape)
    lines = math.prod(shape[:-1])
    # Programs share the lines out, and each makes the transform's matrix once.
    options = QUANTIZE_OPTIONS[dtype_of(q)]
    grid = (min(triton.cdiv(lines, options["LINES"]), QUANTIZE_PROGRAMS_PER_SM * execute.device.sm_count),)
    outputs = Output(shape, "float8_e4m3fn"), Output(shape[:-1], "float32")
    constants = {"HADAMARD": hadamard, "HARDWARE_FP8": execute.device.hardware_fp8, **options}
    return execute(Launch(quantize_index_q_kernel, "quantize_index_q", grid, (lines,), outputs, constants), (q,), out)


def write_index_k(
    execute: Executor, index_cache, slots, k, *, hadamard: bool, pages: tuple[int, int] | None = None
) -> Any:
    """uint8 `[pages, page_size * 132]` with the keys written."""
    n, page_bytes = slots.shape[0], index_cache.shape[1]
    first_page, num_pages = pages or (0, index_cache.shape[0])
    constants = {"PAGE_SIZE": page_bytes // TOKEN_BYTES, "HADAMARD": hadamard, **WRITE_OPTIONS}
    constants["HARDWARE_FP8"] = execute.device.hardware_fp8
    grid, outputs = (triton.cdiv(n, WRITE_OPTIONS["TOKENS"]),), (Output(index_cache.shape, "uint8", alias=2),)
    launch = Launch(write_index_k_kernel, "write_index_k", grid, (n, num_pages, first_page), outputs, constants)
    return execute(launch, (slots, k, index_cache))[0]


def index_logits(
    execute: Executor,
    *arrays: Any,
    fp4: bool = False,
    pages: tuple[int, int] | None = None,
    run: int | None = None,
    fill: bool = True,
    out=None,
) -> Any:
    """float32 `[rows, capacity]`, for float8_e4m3fn q over FP8 keys and bfloat16 q over FP4 keys.

    Arrays are q, weights, index_cache, page_table and lengths. The table is of pages, or of runs of `run` keys, page
    p's being `p * page_size / run` and the following ones. Without `fill` columns are unwritten from the end of the
    block on that holds a row's last key.
    """
    q, _, index_cache, page_table, _ = arrays
    (rows, heads, _), (first_page, num_pages) = q.shape, pages or (0, index_cache.shape[0])
    width, page_size = page_table.shape[1], index_cache.shape[1] // (FP4_BYTES if fp4 else TOKEN_BYTES)
    plan = plan_logits(rows, heads, width, page_size, execute.device.sm_count, run=run, fp4=fp4)
    capacity = width * (run or page_size)
    constants = {"capacity": capacity, "HARDWARE_FP8": execute.device.hardware_fp8, "FILL": fill, **plan.constants}
    outputs = (Output((rows, capacity), "float32"),)
    scalars = rows, num_pages, first_page
    launch = Launch(plan.kernel, "index_logits", (plan.programs,), scalars, outputs, constants)
    return execute(launch, arrays, (out,))[0]
