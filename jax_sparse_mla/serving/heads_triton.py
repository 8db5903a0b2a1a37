"""A Triton kernel that norms and rotates parts of projected rows, each into an array of its own.

XLA makes two launches of every norm, since a sum over channels comes before what is multiplied.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output
from jax_sparse_mla.serving.heads import Part

BLOCK = 2048  # channels of a program, of one head or several


@triton.jit
def normed_and_rotated_kernel(
    x_ptr,  # bfloat16 [rows, stride]
    positions_ptr,  # int32 [rows]
    inv_freq_ptr,  # float32 [rope_dim / 2]
    first_weight_ptr,  # float32 [dim], which a normed head is multiplied by, or None
    second_weight_ptr,
    stride,
    eps,
    first_ptr,  # bfloat16 [rows, heads, dim]
    second_ptr,
    FIRST: tl.constexpr,  # (offset, heads, dim, rope_dim, normed, heads of a program, a power of two of channels)
    SECOND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.cdiv(FIRST[1], FIRST[5])
    x_ptr += row * stride
    position = tl.load(positions_ptr + row)
    if block < blocks:
        _write_part(x_ptr, first_weight_ptr, inv_freq_ptr, position, eps, row, block, first_ptr, FIRST)
    else:
        if second_ptr is not None:
            _write_part(x_ptr, second_weight_ptr, inv_freq_ptr, position, eps, row, block - blocks, second_ptr, SECOND)


@triton.jit
def _write_part(x_ptr, weight_ptr, inv_freq_ptr, position, eps, row, block, out_ptr, PART: tl.constexpr):
    HEADS: tl.constexpr = PART[1]
    DIM: tl.constexpr = PART[2]
    ROPE_DIM: tl.constexpr = PART[3]
    BLOCK: tl.constexpr = PART[5]
    DIM_POW2: tl.constexpr = PART[6]
    head, c = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM_POW2)
    inside = (head < HEADS)[:, None] & (c < DIM)[None, :]
    x = tl.load(x_ptr + PART[0] + head[:, None] * DIM + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if PART[4]:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        if weight_ptr is not None:
            x = x * tl.load(weight_ptr + c, mask=c < DIM, other=0.0)[None, :]
        x = x.to(tl.bfloat16).to(tl.float32)
    if ROPE_DIM > 0:
        even, odd = tl.split(tl.reshape(x, [BLOCK, DIM_POW2 // 2, 2]))
        pair = tl.arange(0, DIM_POW2 // 2) - (DIM - ROPE_DIM) // 2
        rotates = (pair >= 0) & (pair < ROPE_DIM // 2)
        angle = position.to(tl.float32) * tl.load(inv_freq_ptr + pair, mask=rotates, other=0.0)
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
        first, second = even * cos - odd * sin, even * sin + odd * cos
        rotates = rotates[None, :]
        x = tl.reshape(tl.join(tl.where(rotates, first, even), tl.where(rotates, second, odd)), [BLOCK, DIM_POW2])
    to = out_ptr + (row * HEADS + head[:, None]) * DIM + c[None, :]
    tl.store(to, x.to(tl.bfloat16), mask=inside)


def normed_and_rotated(
    execute: Executor, x, positions, inv_freq, *weights, parts: tuple[Part, ...], eps: float
) -> tuple[Any, ...]:
    """Each part of x `[rows, columns]` as bfloat16 `[rows, heads, dim]`: one or two, and no weight or one for each.

    positions: int32 `[rows]`; inv_freq: float32 `[rope_dim / 2]`.
    """
    rows, stride = x.shape

    def constant(part: Part) -> tuple[int, ...]:
        wide = triton.next_power_of_2(part.dim)
        return *part[:4], int(part.normed), max(1, min(triton.next_power_of_2(part.heads), BLOCK // wide)), wide

    constants = [constant(part) for part in parts]
    blocks = sum(triton.cdiv(heads, each) for _, heads, _, _, _, each, _ in constants)
    outputs = [Output((rows, part.heads, part.dim), "bfloat16") for part in parts]
    absent = [None] * (2 - len(parts))
    named = {"FIRST": constants[0], "SECOND": [*constants, (0,) * 7][1], "num_warps": 4}
    launch = Launch(
        normed_and_rotated_kernel, "normed_and_rotated", (rows, blocks), (stride, eps), [*outputs, *absent], named
    )
    return execute(launch, (x, positions, inv_freq, *(*weights, None, None)[:2]))[: len(parts)]
