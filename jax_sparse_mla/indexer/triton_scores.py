"""The logits of a run of columns: what the kernels of `indexer` do with the keys of rows that read the same pages.

A key is a row of the first operand of a product, a query's head a row of the second, so that relu, weights and the sum
over heads stay within a few lanes.

FP8 keys are multiplied as they are stored. HARDWARE_FP8 says whether the GPU multiplies and converts FP8 numbers (SM89
and up); elsewhere, and in Triton's interpreter, they become float16 in integer arithmetic, exactly.

FP4 keys have four scales each, powers of two. An e2m1 number times 2^e is an e5m2 number for every e from −13 to 13, so
keys within these scales become the operand of an FP8 product without rounding, and need no scale after it. Queries are
brought into e5m2 by a power of two for each head, which goes into its weight. That holds every query on the FP4 grid
whose groups' scales are not too far apart. What does not fit is found out on the way, and the run is scored again with
bfloat16 products, which hold all keys and queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jax_sparse_mla.kv_cache.number_formats import ue8m0_to_float32

_DIM = tl.constexpr(128)  # values of a key
FP8_BYTES, FP4_BYTES = 132, 68  # of a key
_FP8_BYTES, _FP4_BYTES = tl.constexpr(FP8_BYTES), tl.constexpr(FP4_BYTES)

_PACKED = tl.constexpr(64)  # bytes of the values of an FP4 key
_GROUP_BYTES = tl.constexpr(16)  # of them that share a scale
_LEAST_SCALES = tl.constexpr(0x72727272)  # four UE8M0 bytes of 2^-13
_UP_TO_26 = tl.constexpr(0x65656565)  # added to a byte of 7 bits, it sets bit 7 where the byte is above 26
_LOW_BITS = tl.constexpr(0x7F7F7F7F)
_HIGH_BITS = tl.constexpr(0x80808080)
_LARGEST_QUERY = tl.constexpr(14)  # exponent of a head's largest query in e5m2
_QUERY_EXPONENTS = tl.constexpr(40)  # of a head's largest query, at most, either sign


@triton.jit
def score(
    q_ptr,
    weights_ptr,
    row,  # the first of ROWS rows that read the same pages
    num_rows,
    keys,  # (the cache, its number of pages, pointer to the runs of these rows)
    rows,  # (their lengths, pointers to their column 0, whether to write them), each [ROWS]
    columns,  # (start, a multiple of BLOCK; stop; capacity)
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    FP4: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Columns start ... of rows, in whole blocks up to `stop`; -inf past a length.

    A run is RUN keys of a page, of which it is a part without a remainder: run 0 the first of page 0, and so on.
    """
    line, inside = _lines(row, num_rows, HEADS, HEADS_POW2, ROWS)
    heads = line, inside, tl.load(weights_ptr + line, mask=inside, other=0.0)
    if FP4:
        fits = _fp4_fast(
            q_ptr, heads, keys, rows, columns, PAGE_SIZE, RUN, HEADS_POW2, ROWS, HARDWARE_FP8, BLOCK, STAGES
        )
        if fits == 0:
            _fp4_slow(q_ptr, heads, keys, rows, columns, PAGE_SIZE, RUN, HEADS_POW2, ROWS, 64)
    else:
        _fp8(q_ptr, heads, keys, rows, columns, PAGE_SIZE, RUN, HEADS_POW2, ROWS, HARDWARE_FP8, BLOCK, STAGES)


@triton.jit
def _lines(row, rows, HEADS: tl.constexpr, HEADS_POW2: tl.constexpr, ROWS: tl.constexpr):
    """(where the heads of rows lie in `[rows, HEADS]`, whether they exist), both [ROWS * HEADS_POW2]."""
    index = tl.arange(0, ROWS * HEADS_POW2)
    head = index % HEADS_POW2
    row = row + index // HEADS_POW2
    return row.to(tl.int64) * HEADS + head, (head < HEADS) & (row < rows)


@triton.jit
def _load_runs(table_ptr, first, stop, capacity, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """The run of a block's columns, or the runs of each of them where a block is no part of a run."""
    if RUN % BLOCK == 0:
        return tl.load(table_ptr + first // RUN, mask=first < stop, other=-1)
    else:
        column = first + tl.arange(0, BLOCK)
        return tl.load(table_ptr + column // RUN, mask=column < tl.minimum(stop, capacity), other=-1)


@triton.jit
def _locate_keys(run, num_pages, first, capacity, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """(columns of a block, their offsets in their pages, pages to read, which of the columns have a key)."""
    column = first + tl.arange(0, BLOCK)
    # A run of whole blocks gives addresses that differ by constants.
    if RUN % BLOCK == 0:
        offset = first % RUN + tl.arange(0, BLOCK)
    elif BLOCK % RUN == 0:
        offset = tl.arange(0, BLOCK) % RUN
    else:
        offset = column % RUN
    runs_of_page: tl.constexpr = PAGE_SIZE // RUN
    exists = (run >= 0) & (run < num_pages * runs_of_page)
    run = tl.where(exists, run, 0)
    if runs_of_page > 1:
        offset += run % runs_of_page * RUN
        run //= runs_of_page
    return column, offset, run.to(tl.int64), exists & (column < capacity)


@triton.jit
def _store_logits(logits, is_key, column, rows, capacity):
    """Logits [BLOCK, ROWS]; -inf where there is no key, or none of the row's."""
    limit, out_ptr, stored = rows
    logits = tl.where(is_key[:, None] & (column[:, None] < limit[None, :]), logits, float("-inf"))
    tl.store(out_ptr[None, :] + column[:, None], logits, mask=stored[None, :] & (column[:, None] < capacity))


# --- FP8 keys --------------------------------------------------------------------------------------


@triton.jit
def _operand(byte, HARDWARE_FP8: tl.constexpr):
    """Bytes as what the tensor cores multiply: e4m3, or float16 numbers 2^-8 of the e4m3 ones."""
    if HARDWARE_FP8:
        return byte.to(tl.float8e4nv, bitcast=True)
    else:
        bits = byte.to(tl.int32)
        # A NaN stays one; moved into a float16's exponent and mantissa its bits would be a number.
        magnitude = tl.where((bits & 0x7F) == 0x7F, 0x7E00, (bits & 0x7F) << 7)
        return (magnitude | ((bits & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _fp8(
    q_ptr,
    heads,
    keys,
    rows,
    columns,
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    line, inside, weights = heads
    cache_ptr, num_pages, table_ptr = keys
    start, stop, capacity = columns
    byte_ptr = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    q_byte = tl.load(byte_ptr + line[:, None] * _DIM + tl.arange(0, _DIM)[None, :], mask=inside[:, None], other=0)
    queries = tl.trans(_operand(q_byte, HARDWARE_FP8))
    if not HARDWARE_FP8:
        weights *= 65536.0  # both operands are 2^-8 of their numbers
    dim = tl.arange(0, _DIM)[None, :]
    # The runs of a block are known one block ahead, so that the pipeline of keys does not wait for them.
    run = _load_runs(table_ptr, start, stop, capacity, RUN, BLOCK)
    for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
        column, offset, page, is_key = _locate_keys(run, num_pages, first, capacity, PAGE_SIZE, RUN, BLOCK)
        start_of_page = page * (PAGE_SIZE * _FP8_BYTES)
        byte = tl.load(cache_ptr + (start_of_page + offset * _DIM)[:, None] + dim, mask=is_key[:, None], other=0)
        scale_ptr = (cache_ptr + start_of_page + PAGE_SIZE * _DIM).to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(scale_ptr + offset, mask=is_key, other=0.0)
        scores = tl.dot(_operand(byte, HARDWARE_FP8), queries, out_dtype=tl.float32)
        # A key with a NaN has no number for a logit, as in the plain function.
        scores = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
        logits = tl.sum(tl.reshape(scores, [BLOCK, ROWS, HEADS_POW2]), axis=2) * scale[:, None]
        _store_logits(logits, is_key, column, rows, capacity)
        run = _load_runs(table_ptr, first + BLOCK, stop, capacity, RUN, BLOCK)


# --- FP4 keys --------------------------------------------------------------------------------------


@triton.jit
def _dims(HALF: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """The dimensions of one half of a key's values, as `_halves` gives them: [64]."""
    i = tl.arange(0, _PACKED)
    if HARDWARE_FP8:
        return i // 4 * 8 + 4 * HALF + i % 4
    else:
        return 2 * i + HALF


@triton.jit
def _halves(packed, above, HARDWARE_FP8: tl.constexpr):
    """Two operands [BLOCK, 64] of the bytes of FP4 keys; `above`: exponents of their scales above the least, int32."""
    if HARDWARE_FP8:
        # The e5m2 bytes of the magnitudes 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 with these exponents.
        small = above * 0x04040400 + 0x0A080400
        large = above * 0x04040404 + 0x12100E0C
        # A nibble of a word selects one of those eight bytes; the signs are moved to where they belong. A word must be
        # four bytes of one key, which a thread holds side by side: a cache aligned to 16 bytes makes it load them so.
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 codes, signs, shifted;
            and.b32 codes, $2, 0x77777777;
            shl.b32 shifted, $2, 4;
            prmt.b32 signs, shifted, $2, 0x5140;
            prmt.b32 $0, $3, $7, codes;
            lop3.b32 $0, $0, signs, 0x80808080, 0xF8;
            shr.b32 codes, codes, 16;
            prmt.b32 signs, shifted, $2, 0x7362;
            prmt.b32 $1, $3, $7, codes;
            lop3.b32 $1, $1, signs, 0x80808080, 0xF8;
            }
            """,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [packed, small, large],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        return first.to(tl.float8e5, bitcast=True), second.to(tl.float8e5, bitcast=True)
    else:
        code = packed.to(tl.int32)
        return _float16_of(code & 15, above), _float16_of(code >> 4, above)


@triton.jit
def _float16_of(code, above):
    """e2m1 numbers times 2^(above − 13), as float16; the upper byte is that of e5m2."""
    magnitude = code & 7
    # From 1 on exponent and mantissa move into those of e5m2; 0.5 is subnormal in e2m1.
    bits = tl.where(magnitude < 2, magnitude * ((above + 1) << 2), (magnitude << 1) + ((above + 1) << 2))
    return ((bits << 8) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _fp4_queries(q_ptr, line, inside, HALF: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """float32 [heads, 64], one half of the queries' values."""
    at = line[:, None] * _DIM + _dims(HALF, HARDWARE_FP8)[None, :]
    return tl.load(q_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _in_e5m2(x, factor, HARDWARE_FP8: tl.constexpr):
    """(x times powers of two as the product's second operand, whether it holds each of them)."""
    scaled = x * factor[:, None]
    half = scaled.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    held = (half.to(tl.float32) == scaled) & ((bits & 0xFF) == 0)
    if HARDWARE_FP8:
        half = ((bits >> 8) & 0xFF).to(tl.uint8).to(tl.float8e5, bitcast=True)
    return tl.trans(half), held


@triton.jit
def _runs_of(table_ptr, first, stop, capacity, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """The runs of a block's columns for `_joined`: of two halves where it is two runs long, otherwise one twice."""
    if 2 * RUN == BLOCK:
        end, at = tl.minimum(stop, capacity), table_ptr + first // RUN
        run = tl.load(at, mask=first < end, other=-1)
        return run, tl.load(at + 1, mask=first + RUN < end, other=-1)
    else:
        run = _load_runs(table_ptr, first, stop, capacity, RUN, BLOCK)
        return run, run


@triton.jit
def _joined(run, second_run, RUN: tl.constexpr, BLOCK: tl.constexpr):
    if 2 * RUN == BLOCK:
        return tl.where(tl.arange(0, BLOCK) < RUN, run, second_run)
    else:
        return run


@triton.jit
def _fp4_fast(
    q_ptr,
    heads,
    keys,
    rows,
    columns,
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """By FP8 products. 1 where they held all queries and keys, otherwise 0, and the logits are still to be made."""
    line, inside, weights = heads
    cache_ptr, num_pages, table_ptr = keys
    start, stop, capacity = columns
    x, y = _fp4_queries(q_ptr, line, inside, 0, HARDWARE_FP8), _fp4_queries(q_ptr, line, inside, 1, HARDWARE_FP8)
    largest = tl.maximum(_exponents(x), _exponents(y))
    moderate = (largest == 0) | ((largest >= 127 - _QUERY_EXPONENTS) & (largest <= 127 + _QUERY_EXPONENTS))
    largest = tl.where(moderate & (largest > 0), largest, 127)
    factor = ((-largest + (2 * 127 + _LARGEST_QUERY)) << 23).to(tl.float32, bitcast=True)
    weights *= ((largest - _LARGEST_QUERY) << 23).to(tl.float32, bitcast=True)
    first_queries, held_x = _in_e5m2(x, factor, HARDWARE_FP8)
    second_queries, held_y = _in_e5m2(y, factor, HARDWARE_FP8)
    fits = tl.min((held_x & held_y & moderate[:, None]).to(tl.int32).reshape([ROWS * HEADS_POW2 * _PACKED]), axis=0)

    if fits != 0:
        dim = tl.arange(0, _PACKED)[None, :]
        shift = tl.arange(0, _PACKED)[None, :] // _GROUP_BYTES * 8
        longest = tl.max(rows[0], axis=0)
        outside = tl.zeros([BLOCK], tl.uint32)
        run, second_run = _runs_of(table_ptr, start, stop, capacity, RUN, BLOCK)
        for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
            run = _joined(run, second_run, RUN, BLOCK)
            column, offset, page, is_key = _locate_keys(run, num_pages, first, capacity, PAGE_SIZE, RUN, BLOCK)
            # Where there is no key, the first page's are read, whatever they are: no load waits for a condition.
            start_of_page = page * (PAGE_SIZE * _FP4_BYTES)
            packed = tl.load(cache_ptr + (start_of_page + offset * _PACKED)[:, None] + dim)
            scales_ptr = (cache_ptr + start_of_page + PAGE_SIZE * _PACKED).to(tl.pointer_type(tl.uint32), bitcast=True)
            # Bytes of 0 to 26 are the exponents of scales in range, since then no byte borrows from the next.
            above = tl.load(scales_ptr + offset) - _LEAST_SCALES
            too_far = (((above & _LOW_BITS) + _UP_TO_26) | above) & _HIGH_BITS
            outside |= tl.where(is_key & (column < longest), too_far, 0)
            of_group = ((above[:, None] >> shift) & 0xFF).to(tl.int32)
            first_keys, second_keys = _halves(packed, of_group, HARDWARE_FP8)
            scores = tl.dot(first_keys, first_queries, out_dtype=tl.float32)
            scores = tl.dot(second_keys, second_queries, scores)
            scores = tl.maximum(scores, 0.0) * weights[None, :]
            logits = tl.sum(tl.reshape(scores, [BLOCK, ROWS, HEADS_POW2]), axis=2)
            _store_logits(logits, is_key, column, rows, capacity)
            run, second_run = _runs_of(table_ptr, first + BLOCK, stop, capacity, RUN, BLOCK)
        fits = 1 - tl.max((outside != 0).to(tl.int32), axis=0)
    return fits


@triton.jit
def _exponents(x):
    """The largest exponents of rows of float32 numbers, as they are stored."""
    return tl.max((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, axis=1)


@triton.jit
def _fp4_slow(
    q_ptr,
    heads,
    keys,
    rows,
    columns,
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """By bfloat16 products, which hold every query, and every key with its scale."""
    line, inside, weights = heads
    cache_ptr, num_pages, table_ptr = keys
    start, stop, capacity = columns
    even_queries = tl.trans(_fp4_queries(q_ptr, line, inside, 0, False).to(tl.bfloat16))
    odd_queries = tl.trans(_fp4_queries(q_ptr, line, inside, 1, False).to(tl.bfloat16))
    dim = tl.arange(0, _PACKED)[None, :]
    stop = tl.minimum(stop, capacity)  # whole blocks of the fast way may go further, this one's are shorter
    for first in tl.range(start, stop, BLOCK, num_stages=1):
        run = _load_runs(table_ptr, first, stop, capacity, RUN, BLOCK)
        column, offset, page, is_key = _locate_keys(run, num_pages, first, capacity, PAGE_SIZE, RUN, BLOCK)
        start_of_page = page * (PAGE_SIZE * _FP4_BYTES)
        packed = tl.load(cache_ptr + (start_of_page + offset * _PACKED)[:, None] + dim, mask=is_key[:, None], other=0)
        scale_ptr = cache_ptr + (start_of_page + PAGE_SIZE * _PACKED + offset * 4)[:, None] + dim // _GROUP_BYTES
        scale = ue8m0_to_float32(tl.load(scale_ptr, mask=is_key[:, None], other=0).to(tl.int32))
        code = packed.to(tl.int32)
        scores = tl.dot(_bfloat16_of(code & 15, scale), even_queries, out_dtype=tl.float32)
        scores = tl.dot(_bfloat16_of(code >> 4, scale), odd_queries, scores)
        scores = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
        logits = tl.sum(tl.reshape(scores, [BLOCK, ROWS, HEADS_POW2]), axis=2)
        _store_logits(logits, is_key, column, rows, capacity)


@triton.jit
def _bfloat16_of(code, scale):
    magnitude = code & 7
    # From 1 on exponent and mantissa move into those of float32, whose bias is 126 more.
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22)
    number = (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    return (number * scale).to(tl.bfloat16)
