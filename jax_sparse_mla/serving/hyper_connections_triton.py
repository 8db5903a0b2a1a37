"""Triton kernels of the hyper-connections (arXiv 2512.24880): a block's input from the residual streams, in two
launches, with what the block before adds to them.

XLA makes some ten launches of this, and one or two more for each of the 39 divisions by a sum. The first kernel reads
the streams once and multiplies them by the weights of the mixing; the second one has a row in registers from the
mixing's weights to the block's norm.

A number of float32 is the sum of three of bfloat16, and products of these with streams are exact in float32. So tensor
cores multiply streams by float32 weights, without rounding them. The first kernel's sums over channels are made in
one order, whatever rows are beside a row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output

STREAMS = 4  # of a model that the kernels serve
WIDE = 32  # columns of the sums: products with the weights, then the sum of squares
BLOCK_T, BLOCK_H = 16, 64  # rows and channels of a program; more of them take more registers than there are


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
):
    """A program has some rows and channels of one stream."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h, j = tl.program_id(1) // N * BLOCK_H + tl.arange(0, BLOCK_H), tl.program_id(1) % N
    live, inside = t < rows, (t < rows)[:, None] & (h < hidden)[None, :]
    at = t[:, None] * N * hidden + h[None, :]
    if fn_ptr is not None:
        m = tl.arange(0, WIDE)
        weights = m[None, :] * (N * hidden) + j * hidden + h[:, None]
        rest = tl.load(fn_ptr + weights, mask=(m < M)[None, :] & (h < hidden)[:, None], other=0.0)
    if out_ptr is None:
        x = tl.load(streams_ptr + at + j * hidden, mask=inside, other=0.0)
    else:
        out = tl.load(out_ptr + t[:, None] * hidden + h[None, :], mask=inside, other=0.0).to(tl.float32)
        mixed = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
        for i in tl.static_range(N):
            comb = tl.load(comb_ptr + t * (N * N) + i * N + j, mask=live, other=0.0).to(tl.bfloat16).to(tl.float32)
            mixed += comb[:, None] * tl.load(streams_ptr + at + i * hidden, mask=inside, other=0.0).to(tl.float32)
        post = tl.load(post_ptr + t * N + j, mask=live, other=0.0).to(tl.bfloat16).to(tl.float32)
        # Of a plain product LLVM makes one of bfloat16, and with the sum below an fma that skips its rounding.
        added = tl.fma(tl.broadcast_to(post[:, None], out.shape), out, tl.zeros_like(out))
        added = added.to(tl.bfloat16).to(tl.float32)
        x = (added + mixed.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
        tl.store(joined_ptr + at + j * hidden, x, mask=inside)
    if fn_ptr is not None:
        products = tl.zeros([BLOCK_T, WIDE], tl.float32)
        for _ in tl.static_range(3):
            piece = rest.to(tl.bfloat16)
            products = tl.dot(x, piece, products)
            rest = rest - piece.to(tl.float32)
        wide = x.to(tl.float32)
        squares = tl.sum(wide * wide, 1)
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
    sums_ptr += row * parts * WIDE
    streams_ptr += row * N * hidden
    affine_ptr = fn_ptr + M * N * hidden
    if tl.program_id(1) == 0:
        x_ptr += row * hidden
        _write_input(
            streams_ptr, sums_ptr, affine_ptr, norm_ptr, hidden, parts, norm_eps, eps, x_ptr, N, M, WIDE, PARTS, BLOCK
        )
    else:
        if post_ptr is not None:
            post_ptr += row * N
            comb_ptr += row * N * N
            _write_mixing(
                sums_ptr, affine_ptr, hidden, parts, norm_eps, eps, post_ptr, comb_ptr, N, M, ITERATIONS, WIDE, PARTS
            )


@triton.jit
def _write_input(
    streams_ptr,
    sums_ptr,
    affine_ptr,
    norm_ptr,
    hidden,
    parts,
    norm_eps,
    eps,
    x_ptr,
    N: tl.constexpr,
    M: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s, m = tl.arange(0, PARTS), tl.arange(0, WIDE)
    h = tl.arange(0, BLOCK)
    at, inside = streams_ptr + h, h < hidden
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + hidden, mask=inside, other=0.0).to(tl.float32)
    third = tl.load(at + 2 * hidden, mask=inside, other=0.0).to(tl.float32)
    fourth = tl.load(at + 3 * hidden, mask=inside, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + h, mask=inside, other=0.0)
    weight = tl.sum(tl.load(sums_ptr + s[:, None] * WIDE + m[None, :], mask=(s < parts)[:, None], other=0.0), 0)
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
    tl.store(x_ptr + h, (x * norm.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def _write_mixing(
    sums_ptr,
    affine_ptr,
    hidden,
    parts,
    norm_eps,
    eps,
    post_ptr,
    comb_ptr,
    N: tl.constexpr,
    M: tl.constexpr,
    ITERATIONS: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
):
    s, m = tl.arange(0, PARTS), tl.arange(0, WIDE)
    w = tl.sum(tl.load(sums_ptr + s[:, None] * WIDE + m[None, :], mask=(s < parts)[:, None], other=0.0), 0)
    inverse = tl.rsqrt(tl.sum(tl.where(m == M, w, 0.0), 0) / (N * hidden) + norm_eps)
    scale = tl.where(m < 2 * N, tl.load(affine_ptr + M + 1), tl.load(affine_ptr + M + 2))
    w = w * inverse * scale + tl.load(affine_ptr + m, mask=m < M, other=0.0)
    tl.store(post_ptr + m - N, 2 / (1 + tl.exp(-w)), mask=(m >= N) & (m < 2 * N))
    # Each thread has all 16 numbers of the matrix, so that 39 divisions by a sum wait for no other thread.
    a0, a1, a2, a3 = _softmax(w, m, 2 * N, eps)
    b0, b1, b2, b3 = _softmax(w, m, 3 * N, eps)
    c0, c1, c2, c3 = _softmax(w, m, 4 * N, eps)
    d0, d1, d2, d3 = _softmax(w, m, 5 * N, eps)
    for step in range(ITERATIONS):
        if step > 0:
            a0, a1, a2, a3 = _over_sum(a0, a1, a2, a3, eps)
            b0, b1, b2, b3 = _over_sum(b0, b1, b2, b3, eps)
            c0, c1, c2, c3 = _over_sum(c0, c1, c2, c3, eps)
            d0, d1, d2, d3 = _over_sum(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _over_sum(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _over_sum(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _over_sum(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _over_sum(a3, b3, c3, d3, eps)
    _store_line(comb_ptr, a0, a1, a2, a3)
    _store_line(comb_ptr + N, b0, b1, b2, b3)
    _store_line(comb_ptr + 2 * N, c0, c1, c2, c3)
    _store_line(comb_ptr + 3 * N, d0, d1, d2, d3)


@triton.jit
def _softmax(w, m, at: tl.constexpr, eps):
    """Four numbers of a vector, from `at` on: their softmax, and eps is added."""
    a, b = tl.sum(tl.where(m == at, w, 0.0), 0), tl.sum(tl.where(m == at + 1, w, 0.0), 0)
    c, d = tl.sum(tl.where(m == at + 2, w, 0.0), 0), tl.sum(tl.where(m == at + 3, w, 0.0), 0)
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _over_sum(tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _over_sum(a, b, c, d, eps):
    share = 1 / (a + b + (c + d) + eps)
    return a * share, b * share, c * share, d * share


@triton.jit
def _store_line(to, a, b, c, d):
    tl.store(to, a)
    tl.store(to + 1, b)
    tl.store(to + 2, c)
    tl.store(to + 3, d)


def join(execute: Executor, streams, out, post, comb) -> Any:
    """The streams `[rows, 4, hidden]` after a block, as `hyper_connections.expand_streams` defines it."""
    return _mix(execute, streams, [out, post, comb], None)[0]


def block_input(
    execute: Executor, streams, fn, norm, *joined, norm_eps: float, eps: float, iterations: int
) -> tuple[Any, ...]:
    """A block's input after its norm `[rows, hidden]`; where fn is no head's, also post and comb, as
    `hyper_connections.collapse_streams` has them. With `joined`, which are out, post and comb of the block before, the
    streams after that block come first."""
    after, sums = _mix(execute, streams, joined or (None, None, None), fn)
    streams, options = streams if after is None else after, {"norm_eps": norm_eps, "eps": eps, "iterations": iterations}
    return *([] if after is None else [after]), *input_of_sums(execute, streams, fn, norm, sums, **options)


def input_of_sums(
    execute: Executor, streams, fn, norm, sums, *, norm_eps: float, eps: float, iterations: int
) -> tuple[Any, ...]:
    """As `block_input`, of sums float32 `[rows, parts, 32]` of parts of the channels."""
    (rows, n, hidden), m, parts = streams.shape, fn.shape[0] - 1, sums.shape[1]
    outputs, mixes = [Output((rows, hidden), "bfloat16"), None, None], m > n
    if mixes:
        outputs[1:] = Output((rows, n), "float32"), Output((rows, n, n), "float32")
    constants = {"N": n, "M": m, "ITERATIONS": iterations, "WIDE": WIDE, "PARTS": triton.next_power_of_2(parts)}
    constants |= {"BLOCK": triton.next_power_of_2(hidden), "num_warps": 8}
    scalars = hidden, parts, norm_eps, eps
    launch = Launch(input_kernel, "hyper_connections_input", (rows, 1 + mixes), scalars, outputs, constants)
    return execute(launch, (streams, sums, fn, norm))[: 3 if mixes else 1]


def _mix(execute: Executor, streams, joined, fn) -> tuple[Any, Any]:
    """The streams after the block before, and the sums; each None where it is not wanted."""
    (rows, n, hidden), m = streams.shape, 0 if fn is None else fn.shape[0] - 1
    parts = n * triton.cdiv(hidden, BLOCK_H)
    outputs = [
        None if joined[0] is None else Output(streams.shape, "bfloat16"),
        None if fn is None else Output((rows, parts, WIDE), "float32"),
    ]
    constants = {"N": n, "M": m, "WIDE": WIDE, "BLOCK_T": BLOCK_T, "BLOCK_H": BLOCK_H, "num_warps": 4}
    grid = triton.cdiv(rows, BLOCK_T), parts
    return execute(
        Launch(mix_kernel, "hyper_connections_mix", grid, (rows, hidden), outputs, constants), (streams, *joined, fn)
    )
