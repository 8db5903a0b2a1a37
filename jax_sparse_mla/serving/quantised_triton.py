"""Triton kernel of products with quantised weights: rows times one weight, or each times that of its expert.

Weights stand on the left of the product, so that few rows fill few columns of a tile. Their bytes become bfloat16
numbers in registers. A byte of FP4 holds two neighbours of a row: the rows' even values stand before the odd ones, and
each nibble has a product of its own. FP4's scales are added to exponents; FP8's multiply the sums over 128 values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jax_sparse_mla.kv_cache.number_formats import (
    e2m1_pairs_times_ue8m0,
    e2m1_times_ue8m0,
    e4m3_to_float32,
    ue8m0_to_float32,
)
from jax_sparse_mla.launch.describe import Device, Executor, Launch, Output

# Which weight a row takes: there is one; each row names its expert; or rows are sorted, so many of each expert.
ONE, EACH, SORTED = (tl.constexpr(i) for i in range(3))


@triton.jit
def quantised_product_kernel(
    x_ptr,  # bfloat16 [rows, K], of FP4 the even values of a row before its odd ones
    values_ptr,  # uint8 [experts, N, K / 2] of FP4, [experts, N, K] of FP8
    scales_ptr,  # uint8 or float32 [experts, N / SCALE_ROWS, K / group]
    which_ptr,  # int32 [rows], the experts of rows, or [experts], the numbers of rows
    rows,
    out_ptr,  # bfloat16 or float32 [rows, N]
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FP4: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    UE8M0: tl.constexpr,
    WHICH: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    HARDWARE_CASTS: tl.constexpr,
):
    """A program has BN rows of a weight and up to BM rows of x, all of one expert."""
    tile = tl.program_id(1)
    if WHICH == ONE:
        expert, start, end = 0, tile * BM, rows
    elif WHICH == EACH:
        expert, start, end = tl.load(which_ptr + tile), tile, tile + 1
    else:
        numbers = tl.arange(0, EXPERTS_BLOCK)
        sizes = tl.load(which_ptr + numbers, mask=numbers < EXPERTS, other=0)
        tiles = (sizes + BM - 1) // BM
        expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(numbers < expert, sizes, 0), 0)
        start = before + (tile - tl.sum(tl.where(numbers < expert, tiles, 0), 0)) * BM
        end = before + tl.sum(tl.where(numbers == expert, sizes, 0), 0)
    if start < end:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        m = start + tl.arange(0, BM)
        values_ptr += tl.cast(expert, tl.int64) * (N * (K // 2 if FP4 else K))
        scales_ptr += tl.cast(expert, tl.int64) * (N // SCALE_ROWS * (K // 32 if FP4 else K // 128))
        x_rows = x_ptr + m[None, :].to(tl.int64) * K
        sums = tl.zeros((BN, BM), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if FP4:
                group, byte = tl.arange(0, BK // 32), tl.arange(0, 16)
                at = n[:, None, None] * (K // 2) + k // 2 + group[None, :, None] * 16 + byte[None, None, :]
                packed = tl.load(values_ptr + at, mask=n[:, None, None] < N, other=0)
                at = n[:, None] * (K // 32) + k // 32 + group[None, :]
                scale = tl.load(scales_ptr + at, mask=n[:, None] < N, other=0).to(tl.int32)[:, :, None]
                if HARDWARE_CASTS:
                    low, high = e2m1_pairs_times_ue8m0(packed, tl.broadcast_to(scale, (BN, BK // 32, 16)))
                else:
                    code = packed.to(tl.int32)
                    low, high = e2m1_times_ue8m0(code & 15, scale), e2m1_times_ue8m0(code >> 4, scale)
                column = k // 2 + tl.arange(0, BK // 2)[:, None]
                even = tl.load(x_rows + column, mask=m[None, :] < end, other=0.0)
                odd = tl.load(x_rows + K // 2 + column, mask=m[None, :] < end, other=0.0)
                sums = tl.dot(tl.reshape(low, (BN, BK // 2)), even, sums)
                sums = tl.dot(tl.reshape(high, (BN, BK // 2)), odd, sums)
            else:
                column = k + tl.arange(0, BK)
                value = tl.load(values_ptr + n[:, None] * K + column[None, :], mask=n[:, None] < N, other=0)
                part = tl.load(x_rows + column[:, None], mask=m[None, :] < end, other=0.0)
                scale = tl.load(scales_ptr + n // SCALE_ROWS * (K // 128) + k // 128, mask=n < N, other=0)
                if UE8M0:
                    scale = ue8m0_to_float32(scale.to(tl.int32))
                weight = e4m3_to_float32(value, HARDWARE_CASTS).to(tl.bfloat16)
                sums += tl.dot(weight, part) * scale[:, None]
        at = m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(out_ptr + at, tl.trans(sums).to(out_ptr.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < N))


class Tiling(NamedTuple):
    bm: int
    bn: int
    bk: int
    num_warps: int
    stages: int


def tiling(device: Device, fp4: bool, rows: int, n: int, tiles: int) -> Tiling:
    """The tile of a product. Registers and shared memory bound it; Triton spills none of these on SM90.

    Args:
      rows: of x that one weight multiplies, on average.
      n: the weight's rows.
      tiles: how many tiles x has, about, if they are as low as can be.
    """
    most = (256 if fp4 else 128) if device.compute_capability[0] in (9, 10) else 64
    bm = min(max(16, triton.next_power_of_2(rows)), most)
    bn = 128 if bm > 32 else 64
    while bn > 16 and tiles * triton.cdiv(n, bn) < device.sm_count:  # few programs would each read much of a weight
        bn //= 2
    return Tiling(bm, bn, 64 if bm == 256 else 128, 8 if bn == 128 else 4, 3 if bm > 32 else 6)


def product(execute: Executor, x, values, scales, which=None, *, sizes: bool = False, dtype: str = "bfloat16") -> Any:
    """`[rows, N]` of x bfloat16 `[rows, K]`, K a multiple of 128, and the arrays of a `Quantised`.

    Args:
      x: of FP4 the even values of each row before its odd ones.
      which: None: the weight is `[N, K]`. int32 `[rows]`, each row's expert, of weights `[experts, N, K]`; with `sizes`
        int32 `[experts]`, how many rows each has, one expert's after the other's. Rows behind all are not written.
      dtype: of the result.
    """
    (rows, k), n = x.shape, values.shape[-2]
    fp4, experts = values.shape[-1] < k, values.shape[0] if len(values.shape) == 3 else 1
    if which is None:
        kind, average, tiles = ONE, rows, triton.cdiv(rows, 16)
    elif sizes:
        kind, average, tiles = SORTED, triton.cdiv(rows, experts), min(rows, experts)
    else:
        kind, average, tiles = EACH, 1, rows
    of = tiling(execute.device, fp4, average, n, tiles)
    if kind != EACH:
        tiles = triton.cdiv(rows, of.bm) + (min(rows, experts) if sizes else 0)
    constants = {"EXPERTS": experts, "N": n, "K": k, "FP4": fp4, "SCALE_ROWS": n // scales.shape[-2]}
    constants |= {"UE8M0": str(scales.dtype).endswith("uint8"), "WHICH": kind.value}
    constants |= {"EXPERTS_BLOCK": triton.next_power_of_2(experts), "BM": of.bm, "BN": of.bn, "BK": of.bk}
    constants |= {"STAGES": of.stages, "HARDWARE_CASTS": execute.device.hardware_fp8, "num_warps": of.num_warps}
    grid = triton.cdiv(n, of.bn), tiles
    launch = Launch(
        quantised_product_kernel, "quantised_product", grid, (rows,), (Output((rows, n), dtype),), constants
    )
    return execute(launch, (x, values, scales, which))[0]
