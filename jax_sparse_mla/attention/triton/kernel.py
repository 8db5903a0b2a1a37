"""Sparse MLA attention in Triton: one kernel for decode from paged caches and for prefill, and the split-K combine.

A program takes one query row, one tile of heads and one share of the row's index blocks (a split). Per block of
BLOCK_N indices it gathers and dequantises the rows once, as bfloat16, and uses them as K and as V. Tiles must be
powers of two, so a row is read in segments: V4_FP8 in 256 | 128 | 64 e4m3 values and 64 of rope, all of them V; the
others in 512 values that are V (of V4.1 and of rows without rope the whole row) and, at 576, 64 of rope that are not.
Two caches whose rows are read in the same way share one loop over blocks; V4.1's FP8 and FP4 rows have a loop each.

Scores and lse are in base 2 inside; what is written is natural. A bf16 workspace is a paged cache of one page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jax_sparse_mla.kv_cache.number_formats import e2m1_words_to_float16
from jax_sparse_mla.kv_cache.triton import at_page

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# How a row's bytes are read (`plan.row_kind` chooses).
BF16_ROW = tl.constexpr(0)
FOOTER_SCALES = tl.constexpr(1)  # e4m3, then bf16; a UE8M0 byte per 64 values behind the page's rows
INLINE_SCALES = tl.constexpr(2)  # e4m3, then a float32 per 128 values, then bf16
BYTE_SCALES = tl.constexpr(3)  # e4m3 (V4.1); a UE8M0 byte per 32 values, inside the row or behind the page's rows
E2M1_PAIRS = tl.constexpr(4)  # e2m1, two a byte (V4.1); an e4m3 byte per 16 values, in one of the same two places
ONE_SCALE = tl.constexpr(5)  # e4m3; one float32 for all values of the cache


@triton.jit
def _e4m3_to_float32(byte, NATIVE: tl.constexpr):
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # float16 has one exponent bit more and a bias of 15 instead of 7: the same bits, shifted by 7, are the value
        # / 256, subnormals included.
        magnitude = (byte & 0x7F).to(tl.uint16)
        half = (magnitude << 7) | ((byte & 0x80).to(tl.uint16) << 8)
        half = tl.where(magnitude == 0x7F, 0x7E00, half).to(tl.uint16)  # the one NaN
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value


@triton.jit
def _ue8m0_to_float32(exponent):
    bits = exponent << 23
    bits = tl.where(exponent == 0, 0x400000, bits)  # 2^-127 is subnormal
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bf16_segment(rows, valid, WIDTH: tl.constexpr):
    """bfloat16 [BLOCK_N, WIDTH] from pointers to bytes [BLOCK_N]; 0 where invalid."""
    at = rows.to(tl.pointer_type(tl.bfloat16))
    return tl.load(at[:, None] + tl.arange(0, WIDTH)[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def _segment(
    rows,  # pointers to the rows' bytes, [BLOCK_N]
    scales,  # packed UE8M0 bytes [BLOCK_N], or pointers to bytes or float32 [BLOCK_N], or one float32, or unused
    valid,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Values START … START + WIDTH of each row, before its rope part; bfloat16 [BLOCK_N, WIDTH], 0 where invalid."""
    if KIND == BF16_ROW:
        values = _bf16_segment(rows + START * 2, valid, WIDTH)
    elif KIND == ONE_SCALE:
        byte = tl.load((rows + START)[:, None] + tl.arange(0, WIDTH)[None, :], mask=valid[:, None], other=0)
        values = (_e4m3_to_float32(byte, NATIVE) * scales).to(tl.bfloat16)
    elif KIND == E2M1_PAIRS:
        GROUPS: tl.constexpr = WIDTH // 16
        at = (rows + START // 2).to(tl.pointer_type(tl.uint32))[:, None] + tl.arange(0, WIDTH // 8)[None, :]
        wide = e2m1_words_to_float16(tl.load(at, mask=valid[:, None], other=0)).to(tl.float32)
        groups = START // 16 + tl.arange(0, GROUPS)
        byte = tl.load(scales[:, None] + groups[None, :], mask=valid[:, None], other=0)
        scale = _e4m3_to_float32(byte, NATIVE) * 16384.0
        wide = tl.reshape(wide, (BLOCK_N, GROUPS, 16)) * scale[:, :, None]
        values = tl.reshape(wide, (BLOCK_N, WIDTH)).to(tl.bfloat16)
    else:
        GROUP: tl.constexpr = 64 if KIND == FOOTER_SCALES else (32 if KIND == BYTE_SCALES else 128)
        GROUPS: tl.constexpr = WIDTH // GROUP
        byte = tl.load((rows + START)[:, None] + tl.arange(0, WIDTH)[None, :], mask=valid[:, None], other=0)
        groups = START // GROUP + tl.arange(0, GROUPS)
        if KIND == FOOTER_SCALES:
            exponent = (scales[:, None] >> (8 * groups)[None, :].to(tl.int64)) & 0xFF
            scale = _ue8m0_to_float32(exponent.to(tl.int32))
        elif KIND == BYTE_SCALES:
            exponent = tl.load(scales[:, None] + groups[None, :], mask=valid[:, None], other=0)
            scale = _ue8m0_to_float32(exponent.to(tl.int32))
        else:
            scale = tl.load(scales[:, None] + groups[None, :], mask=valid[:, None], other=0.0)
        wide = tl.reshape(_e4m3_to_float32(byte, NATIVE), (BLOCK_N, GROUPS, GROUP)) * scale[:, :, None]
        values = tl.reshape(wide, (BLOCK_N, WIDTH)).to(tl.bfloat16)
    return values


@triton.jit
def _query(at, heads, num_heads, START: tl.constexpr, WIDTH: tl.constexpr, QK_DIM: tl.constexpr):
    columns = START + tl.arange(0, WIDTH)
    return tl.load(at + heads[:, None] * QK_DIM + columns[None, :], mask=(heads < num_heads)[:, None], other=0.0)


@triton.jit
def _span(lengths, row, rows_per_length, topk):
    """How many leading columns the row scans; rows_per_length 0 means that the call has no lengths."""
    has_lengths = rows_per_length > 0
    length = tl.load(lengths + row // tl.maximum(rows_per_length, 1), mask=has_lengths, other=topk)
    return tl.minimum(tl.maximum(length, 0), topk)


@triton.jit
def _either(second, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The constant of the cache at hand, unsigned: a product with it extends to 64 bits in one instruction."""
    return tl.where(second, SECOND, FIRST).to(tl.uint32)


@triton.jit
def _find(
    slot,  # uint32 [BLOCK_N], 0 where invalid
    valid,
    second,  # whether the slots are the extra cache's
    base,  # pointer to the first byte of the cache at hand
    scale,  # float32, of ONE_SCALE
    extra_scale,
    KIND: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_BYTES: tl.constexpr,
):
    """(pointers to the rows' bytes [BLOCK_N], their scales for `_segment`)."""
    if PAGE_SIZE == 0:
        rows = base + slot.to(tl.int64) * ROW_BYTES
    else:
        page = tl.where(second, slot // EXTRA_PAGE_SIZE, slot // PAGE_SIZE)
        offset = (slot - page * _either(second, PAGE_SIZE, EXTRA_PAGE_SIZE)).to(tl.int64)
        page_at = page.to(tl.int64) * _either(second, PAGE_BYTES, EXTRA_PAGE_BYTES).to(tl.int64)
        rows = base + (page_at + offset * ROW_BYTES)
    if KIND == FOOTER_SCALES:
        footer = _either(second, PAGE_SIZE * ROW_BYTES, EXTRA_PAGE_SIZE * ROW_BYTES).to(tl.int64)
        at = (base + footer + (page_at + offset * 8)).to(tl.pointer_type(tl.int64))
        scales = tl.load(at, mask=valid, other=0)
    elif KIND == INLINE_SCALES:
        scales = (rows + 512).to(tl.pointer_type(tl.float32))
    elif KIND == ONE_SCALE:
        scales = tl.where(second, extra_scale, scale)
    elif KIND == BF16_ROW:
        scales = rows
    else:
        VALUE_BYTES: tl.constexpr = 256 if KIND == E2M1_PAIRS else 512
        SCALE_BYTES: tl.constexpr = 32 if KIND == E2M1_PAIRS else 16
        if ROW_BYTES > VALUE_BYTES:
            scales = rows + VALUE_BYTES
        else:
            footer = _either(second, PAGE_SIZE * ROW_BYTES, EXTRA_PAGE_SIZE * ROW_BYTES).to(tl.int64)
            scales = base + footer + (page_at + offset * SCALE_BYTES)
    return rows, scales


@triton.jit
def _store(out, heads, live, values, START: tl.constexpr, WIDTH: tl.constexpr):
    columns = START + tl.arange(0, WIDTH)
    at = out + heads[:, None] * 512 + columns[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _natural(lse_2, EMPTY_IS_INF: tl.constexpr):
    if EMPTY_IS_INF:
        lse_2 = tl.where(lse_2 == float("-inf"), float("inf"), lse_2)
    return lse_2 * LN_2


@triton.jit
def sparse_mla_kernel(
    q,  # bf16 [rows, heads, QK_DIM]
    kv,  # bytes [pages, page_bytes], or bf16 [kv_len, QK_DIM]
    indices,  # int32 [rows, topk], rows `stride` apart
    lengths,  # int32 [rows / rows_per_length]
    scale,  # float32 [1] of ONE_SCALE, or None
    extra_kv,
    extra_indices,  # int32 [rows, extra_topk]
    extra_lengths,
    extra_scale,
    sink,  # float32 [heads], read if HAS_SINK and not SPLIT
    qk_scale,  # softmax_scale · log2 e
    num_heads,
    rows_per_length,
    topk,
    num_slots,
    extra_rows_per_length,
    extra_topk,
    extra_slots,
    first_page,  # of each cache in its buffer
    stride,
    extra_first_page,
    extra_stride,
    out,  # bf16 [rows, heads, 512]; SPLIT: float32 [splits, rows, heads, 512], of this split's keys alone
    lse,  # float32 [rows, heads], natural; SPLIT: [splits, rows, heads], base 2, −inf without a key
    max_logits,  # float32 [rows, heads], or None
    KIND: tl.constexpr,
    EXTRA_KIND: tl.constexpr,  # KIND without a second cache
    NATIVE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_EXTRA: tl.constexpr,  # without, extra_topk is 0
    EMPTY_IS_INF: tl.constexpr,  # lse of a row without a key: +inf (FlashMLA's) or −inf
    PAGE_SIZE: tl.constexpr,  # constants: a runtime division for every row cost a sixth of the time; 0: one page
    PAGE_BYTES: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    EXTRA_ROW_BYTES: tl.constexpr,
    QK_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Which segments there are, see above.
    PARTS: tl.constexpr = KIND == FOOTER_SCALES
    SEG_A: tl.constexpr = 256 if PARTS else 512
    ROPE: tl.constexpr = QK_DIM - 64
    HAS_ROPE: tl.constexpr = PARTS or QK_DIM > 512
    APART: tl.constexpr = EXTRA_KIND != KIND
    # Row-wise offsets are 64-bit: rows · heads · dim and page · page_bytes both pass 2^31.
    tiles = (num_heads + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // tiles).to(tl.int64)
    heads = (tl.program_id(0) % tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    num_rows = tl.num_programs(0) // tiles
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)

    span = _span(lengths, row, rows_per_length, topk)
    extra_span = _span(extra_lengths, row, extra_rows_per_length, extra_topk)
    first_blocks = (span + BLOCK_N - 1) // BLOCK_N
    blocks = first_blocks + (extra_span + BLOCK_N - 1) // BLOCK_N
    begin = blocks * split // num_splits
    end = blocks * (split + 1) // num_splits

    q_row = q + row * num_heads * QK_DIM
    q_a = _query(q_row, heads, num_heads, 0, SEG_A, QK_DIM)
    if PARTS:
        q_b = _query(q_row, heads, num_heads, 256, 128, QK_DIM)
        q_c = _query(q_row, heads, num_heads, 384, 64, QK_DIM)
    if HAS_ROPE:
        q_r = _query(q_row, heads, num_heads, ROPE, 64, QK_DIM)

    cache = at_page(kv.to(tl.pointer_type(tl.uint8)), first_page, PAGE_BYTES)
    extra_cache = at_page(extra_kv.to(tl.pointer_type(tl.uint8)), extra_first_page, EXTRA_PAGE_BYTES)
    table = indices + row * stride
    extra_table = extra_indices + row * extra_stride

    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc_a = tl.zeros((BLOCK_H, SEG_A), tl.float32)
    if PARTS:
        acc_b = tl.zeros((BLOCK_H, 128), tl.float32)
        acc_c = tl.zeros((BLOCK_H, 64), tl.float32)
        acc_r = tl.zeros((BLOCK_H, 64), tl.float32)

    if KIND == ONE_SCALE:
        scale, extra_scale = tl.load(scale), tl.load(extra_scale)
    # The first of two loops is the extra cache's, usually the longer one. With loop-invariant code motion ptxas spills
    # the second loop's wgmma addresses (seen in SASS), so it is off.
    for part in tl.static_range(1 if APART else 0, -1, -1):
        from_block, to_block = begin, end
        if APART:
            from_block = tl.maximum(begin, first_blocks) if part == 1 else begin
            to_block = end if part == 1 else tl.minimum(end, first_blocks)
        for block in tl.range(from_block, to_block, disable_licm=APART):
            second = block >= first_blocks if HAS_EXTRA and not APART else tl.full((), part, tl.int1)
            start = tl.where(second, block - first_blocks, block) * BLOCK_N
            end_of_span = tl.where(second, extra_span, span)
            lane = tl.arange(0, BLOCK_N)
            # Load without `other=` and test the span again below. If the mask were used after the async copy, each
            # thread would keep one predicate per index alive across blocks.
            at = tl.where(second, extra_table, table) + start + lane
            slot = tl.load(at, mask=start + lane < end_of_span).to(tl.uint32)
            # Unsigned, a negative slot is beyond the last one too, and the division of `_find` is the shorter one.
            exists = slot < tl.where(second, extra_slots, num_slots).to(tl.uint32)
            valid = exists & (lane < end_of_span - start)
            slot = tl.where(valid, slot, 0)
            base = tl.where(second, extra_cache, cache)
            rows, scales = _find(
                *(slot, valid, second, base, scale, extra_scale),
                *(EXTRA_KIND if part == 1 else KIND, EXTRA_ROW_BYTES if part == 1 else ROW_BYTES),
                *(PAGE_SIZE, PAGE_BYTES, EXTRA_PAGE_SIZE, EXTRA_PAGE_BYTES),
            )
            k_a = _segment(rows, scales, valid, 0, SEG_A, EXTRA_KIND if part == 1 else KIND, NATIVE, BLOCK_N)
            if PARTS:
                k_b = _segment(rows, scales, valid, 256, 128, KIND, NATIVE, BLOCK_N)
                k_c = _segment(rows, scales, valid, 384, 64, KIND, NATIVE, BLOCK_N)
            if HAS_ROPE:
                k_r = _bf16_segment(rows + (ROW_BYTES - 128), valid, 64)

            scores = tl.dot(q_a, tl.trans(k_a))
            if PARTS:
                scores = tl.dot(q_b, tl.trans(k_b), scores)
                scores = tl.dot(q_c, tl.trans(k_c), scores)
            if HAS_ROPE:
                scores = tl.dot(q_r, tl.trans(k_r), scores)
            scores = tl.where(valid[None, :], scores * qk_scale, float("-inf"))

            new_top = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - shift[:, None])
            keep = tl.exp2(top - shift)
            total = total * keep + tl.sum(weights, 1)
            top = new_top
            weights = weights.to(tl.bfloat16)
            acc_a = tl.dot(weights, k_a, acc_a * keep[:, None])
            if PARTS:
                acc_b = tl.dot(weights, k_b, acc_b * keep[:, None])
                acc_c = tl.dot(weights, k_c, acc_c * keep[:, None])
                acc_r = tl.dot(weights, k_r, acc_r * keep[:, None])

    empty = top == float("-inf")
    lse_2 = tl.where(empty, float("-inf"), top + tl.log2(total))
    factor = tl.where(empty, 0.0, 1.0 / total)
    at = row * num_heads
    if SPLIT:
        at += split.to(tl.int64) * num_rows * num_heads
        tl.store(lse + at + heads, lse_2, mask=heads < num_heads)
    else:
        tl.store(lse + at + heads, _natural(lse_2, EMPTY_IS_INF), mask=heads < num_heads)
        if HAS_SINK:
            logit = tl.load(sink + heads, mask=heads < num_heads, other=0.0)
            factor = tl.where(empty, 0.0, factor / (1.0 + tl.exp2(logit * LOG2_E - lse_2)))
    if max_logits is not None:
        tl.store(max_logits + at + heads, top * LN_2, mask=heads < num_heads)
    live = heads < num_heads
    if SPLIT:
        live = live & (begin < end)  # the combine does not read a split without a block
    out += at * 512
    _store(out, heads, live, acc_a * factor[:, None], 0, SEG_A)
    if PARTS:
        _store(out, heads, live, acc_b * factor[:, None], 256, 128)
        _store(out, heads, live, acc_c * factor[:, None], 384, 64)
        _store(out, heads, live, acc_r * factor[:, None], ROPE, 64)


@triton.jit
def combine_kernel(
    partial,  # float32 [splits, rows · heads, 512]; a split whose lse is −inf is not read
    partial_lse,  # float32 [splits, rows · heads], base 2
    sink,  # float32 [heads], read if HAS_SINK
    num_heads,
    num_splits,
    out,  # bf16 [rows · heads, 512]
    lse,  # float32 [rows · heads], natural
    HAS_SINK: tl.constexpr,
    EMPTY_IS_INF: tl.constexpr,
    ALL_SPLITS: tl.constexpr,  # at least num_splits
    SOME_SPLITS: tl.constexpr,  # how many are added at a time
):
    """One head of one row: the splits' outputs, weighted by their lse."""
    item = tl.program_id(0).to(tl.int64)
    items = tl.num_programs(0).to(tl.int64)
    splits = tl.arange(0, ALL_SPLITS)
    each = tl.load(partial_lse + splits * items + item, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(each, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(each - shift), 0)
    lse_2 = tl.where(total == 0, float("-inf"), top + tl.log2(total))
    factor = tl.where(total == 0, 0.0, 1.0 / total)
    tl.store(lse + item, _natural(lse_2, EMPTY_IS_INF))
    if HAS_SINK:
        logit = tl.load(sink + item % num_heads)
        factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp2(logit * LOG2_E - lse_2)))

    columns = tl.arange(0, 512)
    acc = tl.zeros((512,), tl.float32)
    for start in range(0, num_splits, SOME_SPLITS):
        split = start + tl.arange(0, SOME_SPLITS)
        some_lse = tl.load(partial_lse + split * items + item, mask=split < num_splits, other=float("-inf"))
        at = (split * items + item) * 512
        used = some_lse != float("-inf")
        values = tl.load(partial + at[:, None] + columns[None, :], mask=used[:, None], other=0.0)
        acc += tl.sum(values * (tl.exp2(some_lse - shift) * factor)[:, None], 0)
    tl.store(out + item * 512 + columns, acc.to(tl.bfloat16))
