"""Norms and rotary embedding of projected rows: `normed_and_rotated` is one Triton launch on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse_mla.launch.dispatch import use_triton
from jax_sparse_mla.launch.transforms import KernelCall, differentiated_as
from jax_sparse_mla.launch.triton_call import launching
from jax_sparse_mla.rope import rope_interleaved
from jax_sparse_mla.serving.layers import normalised


class Part(NamedTuple):
    """Neighbouring columns of projected rows: `heads * dim` of them from `offset` on. `rope_dim`: the last channels of
    a head, which are rotated in pairs; 0 for none. `normed`: whether a head is divided by its root mean square."""

    offset: int
    heads: int
    dim: int
    rope_dim: int
    normed: bool


def normed_and_rotated(
    x: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *weights: jax.Array,
    parts: tuple[Part, ...],
    eps: float,
) -> list[jax.Array]:
    """Parts of projected rows, each normed, then rotated.

    Args:
      x: `[T, columns]`.
      positions: int32 `[T]`.
      inv_freq: float32 `[rope_dim / 2]`.
      weights: float32 `[dim]` of each part's norm, or none; a product is rounded once, as V4's are. A part that is not
        normed has no use for its weight.
      parts: one or two.

    Returns:
      Of each part `[T, heads, dim]`, in x's dtype.
    """

    def plain(x, positions, inv_freq, *weights):
        return [_part(x, positions, inv_freq, w, part, eps) for w, part in zip(weights or (None, None), parts)]

    def kernel(*arrays):
        return list(launching("serving.heads_triton.normed_and_rotated", parts=parts, eps=eps)(*arrays))

    if x.dtype != jnp.bfloat16 or x.shape[0] == 0 or not use_triton():
        return plain(x, positions, inv_freq, *weights)
    return differentiated_as(KernelCall(kernel, plain), plain)(x, positions, inv_freq, *weights)


def _part(x, positions, inv_freq, weight: jax.Array | None, part: Part, eps: float) -> jax.Array:
    rows = x[:, part.offset : part.offset + part.heads * part.dim].reshape(-1, part.heads, part.dim)
    if part.normed:
        wide = normalised(rows, eps)
        rows = (wide if weight is None else wide * weight).astype(x.dtype)
    return rope_interleaved(rows, positions[:, None], inv_freq) if part.rope_dim else rows
