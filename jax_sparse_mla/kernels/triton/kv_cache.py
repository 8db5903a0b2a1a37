"""Triton kernels over the bytes of paged KV caches: quantise and scatter, gather and dequantise, split pages.

The rules are those of `jax_sparse_mla.kv_cache`, bit by bit. A layout reaches a kernel as the constants of
`layout_constants`; byte offsets of pages are 64-bit, since a cache may exceed 2 GiB. An output that is aliased to an
input is the last pointer, and only it is used. The launches are at the end.

A group of the fp8 part is one row of a tile, [tokens * groups, values of a group], so that the largest magnitude of
a group is a reduction along a row. Eight neighbouring values belong to a thread: 16 bytes of bfloat16, 8 of fp8.
HARDWARE_CASTS says whether numbers are converted by the GPU's own instructions, which know e4m3 from SM89 on, or in
integer arithmetic: for SM80, and for Triton's interpreter, which truncates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.kernels.launch import Executor, Launch, Output
from jax_sparse_mla.kv_cache.layout import KVLayout

_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_MANTISSA_MASK = tl.constexpr(0x007FFFFF)
_MANTISSA_OF_1_75 = tl.constexpr(0x00600000)
_F32_INF = tl.constexpr(0x7F800000)
_F32_NAN = tl.constexpr(0x7FC00000)
_F32_TWO_POW_MINUS_127 = tl.constexpr(0x00400000)  # a UE8M0 byte of 0, subnormal
_F32_MAX_QUANTISED = tl.constexpr(0x7F700000)  # 240 * 2^120, the largest magnitude that is quantised
_TWO_POW_120 = tl.constexpr(2.0**120)
_TWO_POW_14 = tl.constexpr(16384.0)  # its last place is 2^-9, that of e4m3's subnormal numbers
_TWO_POW_14_BITS = tl.constexpr(0x46800000)
_E4M3_MIN_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2^-6

# Values of the bfloat16 part that one row of a tile holds: it divides 64, 512 and 576.
_CHUNK = tl.constexpr(64)


@functools.cache
def layout_constants(layout: KVLayout, page_size: int, page_bytes: int | None = None) -> dict[str, int]:
    """What a kernel has to know of a layout at a page size, as its constexpr arguments.

    `page_bytes` are the bytes from one page's start to the next one's; None stands for the layout's own.
    """
    chunks = (layout.qk_dim - layout.fp8_dim) // _CHUNK.value
    return {
        "PAGE_SIZE": page_size,
        "PAGE_BYTES": layout.page_bytes(page_size) if page_bytes is None else page_bytes,
        "DATA_BYTES": layout.data_bytes,
        "FOOTER_BYTES": layout.footer_scale_bytes,
        "QK_DIM": layout.qk_dim,
        "FP8_DIM": layout.fp8_dim,
        "GROUP": layout.group,
        "GROUPS_POW2": triton.next_power_of_2(layout.num_groups) if layout.group else 0,
        "INLINE_BYTES": layout.inline_scale_bytes,
        "CHUNKS_POW2": triton.next_power_of_2(chunks),
    }


def split_constants(
    layout: KVLayout,
    page_size: int,
    out_page_size: int,
    page_bytes: int | None = None,
    out_page_bytes: int | None = None,
) -> dict[str, int]:
    """The constexpr arguments of `split_pages_kernel`; bytes of pages as in `layout_constants`."""
    return {
        "PAGE_SIZE": page_size,
        "PAGE_BYTES": layout.page_bytes(page_size) if page_bytes is None else page_bytes,
        "DATA_BYTES": layout.data_bytes,
        "FOOTER_BYTES": layout.footer_scale_bytes,
        "RATIO": page_size // out_page_size,
        "OUT_PAGE_BYTES": layout.page_bytes(out_page_size) if out_page_bytes is None else out_page_bytes,
    }


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
def _e4m3_to_float32(byte, HARDWARE_CASTS: tl.constexpr):
    if HARDWARE_CASTS:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    byte = byte.to(tl.int32)
    magnitude = byte & 0x7F
    # Moved into a float32's exponent and mantissa the number is 2^-120 of itself, subnormal numbers included.
    value = (magnitude << 20).to(tl.float32, bitcast=True) * _TWO_POW_120
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(magnitude == 0x7F, _F32_NAN, bits) | ((byte & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _float32_to_e4m3(value, HARDWARE_CASTS: tl.constexpr):
    """The e4m3 byte of float32 numbers of magnitude at most 448 or NaN, to nearest even."""
    if HARDWARE_CASTS:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE_MASK
    # 960 = (127 - 7) << 3 is the difference of the exponents' biases.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # The addition rounds to multiples of 2^-9.
    shifted = magnitude.to(tl.float32, bitcast=True) + _TWO_POW_14
    subnormal = shifted.to(tl.int32, bitcast=True) - _TWO_POW_14_BITS
    byte = tl.where(magnitude < _E4M3_MIN_NORMAL_BITS, subnormal, normal)
    byte = tl.where(magnitude > _F32_INF, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _bfloat16_bits(bits):
    """float32 bits rounded to the nearest bfloat16, ties to even: int32 in [0, 65535]."""
    high = (bits >> 16) & 0xFFFF
    low = bits & 0xFFFF
    round_up = (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1))
    is_nan = (bits & _MAGNITUDE_MASK) > _F32_INF
    return tl.where(is_nan, high | 0x40, high + round_up.to(tl.int32))


@triton.jit
def load_bfloat16_bits(pointer, mask):
    """Rounded to bfloat16 as int32 in [0, 65535]; no finite float32 becomes infinite."""
    if pointer.dtype.element_ty == tl.float32:
        bits = tl.load(pointer, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        rounded = _bfloat16_bits(bits)
        became_inf = ((rounded & 0x7FFF) == 0x7F80) & ((bits & _MAGNITUDE_MASK) < _F32_INF)
        return rounded - became_inf.to(tl.int32)
    else:
        return tl.load(pointer, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _quantise_groups(bits, MIN_SCALE_EXPONENT: tl.constexpr):
    """(what is stored as e4m3, float32; exponents of the scales, int32) of float32 bits, a group a row."""
    magnitude = bits & _MAGNITUDE_MASK
    clipped = (magnitude > _F32_MAX_QUANTISED) & (magnitude <= _F32_INF)
    magnitude = tl.where(clipped, _F32_MAX_QUANTISED, magnitude)
    # ceil(log2(amax / 448)) with 448 = 1.75 * 2^8, on bits: exact.
    amax = tl.max(magnitude, axis=1)
    above = ((amax & _MANTISSA_MASK) > _MANTISSA_OF_1_75).to(tl.int32)
    exponent = tl.maximum((amax >> 23) - (127 + 8) + above, MIN_SCALE_EXPONENT)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return (magnitude | (bits & ~_MAGNITUDE_MASK)).to(tl.float32, bitcast=True) * inverse[:, None], exponent


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
        value, exponent = _quantise_groups(bits << 16, MIN_SCALE_EXPONENT)
        is_fp8 = valid & (chunk < FP8_DIM // _CHUNK)
        target = (start + chunk * _CHUNK)[:, None] + column
        tl.store(data_ptr + target, _float32_to_e4m3(value, HARDWARE_CASTS), mask=is_fp8[:, None])
        footer = page * PAGE_BYTES + PAGE_SIZE * DATA_BYTES + offset * FOOTER_BYTES + chunk
        tl.store(data_ptr + footer, (exponent + 127).to(tl.uint8), mask=is_fp8)
    is_bf16 = valid & (chunk >= FP8_DIM // _CHUNK)
    target = (data_ptr + start + FP8_DIM + (chunk * _CHUNK - FP8_DIM) * 2).to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(target[:, None] + column, bits.to(tl.int16), mask=is_bf16[:, None])


@triton.jit
def write_kv_kernel(
    slots_ptr,  # int32 [n]
    kv_ptr,  # bfloat16 or float32 [n, QK_DIM]
    data_in_ptr,  # the same buffer as data_ptr
    n,
    num_pages,  # of the cache, which begins with the page first_page of the buffer
    first_page,
    data_ptr,  # uint8 [pages, PAGE_BYTES]
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    QK_DIM: tl.constexpr,
    FP8_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    INLINE_BYTES: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    MIN_SCALE_EXPONENT: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    data_ptr = at_page(data_ptr, first_page, PAGE_BYTES)
    first = tl.program_id(0) * TOKENS
    if FP8_DIM > 0:
        row = tl.arange(0, TOKENS * GROUPS_POW2)
        token = first + row // GROUPS_POW2
        group = row % GROUPS_POW2
        slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
        valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
        valid = valid & (group < FP8_DIM // GROUP)
        column = tl.arange(0, GROUP)[None, :]
        source = kv_ptr + (token.to(tl.int64) * QK_DIM + group * GROUP)[:, None] + column
        bits = load_bfloat16_bits(source, valid[:, None]) << 16
        value, exponent = _quantise_groups(bits, MIN_SCALE_EXPONENT)
        start = page * PAGE_BYTES + offset * DATA_BYTES
        # Limits a thread's vector to the 8 values that it loaded: 16 would send all of them through shared memory.
        target = (start + group * GROUP)[:, None] + tl.max_contiguous(column, (1, 8))
        tl.store(data_ptr + target, _float32_to_e4m3(value, HARDWARE_CASTS), mask=valid[:, None])
        if INLINE_BYTES > 0:
            scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
            inline_ptr = (data_ptr + start + FP8_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(inline_ptr + group, scale, mask=valid)
        else:
            footer = page * PAGE_BYTES + PAGE_SIZE * DATA_BYTES + offset * FOOTER_BYTES + group
            tl.store(data_ptr + footer, (exponent + 127).to(tl.uint8), mask=valid)

    row = tl.arange(0, TOKENS * CHUNKS_POW2)
    token = first + row // CHUNKS_POW2
    chunk = row % CHUNKS_POW2
    slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
    valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
    valid = (valid & (chunk < (QK_DIM - FP8_DIM) // _CHUNK))[:, None]
    column = tl.arange(0, _CHUNK)[None, :]
    source = kv_ptr + (token.to(tl.int64) * QK_DIM + FP8_DIM + chunk * _CHUNK)[:, None] + column
    bits = load_bfloat16_bits(source, valid)
    start = page * PAGE_BYTES + offset * DATA_BYTES + (FP8_DIM + INLINE_BYTES) + chunk * (2 * _CHUNK)
    target = (data_ptr + start).to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(target[:, None] + column, bits.to(tl.int16), mask=valid)


@triton.jit
def gather_kv_kernel(
    slots_ptr,  # int32 [n]
    data_ptr,  # uint8 [pages, PAGE_BYTES]
    n,
    num_pages,
    first_page,
    out_start,  # the row of out that holds the first slot
    out_ptr,  # bfloat16 [>= out_start + n, QK_DIM]
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    QK_DIM: tl.constexpr,
    FP8_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    INLINE_BYTES: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    data_ptr = at_page(data_ptr, first_page, PAGE_BYTES)
    first = tl.program_id(0) * TOKENS
    if FP8_DIM > 0:
        row = tl.arange(0, TOKENS * GROUPS_POW2)
        token = first + row // GROUPS_POW2
        group = row % GROUPS_POW2
        in_out = (token < n) & (group < FP8_DIM // GROUP)
        slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
        valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
        valid = valid & in_out
        column = tl.arange(0, GROUP)[None, :]
        start = page * PAGE_BYTES + offset * DATA_BYTES
        # 8 values a thread, as the store takes them: 16 would send all of them through shared memory.
        source = (start + group * GROUP)[:, None] + tl.max_contiguous(column, (1, 8))
        byte = tl.load(data_ptr + source, mask=valid[:, None], other=0)
        if INLINE_BYTES > 0:
            inline_ptr = (data_ptr + start + FP8_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
            scale = tl.load(inline_ptr + group, mask=valid, other=1.0)
        else:
            footer = page * PAGE_BYTES + PAGE_SIZE * DATA_BYTES + offset * FOOTER_BYTES + group
            ue8m0 = tl.load(data_ptr + footer, mask=valid, other=127).to(tl.int32)
            bits = tl.where(ue8m0 == 0, _F32_TWO_POW_MINUS_127, ue8m0 << 23)
            scale = tl.where(ue8m0 == 255, _F32_NAN, bits).to(tl.float32, bitcast=True)
        value = _e4m3_to_float32(byte, HARDWARE_CASTS) * scale[:, None]
        target = out_ptr + ((out_start + token).to(tl.int64) * QK_DIM + group * GROUP)[:, None] + column
        if HARDWARE_CASTS:
            rounded = value.to(tl.bfloat16)
        else:
            rounded = _bfloat16_bits(value.to(tl.int32, bitcast=True)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(target, rounded, mask=in_out[:, None])

    row = tl.arange(0, TOKENS * CHUNKS_POW2)
    token = first + row // CHUNKS_POW2
    chunk = row % CHUNKS_POW2
    in_out = (token < n) & (chunk < (QK_DIM - FP8_DIM) // _CHUNK)
    slot = tl.load(slots_ptr + token, mask=token < n, other=-1)
    valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
    column = tl.arange(0, _CHUNK)[None, :]
    start = page * PAGE_BYTES + offset * DATA_BYTES + (FP8_DIM + INLINE_BYTES) + chunk * (2 * _CHUNK)
    source = (data_ptr + start).to(tl.pointer_type(tl.int16), bitcast=True)
    bits = tl.load(source[:, None] + column, mask=(valid & in_out)[:, None], other=0)
    target = out_ptr + (out_start + token).to(tl.int64) * QK_DIM + FP8_DIM + chunk * _CHUNK
    target = target.to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(target[:, None] + column, bits, mask=in_out[:, None])


@triton.jit
def gather_kv_into_kernel(
    slots_ptr,
    data_ptr,
    out_in_ptr,  # the same buffer as out_ptr
    n,
    num_pages,
    first_page,
    out_start,
    out_ptr,
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    QK_DIM: tl.constexpr,
    FP8_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    INLINE_BYTES: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """`gather_kv_kernel` into a workspace that exists: an aliased buffer is passed twice."""
    gather_kv_kernel(
        slots_ptr,
        data_ptr,
        n,
        num_pages,
        first_page,
        out_start,
        out_ptr,
        PAGE_SIZE,
        PAGE_BYTES,
        DATA_BYTES,
        FOOTER_BYTES,
        QK_DIM,
        FP8_DIM,
        GROUP,
        GROUPS_POW2,
        INLINE_BYTES,
        CHUNKS_POW2,
        HARDWARE_CASTS,
        TOKENS,
    )


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
    place = tl.atomic_add(seen_ptr + tl.zeros_like(page) + num_pages, 1, mask=first)
    tl.store(pages_ptr + place, page, mask=first)


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
# `pages` are the first page and the number of pages of the cache in its buffer; None: the buffer is the cache.


def write_kv(
    execute: Executor,
    data,
    slots,
    kv,
    *,
    layout: KVLayout,
    page_size: int,
    page_bytes: int | None = None,
    pages: tuple[int, int] | None = None,
) -> Any:
    """`data`, uint8 `[pages, page_bytes]`, with the rows written."""
    n, (first_page, num_pages) = slots.shape[0], pages or (0, data.shape[0])
    constants = {
        **layout_constants(layout, page_size, page_bytes),
        "MIN_SCALE_EXPONENT": layout.min_scale_exponent,
        "HARDWARE_CASTS": execute.device.hardware_fp8,
        **WRITE_OPTIONS,
    }
    grid = (triton.cdiv(n, WRITE_OPTIONS["TOKENS"]),)
    outputs = (Output(data.shape, "uint8", alias=2),)
    launch = Launch(write_kv_kernel, "write_kv", grid, (n, num_pages, first_page), outputs, constants)
    return execute(launch, (slots, kv, data))[0]


def gather_kv(
    execute: Executor,
    data,
    slots,
    *,
    layout: KVLayout,
    page_size: int,
    page_bytes: int | None = None,
    pages: tuple[int, int] | None = None,
    rows: int | None = None,
    start: int = 0,
    out=None,
) -> Any:
    """bfloat16 `[rows, qk_dim]`, new or `out`, with the slots' rows from `start` on; other rows are left undefined.

    By default there are as many rows as slots.
    """
    constants = layout_constants(layout, page_size, page_bytes)
    output = Output((slots.shape[0] if rows is None else rows, layout.qk_dim), "bfloat16")
    return _gather(execute, gather_kv_kernel, (slots, data), pages, start, output, constants, out)


def gather_kv_into(
    execute: Executor,
    workspace,
    data,
    slots,
    *,
    layout: KVLayout,
    page_size: int,
    start: int,
    pages: tuple[int, int] | None = None,
) -> Any:
    """The workspace, bfloat16 `[rows, qk_dim]`, with rows `start ... start + n - 1` gathered into it."""
    output = Output(workspace.shape, "bfloat16", alias=2)
    constants = layout_constants(layout, page_size)
    return _gather(execute, gather_kv_into_kernel, (slots, data, workspace), pages, start, output, constants)


def _gather(execute: Executor, kernel, inputs, pages, start: int, output: Output, constants, out=None) -> Any:
    n, (first_page, num_pages) = inputs[0].shape[0], pages or (0, inputs[1].shape[0])
    constants = {**constants, "HARDWARE_CASTS": execute.device.hardware_fp8, **GATHER_OPTIONS}
    grid = (triton.cdiv(n, GATHER_OPTIONS["TOKENS"]),)
    scalars = n, num_pages, first_page, start
    return execute(Launch(kernel, "gather_kv", grid, scalars, (output,), constants), inputs, (out,))[0]


def split_pages(
    execute: Executor,
    out,
    data,
    slots,
    *,
    layout: KVLayout,
    page_size: int,
    out_page_size: int,
    page_bytes: int | None = None,
    out_page_bytes: int | None = None,
    pages: tuple[int, int] | None = None,
    out_first_page: int = 0,
    scratch: Sequence[Any] | None = None,
) -> Any:
    """`out`, uint8 `[pages, its page_bytes]`, with the pages that `slots` touch copied into it."""
    slots, (first_page, num_pages) = slots.reshape(-1), pages or (0, data.shape[0])
    n = slots.shape[0]
    grid = (triton.cdiv(n, TOUCHED_OPTIONS["BLOCK"]),)
    constants = {"PAGE_SIZE": page_size, **TOUCHED_OPTIONS}
    outputs = Output((num_pages + 1,), "int32", zeroed=True), Output((min(n, num_pages),), "int32")
    touched = Launch(touched_pages_kernel, "touched_pages", grid, (n, num_pages), outputs, constants)
    seen, touched_pages = execute(touched, (slots,), scratch)
    grid = (_SPLIT_PROGRAMS_PER_SM * execute.device.sm_count,)
    constants = split_constants(layout, page_size, out_page_size, page_bytes, out_page_bytes) | SPLIT_OPTIONS
    outputs = (Output(out.shape, "uint8", alias=3),)
    scalars = num_pages, first_page, out_first_page
    split = Launch(split_pages_kernel, "split_pages", grid, scalars, outputs, constants)
    return execute(split, (data, touched_pages, seen, out))[0]
