"""Hyper-connections (arXiv 2512.24880): n residual streams, which each block reads and joins by weights of its own.

`block_input` and `join` run Triton kernels on GPUs; the other functions say what these compute.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.launch.dispatch import use_triton
from jax_sparse_mla.launch.transforms import KernelCall, differentiated_as
from jax_sparse_mla.launch.triton_call import launching
from jax_sparse_mla.rope import round_to_bfloat16
from jax_sparse_mla.serving.config import HyperConnections
from jax_sparse_mla.serving.layers import matmul, normalised, rms_norm, split

_FEW_ROWS = 64  # that the first of both kernels takes; of more, XLA joins streams and cuBLAS multiplies them


class Mixing(NamedTuple):
    """How a block's output joins the streams: post float32 `[T, n]`, comb float32 `[T, n, n]`."""

    post: jax.Array
    comb: jax.Array


def with_affine(fn: jax.Array, base: jax.Array, scale: jax.Array) -> jax.Array:
    """The weights of a block's input: fn float32 `[(2 + n) * n, n * hidden]`, and one line more that begins with base
    `[(2 + n) * n]` and scale `[3]`. Of a head, which nothing joins, fn has n lines, base n numbers and scale one.

    In an array of their own they would take the host some microseconds a step.
    """
    rest = jnp.zeros(fn.shape[1] - base.shape[0] - scale.shape[0], fn.dtype)
    return jnp.concatenate([fn, jnp.concatenate([base, scale, rest])[None]])


def block_input(
    streams: jax.Array,
    fn: jax.Array,
    norm: jax.Array,
    before: tuple[jax.Array, Mixing] | None = None,
    *,
    config: HyperConnections,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, Mixing | None]:
    """What a block reads of the streams.

    Args:
      streams: `[T, n, hidden]`.
      fn: as `with_affine` makes it.
      norm: `[hidden]`, of the block's RMSNorm.
      before: the output `[T, hidden]` of the block before and its mixing, which the streams do not have yet.

    A row has the same bits whatever rows are beside it, up to 64 of them. Of more, cuBLAS sums, and the streams are
    joined with fewer roundings.

    Returns:
      The streams with it; the block's input `[T, hidden]` after its norm; and how the output joins, None for a head.
    """

    def plain(streams, fn, norm, before):
        return _block_input(streams, fn, norm, before, config, norm_eps)

    def kernel(streams, fn, norm, before):
        few = streams.shape[0] <= _FEW_ROWS
        if before is not None and not few:
            streams, before = expand_streams(streams, *before), None
        name, static = "block_input" if few else "input_of_sums", {"eps": config.eps, "iterations": config.iterations}
        launch = launching(f"serving.hyper_connections_triton.{name}", norm_eps=norm_eps, **static)
        results = launch(streams, fn, norm, before if few else _sums(streams, fn))
        joined, x, *mixing = (streams, *results) if before is None else results
        return joined, x, Mixing(*mixing) if mixing else None

    if not _kernel_serves(streams):
        return plain(streams, fn, norm, before)
    return differentiated_as(KernelCall(kernel, plain), plain)(streams, fn, norm, before)


def joins_later(streams: jax.Array) -> bool:
    """Whether the next `block_input` joins a block's output sooner than `join` does."""
    return streams.shape[0] <= _FEW_ROWS and _kernel_serves(streams)


def join(streams: jax.Array, out: jax.Array, mixing: Mixing) -> jax.Array:
    """The streams `[T, n, hidden]` after a block with output `[T, hidden]`."""
    if not joins_later(streams):
        return expand_streams(streams, out, mixing)
    kernel = launching("serving.hyper_connections_triton.join")
    return differentiated_as(KernelCall(kernel, expand_streams), expand_streams)(streams, out, mixing)


def _kernel_serves(streams: jax.Array) -> bool:
    rows, n, _ = streams.shape
    return streams.dtype == jnp.bfloat16 and rows > 0 and n == 4 and use_triton()


def _sums(streams: jax.Array, fn: jax.Array) -> jax.Array:
    """float32 `[T, 1, 32]`: streams times the lines of fn, without rounding these, and the sums of squares behind them.

    A number of float32 is the sum of three of bfloat16, whose products with streams are exact: so tensor cores make
    them.
    """
    rows, lines = streams.shape[0], fn.shape[0] - 1
    flat, rest, pieces = streams.reshape(rows, -1), fn[:lines], []
    for _ in range(3):
        piece = round_to_bfloat16(rest)
        rest = rest - piece
        pieces.append(piece.astype(jnp.bfloat16))
    products = matmul(flat, jnp.concatenate(pieces)).reshape(rows, 3, lines).sum(1)
    # XLA would sum in the loop that joins, which took 0.6 ms for 8,192 rows on an H200.
    squares = lax.optimization_barrier(jnp.sum(jnp.square(flat.astype(jnp.float32)), -1, keepdims=True))
    return jnp.pad(jnp.concatenate([products, squares], -1), ((0, 0), (0, 31 - lines)))[:, None]


def _block_input(streams, fn, norm, before, config: HyperConnections, norm_eps: float):
    if before is not None:
        streams = expand_streams(streams, *before)
    lines = fn.shape[0] - 1
    weights, base, scale = fn[:lines], fn[lines, :lines], fn[lines, lines : lines + 3]
    if lines == config.streams:
        x, mixing = head_of_streams(streams, weights, base, scale[0], eps=config.eps, norm_eps=norm_eps), None
    else:
        x, *mixing = collapse_streams(streams, weights, base, scale, config=config, norm_eps=norm_eps)
    return streams, rms_norm(x, norm, norm_eps), mixing and Mixing(*mixing)


def collapse_streams(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, *, config: HyperConnections, norm_eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The input of a block from the residual streams, and how its output joins them (arXiv 2512.24880).

    Args:
      streams: `[T, n, hidden]`.
      fn: float32 `[(2 + n) * n, n * hidden]`; base float32 `[(2 + n) * n]`; scale float32 `[3]`.

    Returns:
      The block's input `[T, hidden]` in the streams' dtype; post float32 `[T, n]` and comb float32 `[T, n, n]` for
      `expand_streams`.
    """
    n = config.streams
    rows = streams.shape[0]
    weights = matmul(normalised(streams.reshape(rows, -1), norm_eps), fn)
    widths = n, n, n * n
    parts = zip(split(weights, *widths), scale, split(base, *widths))
    pre, post, comb = (part * part_scale + part_base for part, part_scale, part_base in parts)
    pre = jax.nn.sigmoid(pre) + config.eps
    comb = doubly_stochastic(comb.reshape(rows, n, n), iterations=config.iterations, eps=config.eps)
    collapsed = jnp.sum(pre[:, :, None] * streams, axis=1).astype(streams.dtype)
    return collapsed, 2 * jax.nn.sigmoid(post), comb


def doubly_stochastic(logits: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """float32 `[T, n, n]` of logits: softmax, then columns and rows in turn over their sums (Sinkhorn and Knopp)."""

    def divided(matrix, axis):
        return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + eps)

    matrix = divided(jax.nn.softmax(logits, axis=-1) + eps, -2)
    return lax.fori_loop(0, iterations - 1, lambda _, x: divided(divided(x, -1), -2), matrix)


def expand_streams(streams: jax.Array, out: jax.Array, mixing: Mixing) -> jax.Array:
    """The streams `[T, n, hidden]` after a block with output `[T, hidden]`: mixed by comb, the output added by post."""
    dtype, (post, comb) = streams.dtype, mixing
    # A product of n x n: as sums, XLA makes one loop of it and of what follows.
    comb, wide = comb.astype(dtype).astype(jnp.float32), streams.astype(jnp.float32)
    mixed = sum(comb[:, i, :, None] * wide[:, i, None, :] for i in range(streams.shape[1]))
    return post.astype(dtype)[:, :, None] * out[:, None, :] + mixed.astype(dtype)


def head_of_streams(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, *, eps: float, norm_eps: float
) -> jax.Array:
    """`[T, hidden]` of the last streams `[T, n, hidden]`: fn float32 `[n, n * hidden]`, base `[n]`, scale a number."""
    weights = matmul(normalised(streams.reshape(streams.shape[0], -1), norm_eps), fn)
    pre = jax.nn.sigmoid(weights * scale + base) + eps
    return jnp.sum(pre[:, :, None] * streams, axis=1).astype(streams.dtype)
