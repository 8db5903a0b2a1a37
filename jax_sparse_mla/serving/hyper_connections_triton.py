"""Triton kernels of the hyper-connections (arXiv 2512.24880): a block's input from the residual streams, in two
launches, with what the block before adds to them.

XLA makes some ten launches of this, and one or two more for each of the 39 divisions by a sum. The first kernel reads
the streams once and multiplies them by the weights of the mixing; the second one has a row in registers from the
mixing's weights to the block's norm.

A number of float32 is the sum of three of bfloat16, and products of these with streams are exact in float32. So tensor
cores multiply streams by float32 weights, without rounding them. Sums over channels are made in one order, whatever
rows are beside a row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output

STREAMS = 4  # of a model that the kernels serve
WIDE = 32  # columns of the sums: products with the weights, then the sum of squares
FEW_ROWS = 64  # up to which a program has one stream alone, to fill the device
FEW = {"BLOCK_T": 16, "BLOCK_H": 64, "LOOP_H": 1, "LOOP_N": 1, "num_warps": 4}
MANY = {"BLOCK_T": 32, "BLOCK_H": 64, "LOOP_H": 4, "LOOP_N": STREAMS, "num_warps": 8}


@triton.jit
def mix_kernel(
    streams_ptr,  # bfloat16 [rows, N, hidden]
    out_ptr,  # bfloat16 [rows, hidden], the output of the block before; None: the streams are not changed
    post_ptr,  # float32 [rows, N]
    comb_ptr,  # float32 [rows, N, N]
    fn_ptr,  # float32 [M + 1, N * hidden], or None: nothing is multiplied
    rows,
    hidden,
    joined_ptr,  # bfloat16 [rows, N, hidden], the streams after that block, or None
    sums_ptr,  # float32 [rows, programs of axis 1, WIDE], or None
    N: tl.constexpr,
    M: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LOOP_H: tl.constexpr,  # blocks of channels of a program
    LOOP_N: tl.constexpr,  # streams of a program, one or all
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1) // (N // LOOP_N)
    first = tl.program_id(1) % (N // LOOP_N)
    live, m = t < rows, tl.arange(0, WIDE)
    products = tl.zeros([BLOCK_T, WIDE], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for step in tl.range(LOOP_H * LOOP_N):  # unrolled, it would take more registers than there are
        h = (part * LOOP_H + step // LOOP_N) * BLOCK_H + tl.arange(0, BLOCK_H)
        j = first + step % LOOP_N
        inside = live[:, None] & (h < hidden)[None, :]
        at = t[:, None] * N * hidden + h[None, :]
        if out_ptr is None:
            x = tl.load(streams_ptr + at + j * hidden, mask=inside, other=0.0)
        else:
            out = tl.load(out_ptr + t[:, None] * hidden + h[None, :], mask=inside, other=0.0).to(tl.float32)
            mixed = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
            for i in tl.static_range(N):
                comb = tl.load(comb_ptr + t * (N * N) + i * N + j, mask=live, other=0.0).to(tl.bfloat16).to(tl.float32)
                old = tl.load(streams_ptr + at + i * hidden, mask=inside, other=0.0).to(tl.float32)
                mixed += comb[:, None] * old
            post = tl.load(post_ptr + t * N + j, mask=live, other=0.0).to(tl.bfloat16).to(tl.float32)
            added = (post[:, None] * out).to(tl.bfloat16).to(tl.float32)
            x = (added + mixed.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
            tl.store(joined_ptr + at + j * hidden, x, mask=inside)
        if fn_ptr is not None:
            weights = m[None, :] * (N * hidden) + j * hidden + h[:, None]
            rest = tl.load(fn_ptr + weights, mask=(m < M)[None, :] & (h < hidden)[:, None], other=0.0)
            for _ in tl.static_range(3):
                piece = rest.to(tl.bfloat16)
                products = tl.dot(x, piece, products)
                rest = rest - piece.to(tl.float32)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
    if fn_ptr is not None:
        to = sums_ptr + (t[:, None] * tl.num_programs(1) + tl.program_id(1)) * WIDE + m[None, :]
        tl.store(to, tl.where(m[None, :] == M, squares[:, None], products), mask=live[:, None])


@triton.jit
def input_kernel(
    streams_ptr,  # bfloat16 [rows, 4, hidden]
    sums_ptr,  # float32 [rows, parts, WIDE]
    fn_ptr,  # float32 [M + 1, 4 * hidden], whose last line begins with base [M] and scale [3] or [1]
    norm_ptr,  # float32 or bfloat16 [hidden]
    hidden,
    parts,
    norm_eps,
    eps,
    x_ptr,  # bfloat16 [rows, hidden]
    post_ptr,  # float32 [rows, 4], or None
    comb_ptr,  # float32 [rows, 4, 4], or None
    N: tl.constexpr,
    M: tl.constexpr,
    ITERATIONS: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """A row's input, by the programs of axis 1 that are 0; by those that are 1, post and comb."""
    row = tl.program_id(0).to(tl.int64)
    s, i, j, m = tl.arange(0, PARTS), tl.arange(0, N), tl.arange(0, N), tl.arange(0, WIDE)
    affine_ptr = fn_ptr + M * N * hidden
    sums_ptr += row * parts * WIDE
    some = (s < parts)[:, None]
    if tl.program_id(1) == 0:
        h = tl.arange(0, BLOCK)
        at, inside = streams_ptr + row * N * hidden + h, h < hidden
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + hidden, mask=inside, other=0.0).to(tl.float32)
        third = tl.load(at + 2 * hidden, mask=inside, other=0.0).to(tl.float32)
        fourth = tl.load(at + 3 * hidden, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + h, mask=inside, other=0.0)
        weight = tl.sum(tl.load(sums_ptr + s[:, None] * WIDE + m[None, :], mask=some, other=0.0), 0)
        inverse = tl.rsqrt(tl.sum(tl.where(m == M, weight, 0.0), 0) / (N * hidden) + norm_eps)
        pre = weight * inverse * tl.load(affine_ptr + M) + tl.load(affine_ptr + m, mask=m < N, other=0.0)
        pre = 1 / (1 + tl.exp(-pre)) + eps
        x = tl.sum(tl.where(m == 0, pre, 0.0), 0) * first
        x += tl.sum(tl.where(m == 1, pre, 0.0), 0) * second
        x += tl.sum(tl.where(m == 2, pre, 0.0), 0) * third
        x += tl.sum(tl.where(m == 3, pre, 0.0), 0) * fourth
        x = x.to(tl.bfloat16).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + norm_eps)
        if norm_ptr.dtype.element_ty == tl.bfloat16:  # V4's norm is rounded after the weight, the other one before it
            x = x.to(tl.bfloat16).to(tl.float32)
        tl.store(x_ptr + row * hidden + h, (x * norm.to(tl.float32)).to(tl.bfloat16), mask=inside)
    else:
        if post_ptr is not None:
            square = tl.sum(tl.load(sums_ptr + s * WIDE + M, mask=s < parts, other=0.0), 0)
            inverse = tl.rsqrt(square / (N * hidden) + norm_eps)
            post = tl.sum(tl.load(sums_ptr + s[:, None] * WIDE + N + j[None, :], mask=some, other=0.0), 0) * inverse
            post = post * tl.load(affine_ptr + M + 1) + tl.load(affine_ptr + N + j)
            tl.store(post_ptr + row * N + j, 2 / (1 + tl.exp(-post)))
            place = 2 * N + i[:, None] * N + j[None, :]
            comb = tl.load(sums_ptr + s[:, None, None] * WIDE + place[None], mask=some[:, :, None], other=0.0)
            comb = tl.sum(comb, 0) * inverse * tl.load(affine_ptr + M + 2) + tl.load(affine_ptr + place)
            comb = _doubly_stochastic(comb, eps, ITERATIONS)
            tl.store(comb_ptr + row * N * N + i[:, None] * N + j[None, :], comb)


@triton.jit
def _doubly_stochastic(x, eps, ITERATIONS: tl.constexpr):
    """Softmax of each line; then columns and lines in turn over their sums, columns first and last. eps is added."""
    x = tl.exp(x - tl.max(x, 1)[:, None])
    x = x / tl.sum(x, 1)[:, None] + eps
    x = x / (tl.sum(x, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        x = x / (tl.sum(x, 1)[:, None] + eps)
        x = x / (tl.sum(x, 0)[None, :] + eps)
    return x


def join(execute: Executor, streams, out, post, comb) -> Any:
    """The streams `[rows, 4, hidden]` after a block, as `hyper_connections.expand_streams` defines it."""
    return _mix(execute, streams, [out, post, comb], None)[0]


def block_input(
    execute: Executor, streams, fn, norm, *joined, norm_eps: float, eps: float, iterations: int
) -> tuple[Any, ...]:
    """A block's input after its norm `[rows, hidden]`; where fn is no head's, also post and comb, as
    `hyper_connections.collapse_streams` has them. With `joined`, which are out, post and comb of the block before, the
    streams after that block come first."""
    (rows, n, hidden), m = streams.shape, fn.shape[0] - 1
    after, sums = _mix(execute, streams, joined or (None, None, None), fn)
    outputs, mixes, parts = [Output((rows, hidden), "bfloat16"), None, None], m > n, sums.shape[1]
    if mixes:
        outputs[1:] = Output((rows, n), "float32"), Output((rows, n, n), "float32")
    constants = {"N": n, "M": m, "ITERATIONS": iterations, "WIDE": WIDE, "PARTS": triton.next_power_of_2(parts)}
    constants |= {"BLOCK": triton.next_power_of_2(hidden), "num_warps": 8}
    scalars = hidden, parts, norm_eps, eps
    launch = Launch(input_kernel, "hyper_connections_input", (rows, 1 + mixes), scalars, outputs, constants)
    results = execute(launch, (streams if after is None else after, sums, fn, norm))
    return *([] if after is None else [after]), *results[: 3 if mixes else 1]


def _mix(execute: Executor, streams, joined, fn) -> tuple[Any, Any]:
    """The streams after the block before, and the sums; each None where it is not wanted."""
    (rows, n, hidden), m = streams.shape, 0 if fn is None else fn.shape[0] - 1
    options = FEW if rows <= FEW_ROWS else MANY
    parts = triton.cdiv(hidden, options["BLOCK_H"] * options["LOOP_H"]) * n // options["LOOP_N"]
    outputs = [
        None if joined[0] is None else Output(streams.shape, "bfloat16"),
        None if fn is None else Output((rows, parts, WIDE), "float32"),
    ]
    constants = {"N": n, "M": m, "WIDE": WIDE} | options
    grid = triton.cdiv(rows, options["BLOCK_T"]), parts
    return execute(
        Launch(mix_kernel, "hyper_connections_mix", grid, (rows, hidden), outputs, constants), (streams, *joined, fn)
    )
