"""Rotary embedding of interleaved pairs, and rounding to bfloat16."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 x rounded to bfloat16, as float32: XLA may drop a cast to bfloat16 and back, and never this."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def rope_interleaved(x: jax.Array, positions: jax.Array, inv_freq: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates the pairs (2i, 2i + 1) of the last `2 * len(inv_freq)` values by `position * inv_freq[i]`.

    This is V4's rope of queries, sliding-window keys and compressed keys. With `inverse` it rotates the attention's
    output back, at the query's position. The magnitude is 1 (V4 has no YaRN attention factor).

    Args:
      x: bfloat16 or float32 `[..., d]`; the values before the rotated ones stay as they are.
      positions: int32, broadcast against the leading axes of x (`positions[:, None]` for `[T, heads, d]`).
      inv_freq: float32 `[rope_dim / 2]`, `rope_dim <= d`.
      inverse: rotates back (static).

    Returns:
      Like x; computed in float32.

    Raises:
      TypeError: a wrong dtype.
      ValueError: more than d values to rotate, positions that do not broadcast.
    """
    check = ArgumentChecks("rope_interleaved")
    x = check("x", x, (None,) * max(1, check.rank("x", x)), FLOATS)
    positions = check("positions", positions, (None,) * check.rank("positions", positions), INT32)
    inv_freq = check("inv_freq", inv_freq, (None,), FLOAT32)
    leading, rope_dim = x.shape[:-1], 2 * inv_freq.shape[0]
    if rope_dim > x.shape[-1]:
        raise check.fail(f"x must have shape [..., d], d >= 2 * len(inv_freq) = {rope_dim}, got {list(x.shape)}")
    aligned = zip(reversed(positions.shape), reversed(leading))
    if positions.ndim > len(leading) or any(p not in (1, n) for p, n in aligned):
        raise check.fail(f"positions must broadcast to {list(leading)}, got {list(positions.shape)}")
    return _rope_interleaved(x, positions, inv_freq, inverse=inverse)


@functools.partial(jax.jit, static_argnames=("inverse",))
def _rope_interleaved(x, positions, inv_freq, *, inverse):
    rope_dim = 2 * inv_freq.shape[0]
    nope, rope = jnp.split(x, [x.shape[-1] - rope_dim], axis=-1)
    angle = positions[..., None].astype(jnp.float32) * inv_freq
    cos, sin = jnp.cos(angle), jnp.sin(-angle if inverse else angle)
    pairs = rope.astype(jnp.float32).reshape(*rope.shape[:-1], rope_dim // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([nope, rotated.reshape(rope.shape).astype(x.dtype)], axis=-1)
