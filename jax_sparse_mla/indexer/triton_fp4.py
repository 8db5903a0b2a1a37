"""Triton kernels that quantise by the rule of FP4 index keys: queries, and keys into their cache, bit by bit as
`jax_sparse_mla.indexer.keys` does."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.indexer.triton import _hadamard, _sylvester, load_keys
from jax_sparse_mla.indexer.triton_scores import FP4_BYTES
from jax_sparse_mla.kv_cache.triton import _locate, at_page
from jax_sparse_mla.launch.describe import Executor, Launch, Output

_DIM, _GROUPS, _GROUP = tl.constexpr(128), tl.constexpr(4), tl.constexpr(32)
_PACKED, _FP4_BYTES = tl.constexpr(64), tl.constexpr(FP4_BYTES)
_MAGNITUDE_MASK, _MANTISSA_MASK = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x007FFFFF)
_F32_INF, _MIN_NORMAL = tl.constexpr(0x7F800000), tl.constexpr(0x00800000)
_MAX_BITS = tl.constexpr(0x7F400000)  # 6 * 2^125, the largest that does not read back as infinity
_MANTISSA_OF_1_5 = tl.constexpr(0x00400000)
_UE8M0_NAN = tl.constexpr(255)

OPTIONS = {"LINES": 16, "num_warps": 4}
_QUERY_EXPONENT = -126  # of the smallest scale of queries


@triton.jit
def _quantize(x, LEAST_EXPONENT: tl.constexpr):
    """(e2m1 codes, −0 kept, [n, 4, 32]; exponents of the scales [n, 4]; groups with a NaN) of float32 [n, 128]."""
    bits = tl.reshape(x, [x.shape[0], _GROUPS, _GROUP]).to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE_MASK
    is_nan = tl.max((magnitude > _F32_INF).to(tl.int32), axis=2) > 0
    magnitude = tl.where(magnitude < _MIN_NORMAL, 0, tl.minimum(magnitude, _MAX_BITS))
    amax = tl.max(magnitude, axis=2)
    exponent = (amax >> 23) - (127 + 2) + ((amax & _MANTISSA_MASK) > _MANTISSA_OF_1_5).to(tl.int32)
    exponent = tl.maximum(exponent, LEAST_EXPONENT)
    # Scaled by a power of two no value is rounded. A tie goes to the even code.
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    value = magnitude.to(tl.float32, bitcast=True) * inverse[:, :, None]
    code = (value > 0.25).to(tl.int32) + (value >= 0.75).to(tl.int32)
    code += (value > 1.25).to(tl.int32) + (value >= 1.75).to(tl.int32)
    code += (value > 2.5).to(tl.int32) + (value >= 3.5).to(tl.int32) + (value > 5.0).to(tl.int32)
    return tl.where(is_nan[:, :, None], 0, code | ((bits >> 28) & 8)), exponent, is_nan


@triton.jit
def round_queries_to_fp4_kernel(
    q_ptr,  # bfloat16 or float32 [n, 128]
    n,
    values_ptr,  # bfloat16 [n, 128]
    HADAMARD: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr,
    LINES: tl.constexpr,
):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    at, inside = line.to(tl.int64)[:, None] * _DIM + tl.arange(0, _DIM)[None, :], (line < n)[:, None]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    q = _hadamard(q, _sylvester()) if HADAMARD else q.to(tl.float32)
    code, exponent, is_nan = _quantize(q, LEAST_EXPONENT)
    magnitude = code & 7
    # From 1 on exponent and mantissa move into those of float32; 0.5 is subnormal in e2m1.
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22) | ((code & 8) << 28)
    scale = tl.where(is_nan, float("nan"), ((exponent + 127) << 23).to(tl.float32, bitcast=True))
    values = bits.to(tl.float32, bitcast=True) * scale[:, :, None]
    tl.store(values_ptr + at, tl.reshape(values, [LINES, _DIM]).to(tl.bfloat16), mask=inside)


@triton.jit
def write_index_k_fp4_kernel(
    slots_ptr,  # int32 [n]
    k_ptr,  # bfloat16 or float32 [n, 128]
    cache_in_ptr,  # the same buffer as cache_ptr
    n,
    num_pages,  # of the cache, which begins with the page first_page of the buffer
    first_page,
    cache_ptr,  # uint8 [pages, PAGE_SIZE * 68]
    PAGE_SIZE: tl.constexpr,
    HADAMARD: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr,
    KEEPS_ZERO: tl.constexpr,  # whether a −0 keeps its sign
    LINES: tl.constexpr,
):
    cache_ptr = at_page(cache_ptr, first_page, PAGE_SIZE * _FP4_BYTES)
    k, slot = load_keys(k_ptr, slots_ptr, n, HADAMARD, LINES)
    code, exponent, is_nan = _quantize(k, LEAST_EXPONENT)
    if not KEEPS_ZERO:
        code = tl.where(code == 8, 0, code)
    even, odd = tl.split(tl.reshape(code, [LINES, _PACKED, 2]))
    valid, page, offset = _locate(slot, num_pages, PAGE_SIZE)
    start = cache_ptr + page * (PAGE_SIZE * _FP4_BYTES)
    values_ptr = (start + offset * _PACKED)[:, None] + tl.arange(0, _PACKED)[None, :]
    tl.store(values_ptr, (even | (odd << 4)).to(tl.uint8), mask=valid[:, None])
    scales = tl.where(is_nan, _UE8M0_NAN, exponent + 127).to(tl.uint8)
    scales_ptr = (start + PAGE_SIZE * _PACKED + offset * _GROUPS)[:, None] + tl.arange(0, _GROUPS)[None, :]
    tl.store(scales_ptr, scales, mask=valid[:, None])


# --- launches: sizes are not zero ------------------------------------------------------------------


def round_queries_to_fp4(execute: Executor, q, *, hadamard: bool) -> Any:
    """bfloat16, shaped as q, for a last axis of 128."""
    shape = tuple(q.shape)
    lines = math.prod(shape[:-1])
    constants = {"HADAMARD": hadamard, "LEAST_EXPONENT": _QUERY_EXPONENT, **OPTIONS}
    grid, outputs = (triton.cdiv(lines, OPTIONS["LINES"]),), (Output(shape, "bfloat16"),)
    launch = Launch(round_queries_to_fp4_kernel, "round_queries_to_fp4", grid, (lines,), outputs, constants)
    return execute(launch, (q,))[0]


def write_index_k(
    execute: Executor,
    *arrays: Any,
    hadamard: bool,
    least_exponent: int,
    keeps_zero: bool,
    pages: tuple[int, int] | None = None,
) -> Any:
    """uint8 `[pages, page_size * 68]` with the keys written; arrays are the cache, slots and k."""
    cache, slots, k = arrays
    (n,), page_bytes, (first_page, num_pages) = slots.shape, cache.shape[1], pages or (0, cache.shape[0])
    constants = {"PAGE_SIZE": page_bytes // FP4_BYTES, "HADAMARD": hadamard, **OPTIONS}
    constants |= {"LEAST_EXPONENT": least_exponent, "KEEPS_ZERO": keeps_zero}
    grid, outputs = (triton.cdiv(n, OPTIONS["LINES"]),), (Output(cache.shape, "uint8", alias=2),)
    scalars = n, num_pages, first_page
    launch = Launch(write_index_k_fp4_kernel, "write_index_k_fp4", grid, scalars, outputs, constants)
    return execute(launch, (slots, k, cache))[0]
