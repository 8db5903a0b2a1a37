"""Triton kernels over the bytes of paged KV caches: quantise and scatter, gather and dequantise, split pages.

The rules are those of `jax_sparse_mla.kv_cache`, bit by bit. A layout reaches a kernel as the constants of
`layout_constants`; byte offsets of pages are 64-bit, since a cache may exceed 2 GiB. An output that is aliased to an
input is the last pointer, and only it is used. The launches are at the end.

A group of the quantised part is one row of a tile, [tokens * groups, values of a group], so that the largest magnitude
of a group is a reduction along a row. Eight neighbouring values belong to a thread: 16 bytes of bfloat16, 8 of fp8.
HARDWARE_CASTS is `number_formats`'.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.kv_cache.layout import KVLayout, Pages
from jax_sparse_mla.kv_cache.number_formats import (
    E4M3_SCALES,
    F32_INF,
    FLOAT32_SCALES,
    MAGNITUDE_MASK,
    SCALE_KINDS,
    TENSOR_SCALE,
    bfloat16_bits,
    e2m1_to_float32,
    e4m3_to_float32,
    float32_to_e4m3,
    quantise_by_tensor,
    quantise_e2m1,
    quantise_groups,
    ue8m0_to_float32,
)
from jax_sparse_mla.launch.describe import Executor, Launch, Output

# Values of the bfloat16 part that one row of a tile holds: it divides 64, 512 and 576.
_CHUNK = tl.constexpr(64)


@functools.cache
def layout_constants(layout: KVLayout, page_size: int, page_bytes: int | None = None) -> dict[str, int]:
    """The constexpr arguments of a kernel that describe a layout at a page size; `page_bytes` as in `Pages`."""
    chunks = (layout.qk_dim - layout.quantised_dim) // _CHUNK.value
    groups_pow2, chunks_pow2 = (triton.next_power_of_2(n) if n else 0 for n in (layout.num_groups, chunks))
    scale_start, scale_stride = layout.scale_place(page_size)
    page_bytes = layout.page_bytes(page_size) if page_bytes is None else page_bytes
    constants = {"PAGE_SIZE": page_size, "PAGE_BYTES": page_bytes, "DATA_BYTES": layout.data_bytes}
    constants |= {"SCALE_START": scale_start, "SCALE_STRIDE": scale_stride, "SCALES": SCALE_KINDS[layout.scales]}
    constants |= {"QK_DIM": layout.qk_dim, "QUANT_DIM": layout.quantised_dim}
    constants |= {"GROUP": layout.group, "GROUPS_POW2": groups_pow2, "CHUNKS_POW2": chunks_pow2}
    return constants | {"BF16_START": layout.quantised_bytes + layout.inline_scale_bytes}


def split_constants(pages: Pages, out_pages: Pages) -> dict[str, int]:
    """The constexpr arguments of `split_pages_kernel`."""
    layout, page_size = pages.layout, pages.page_size
    constants = {"PAGE_SIZE": page_size, "PAGE_BYTES": pages.stride, "OUT_PAGE_BYTES": out_pages.stride}
    constants |= {"DATA_BYTES": layout.data_bytes, "FOOTER_BYTES": layout.footer_scale_bytes}
    return constants | {"RATIO": page_size // out_pages.page_size}


# Tokens per program and warps: four 16-byte loads in flight per thread. On an H200 no other size, cache modifier or
# eviction policy is faster by more than what two runs differ by, and programs that stay for many tokens are slower.
WRITE_OPTIONS = {"TOKENS": 4, "num_warps": 2}
GATHER_OPTIONS = {"TOKENS": 4, "num_warps": 2}


@triton.jit
def at_page(pointer, page, PAGE_BYTES: tl.constexpr):
    """A pointer to a page of a buffer: where a layer's pages begin."""
    return pointer + tl.full((), PAGE_BYTES, tl.int64) * page


@triton.jit
def _locate(slot, num_pages, PAGE_SIZE: tl.constexpr):
    """(valid, page, offset): a slot that does not exist is page 0, offset 0, and must be masked."""
    page = tl.maximum(slot, 0) // PAGE_SIZE
    valid = (slot >= 0) & (page < num_pages)
    page = tl.where(valid, page, 0)
    offset = tl.where(valid, slot - page * PAGE_SIZE, 0)
    return valid, page.to(tl.int64), offset


@triton.jit
def load_bfloat16_bits(pointer, mask):
    """Rounded to bfloat16 as int32 in [0, 65535]; no finite float32 becomes infinite."""
    if pointer.dtype.element_ty == tl.float32:
        bits = tl.load(pointer, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        rounded = bfloat16_bits(bits)
        became_inf = ((rounded & 0x7FFF) == 0x7F80) & ((bits & MAGNITUDE_MASK) < F32_INF)
        return rounded - became_inf.to(tl.int32)
    else:
        return tl.load(pointer, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def store_row(
    bits,  # int32 [QK_DIM / 64, 64], the bits of bfloat16 values
    data_ptr,  # uint8, the first page of the cache
    slot,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    QK_DIM: tl.constexpr,
    FP8_DIM: tl.constexpr,  # 0, or scaled in groups of 64 whose exponents stand in the page's footer
    MIN_SCALE_EXPONENT: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
):
    """Writes one row of a V4 layout; a slot that does not exist is skipped."""
    valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
    chunk = tl.arange(0, QK_DIM // _CHUNK)
    column = tl.arange(0, _CHUNK)[None, :]
    start = page * PAGE_BYTES + offset * DATA_BYTES
    if FP8_DIM > 0:
        value, exponent = quantise_groups(bits << 16, MIN_SCALE_EXPONENT)
        is_fp8 = valid & (chunk < FP8_DIM // _CHUNK)
        target = (start + chunk * _CHUNK)[:, None] + column
        tl.store(data_ptr + target, float32_to_e4m3(value, HARDWARE_CASTS), mask=is_fp8[:, None])
        footer = page * PAGE_BYTES + PAGE_SIZE * DATA_BYTES + offset * FOOTER_BYTES + chunk
        tl.store(data_ptr + footer, (exponent + 127).to(tl.uint8), mask=is_fp8)
    is_bf16 = valid & (chunk >= FP8_DIM // _CHUNK)
    target = (data_ptr + start + FP8_DIM + (chunk * _CHUNK - FP8_DIM) * 2).to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(target[:, None] + column, bits.to(tl.int16), mask=is_bf16[:, None])


@triton.jit
def write_kv_kernel(
    slots_ptr,  # int32 [n]
    kv_ptr,  # bfloat16 or float32 [n, QK_DIM]
    scale_ptr,  # float32 [1] of a TENSOR_SCALE, or None
    data_in_ptr,  # the same buffer as data_ptr
    n,
    num_pages,  # of the cache, which begins with the page first_page of the buffer
    first_page,
    data_ptr,  # uint8 [pages, PAGE_BYTES]
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_START: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    QK_DIM: tl.constexpr,
    QUANT_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    BF16_START: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    MIN_SCALE_EXPONENT: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    data_ptr = at_page(data_ptr, first_page, PAGE_BYTES)
    first = tl.program_id(0) * TOKENS
    if QUANT_DIM > 0:
        row = tl.arange(0, TOKENS * GROUPS_POW2)
        token = first + row // GROUPS_POW2
        group = row % GROUPS_POW2
        slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
        valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
        valid = valid & (group < QUANT_DIM // GROUP)
        column = tl.arange(0, GROUP)[None, :]
        source = kv_ptr + (token.to(tl.int64) * QK_DIM + group * GROUP)[:, None] + column
        bits = load_bfloat16_bits(source, valid[:, None]) << 16
        start = page * PAGE_BYTES + offset * DATA_BYTES
        scales = data_ptr + page * PAGE_BYTES + SCALE_START + offset * SCALE_STRIDE
        if SCALES == E4M3_SCALES:
            byte, scale = quantise_e2m1(bits, MIN_SCALE_EXPONENT, HARDWARE_CASTS)
            target = (start + group * (GROUP // 2))[:, None] + tl.arange(0, GROUP // 2)[None, :]
            tl.store(data_ptr + target, byte, mask=valid[:, None])
            tl.store(scales + group, scale, mask=valid)
        else:
            # Limits a thread's vector to the 8 values that it loaded: 16 would send all of them through shared memory.
            target = (start + group * GROUP)[:, None] + tl.max_contiguous(column, (1, 8))
            if SCALES == TENSOR_SCALE:
                value = quantise_by_tensor(bits, tl.load(scale_ptr))
            else:
                value, exponent = quantise_groups(bits, MIN_SCALE_EXPONENT)
            tl.store(data_ptr + target, float32_to_e4m3(value, HARDWARE_CASTS), mask=valid[:, None])
            if SCALES == FLOAT32_SCALES:
                scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
                tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True) + group, scale, mask=valid)
            elif SCALES != TENSOR_SCALE:
                tl.store(scales + group, (exponent + 127).to(tl.uint8), mask=valid)

    if QUANT_DIM < QK_DIM:
        row = tl.arange(0, TOKENS * CHUNKS_POW2)
        token = first + row // CHUNKS_POW2
        chunk = row % CHUNKS_POW2
        slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
        valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
        valid = (valid & (chunk < (QK_DIM - QUANT_DIM) // _CHUNK))[:, None]
        column = tl.arange(0, _CHUNK)[None, :]
        source = kv_ptr + (token.to(tl.int64) * QK_DIM + QUANT_DIM + chunk * _CHUNK)[:, None] + column
        bits = load_bfloat16_bits(source, valid)
        start = page * PAGE_BYTES + offset * DATA_BYTES + BF16_START + chunk * (2 * _CHUNK)
        target = (data_ptr + start).to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(target[:, None] + column, bits.to(tl.int16), mask=valid)


@triton.jit
def gather_kv_kernel(
    slots_ptr,  # int32 [n]
    data_ptr,  # uint8 [pages, PAGE_BYTES]
    scale_ptr,  # float32 [1] of a TENSOR_SCALE, or None
    out_in_ptr,  # the same buffer as out_ptr, where it exists already; otherwise None
    n,
    num_pages,
    first_page,
    out_start,  # the row of out that holds the first slot
    out_ptr,  # bfloat16 [>= out_start + n, QK_DIM]
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_START: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    QK_DIM: tl.constexpr,
    QUANT_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    BF16_START: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    data_ptr = at_page(data_ptr, first_page, PAGE_BYTES)
    first = tl.program_id(0) * TOKENS
    if QUANT_DIM > 0:
        row = tl.arange(0, TOKENS * GROUPS_POW2)
        token = first + row // GROUPS_POW2
        group = row % GROUPS_POW2
        in_out = (token < n) & (group < QUANT_DIM // GROUP)
        slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
        valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
        valid = valid & in_out
        column = tl.arange(0, GROUP)[None, :]
        start = page * PAGE_BYTES + offset * DATA_BYTES
        scales = data_ptr + page * PAGE_BYTES + SCALE_START + offset * SCALE_STRIDE
        if SCALES == E4M3_SCALES:
            source = (start + group * (GROUP // 2))[:, None] + tl.arange(0, GROUP // 2)[None, :]
            value = e2m1_to_float32(tl.load(data_ptr + source, mask=valid[:, None], other=0), HARDWARE_CASTS)
            scale = e4m3_to_float32(tl.load(scales + group, mask=valid, other=0), HARDWARE_CASTS)
        else:
            # 8 values a thread, as the store takes them: 16 would send all of them through shared memory.
            source = (start + group * GROUP)[:, None] + tl.max_contiguous(column, (1, 8))
            value = e4m3_to_float32(tl.load(data_ptr + source, mask=valid[:, None], other=0), HARDWARE_CASTS)
            if SCALES == FLOAT32_SCALES:
                pointer = scales.to(tl.pointer_type(tl.float32), bitcast=True) + group
                scale = tl.load(pointer, mask=valid, other=1.0)
            elif SCALES == TENSOR_SCALE:
                scale = tl.load(scale_ptr + tl.zeros_like(group), mask=valid, other=1.0)
            else:
                scale = ue8m0_to_float32(tl.load(scales + group, mask=valid, other=127).to(tl.int32))
        value = value * scale[:, None]
        target = out_ptr + ((out_start + token).to(tl.int64) * QK_DIM + group * GROUP)[:, None] + column
        if HARDWARE_CASTS:
            rounded = value.to(tl.bfloat16)
        else:
            rounded = bfloat16_bits(value.to(tl.int32, bitcast=True)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(target, rounded, mask=in_out[:, None])

    if QUANT_DIM < QK_DIM:
        row = tl.arange(0, TOKENS * CHUNKS_POW2)
        token = first + row // CHUNKS_POW2
        chunk = row % CHUNKS_POW2
        in_out = (token < n) & (chunk < (QK_DIM - QUANT_DIM) // _CHUNK)
        slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
        valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
        column = tl.arange(0, _CHUNK)[None, :]
        start = page * PAGE_BYTES + offset * DATA_BYTES + BF16_START + chunk * (2 * _CHUNK)
        source = (data_ptr + start).to(tl.pointer_type(tl.int16), bitcast=True)
        bits = tl.load(source[:, None] + column, mask=(valid & in_out)[:, None], other=0)
        target = out_ptr + (out_start + token).to(tl.int64) * QK_DIM + QUANT_DIM + chunk * _CHUNK
        target = target.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(target[:, None] + column, bits, mask=in_out[:, None])


TOUCHED_OPTIONS = {"BLOCK": 256, "num_warps": 4}
SPLIT_OPTIONS = {"BLOCK": 1024, "num_warps": 4}

# Programs of the copy for each multiprocessor: they share the touched pages out among themselves, whose number only the
# device knows.
_SPLIT_PROGRAMS_PER_SM = 8


@triton.jit
def touched_pages_kernel(
    slots_ptr,  # int32 [n]
    n,
    num_pages,
    seen_ptr,  # int32 [num_pages + 1], zeroed: which pages were seen, and how many
    pages_ptr,  # int32 [min(n, num_pages)]
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The pages of the slots, each once, in any order, in front of `pages`."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + index, mask=index < n, other=-1)
    page = tl.maximum(slot, 0) // PAGE_SIZE
    valid = (slot >= 0) & (page < num_pages)
    # The slots of a window share few pages: most of them find the page already seen and skip the exchange.
    unseen = valid & (tl.load(seen_ptr + page, mask=valid, other=1) == 0)
    first = unseen & (tl.atomic_xchg(seen_ptr + page, 1, mask=unseen) == 0)
    position = tl.atomic_add(seen_ptr + tl.zeros_like(page) + num_pages, 1, mask=first)
    tl.store(pages_ptr + position, page, mask=first)


@triton.jit
def split_pages_kernel(
    data_ptr,  # uint8 [pages, PAGE_BYTES]
    pages_ptr,  # int32, the cache's pages to copy
    seen_ptr,  # int32 [num_pages + 1], how many in the last entry
    out_in_ptr,  # the same buffer as out_ptr
    num_pages,
    first_page,  # of the cache in its buffer
    out_first_page,
    out_ptr,  # uint8 [pages, OUT_PAGE_BYTES]
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    RATIO: tl.constexpr,
    OUT_PAGE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies in words of 8 bytes, which divide every length and offset of a layout."""
    data = at_page(data_ptr, first_page, PAGE_BYTES).to(tl.pointer_type(tl.int64), bitcast=True)
    out = at_page(out_ptr, out_first_page, OUT_PAGE_BYTES).to(tl.pointer_type(tl.int64), bitcast=True)
    body: tl.constexpr = PAGE_SIZE // RATIO * DATA_BYTES // 8
    footer: tl.constexpr = PAGE_SIZE // RATIO * FOOTER_BYTES // 8
    word = tl.arange(0, BLOCK)
    item = tl.program_id(0)
    items = tl.load(seen_ptr + num_pages) * RATIO
    while item < items:
        page = tl.load(pages_ptr + item // RATIO).to(tl.int64)
        piece = item % RATIO
        source = data + page * (PAGE_BYTES // 8)
        target = out + (page * RATIO + piece) * (OUT_PAGE_BYTES // 8)
        for start in range(0, body, BLOCK):
            inside = start + word < body
            words = tl.load(source + piece * body + start + word, mask=inside)
            tl.store(target + start + word, words, mask=inside)
        for start in range(0, footer, BLOCK):
            inside = start + word < footer
            words = tl.load(source + RATIO * body + piece * footer + start + word, mask=inside)
            tl.store(target + body + start + word, words, mask=inside)
        item += tl.num_programs(0)


# --- launches: sizes are not zero -----------------------------------------------------------------
# `data` is the buffer in which a cache's `pages` lie; `scale`: float32 [1], of a layout that has one for all values.


def write_kv(execute: Executor, data, scale, slots, kv, *, pages: Pages) -> Any:
    """`data`, uint8 `[pages, page_bytes]`, with the rows written, by a rule whose scales are powers of two."""
    n, layout = slots.shape[0], pages.layout
    constants = layout_constants(layout, pages.page_size, pages.page_bytes) | WRITE_OPTIONS
    constants |= {"MIN_SCALE_EXPONENT": layout.least_exponent, "HARDWARE_CASTS": execute.device.hardware_fp8}
    grid, scalars = (triton.cdiv(n, WRITE_OPTIONS["TOKENS"]),), (n, pages.num_pages, pages.first_page)
    outputs = (Output(data.shape, "uint8", alias=3),)
    launch = Launch(write_kv_kernel, "write_kv", grid, scalars, outputs, constants)
    return execute(launch, (slots, kv, scale, data))[0]


def gather_kv(execute: Executor, data, scale, slots, workspace=None, *, pages: Pages, rows=None, start=0, out=None):
    """bfloat16 `[rows, qk_dim]` with the slots' rows from `start` on: the workspace, or new or `out`, with its other
    rows undefined. By default there are as many rows as slots.
    """
    n = slots.shape[0]
    shape, alias = (n if rows is None else rows, pages.layout.qk_dim), None
    if workspace is not None:
        shape, alias = workspace.shape, 3
    constants = layout_constants(pages.layout, pages.page_size, pages.page_bytes)
    constants = {**constants, "HARDWARE_CASTS": execute.device.hardware_fp8, **GATHER_OPTIONS}
    grid, scalars = (triton.cdiv(n, GATHER_OPTIONS["TOKENS"]),), (n, pages.num_pages, pages.first_page, start)
    outputs = (Output(shape, "bfloat16", alias=alias),)
    launch = Launch(gather_kv_kernel, "gather_kv", grid, scalars, outputs, constants)
    return execute(launch, (slots, data, scale, workspace), (out,))[0]


def split_pages(execute: Executor, out, data, slots, *, pages: Pages, out_pages: Pages) -> Any:
    """`out`, uint8 `[pages, its page_bytes]`, with the pages that `slots` touch copied into it."""
    slots = slots.reshape(-1)
    n, num_pages = slots.shape[0], pages.num_pages
    grid = (triton.cdiv(n, TOUCHED_OPTIONS["BLOCK"]),)
    constants = {"PAGE_SIZE": pages.page_size, **TOUCHED_OPTIONS}
    outputs = Output((num_pages + 1,), "int32", zeroed=True), Output((min(n, num_pages),), "int32")
    touched = Launch(touched_pages_kernel, "touched_pages", grid, (n, num_pages), outputs, constants)
    seen, touched_pages = execute(touched, (slots,))
    grid = (_SPLIT_PROGRAMS_PER_SM * execute.device.sm_count,)
    constants, outputs = split_constants(pages, out_pages) | SPLIT_OPTIONS, (Output(out.shape, "uint8", alias=3),)
    scalars = num_pages, pages.first_page, out_pages.first_page
    split = Launch(split_pages_kernel, "split_pages", grid, scalars, outputs, constants)
    return execute(split, (data, touched_pages, seen, out))[0]
