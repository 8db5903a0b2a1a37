"""The arithmetic of all models beside attention: products, norms, rotary embeddings.

Rows are `[T, …]`, weights `[out, in]` as checkpoints have them. Arithmetic is float32 where transformers keeps it, and
in the rows' dtype elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla.serving.quantised import (
    JoinedRows,
    Quantised,
    Weight,
    kernel_serves,
    multiplied_out,
    stored_product,
    takes_swiglu,
)
from jax_sparse_mla.serving.quantised_cuda import MOST_ROWS

FEW_ROWS = 64  # whose product takes as long as reading the weight


def matmul(x: jax.Array, weight: Weight, dtype: Any = jnp.float32) -> jax.Array:
    """`x @ weight.T`, summed in float32: x `[T, in]`, weight `[out, in]` → `[T, out]` of a dtype. Float32 rows are not
    rounded to TF32.

    Of a quantised weight few rows read the bytes; for many it is multiplied out, which is little beside the product.
    """
    if isinstance(weight, JoinedRows):
        return jnp.concatenate([matmul(x, part, dtype) for part in weight.parts], axis=-1)
    plain, dtype = functools.partial(_matmul, dtype=dtype), jnp.dtype(dtype)
    if x.shape[0] <= FEW_ROWS and dtype in (jnp.float32, jnp.bfloat16) and kernel_serves(x, weight):
        return stored_product(plain, x, weight, dtype=dtype.name)
    return plain(x, weight)


def _matmul(x: jax.Array, weight: jax.Array | Quantised, dtype: Any) -> jax.Array:
    return lax.dot_general(
        x,
        multiplied_out(weight),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    ).astype(dtype)


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """`x @ weight.T` in x's dtype, summed in float32."""
    return matmul(x, weight, x.dtype)


def grouped_linear(x: jax.Array, weight: jax.Array | Quantised) -> jax.Array:
    """Each group's rows times its weight, in x's dtype: x `[T, groups, in]`, weight `[groups, out, in]` →
    `[T, groups, out]`. Few rows read a quantised weight's bytes, as in `matmul`."""
    rows, groups, _ = x.shape
    flat = x.reshape(rows * groups, -1)
    if rows > FEW_ROWS or not kernel_serves(flat, weight):
        return jnp.einsum("tgi,goi->tgo", x, multiplied_out(weight))
    if rows <= MOST_ROWS:
        of = jnp.asarray(np.tile(np.arange(groups, dtype=np.int32), rows))  # a constant, which no launch makes
        return stored_product(_named, flat, weight, of).reshape(rows, groups, -1)
    by_group = x.swapaxes(0, 1).reshape(flat.shape)
    out = stored_product(_in_groups, by_group, weight, jnp.asarray(np.full(groups, rows, np.int32)), sizes=True)
    return out.reshape(groups, rows, -1).swapaxes(0, 1)


def _named(x: jax.Array, weight: Quantised, of: jax.Array) -> jax.Array:
    groups = weight.shape[0]
    return jnp.einsum("tgi,goi->tgo", x.reshape(-1, groups, x.shape[1]), multiplied_out(weight)).reshape(len(of), -1)


def _in_groups(x: jax.Array, weight: Quantised, sizes: jax.Array) -> jax.Array:
    rows = x.reshape(len(sizes), -1, x.shape[1])
    return jnp.einsum("gti,goi->gto", rows, multiplied_out(weight)).reshape(len(x), -1)


def summed(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The sum over the devices of a mesh axis, of which each has its own heads or experts; None: x has them all."""
    return x if axis_name is None else lax.psum(x, axis_name)


def split(x: jax.Array, *sizes: int) -> list[jax.Array]:
    """The last dimension, cut into parts of these sizes."""
    return lax.split(x, sizes, axis=x.ndim - 1)


def normalised(x: jax.Array, eps: float) -> jax.Array:
    """float32: x over the root of the mean square of its last dimension."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm in x's dtype. A float32 weight is applied before rounding (V4), another one after it (V3.2)."""
    x_hat = normalised(x, eps)
    return (x_hat * weight).astype(x.dtype) if weight.dtype == jnp.float32 else x_hat.astype(x.dtype) * weight


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm in x's dtype, computed in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    x_hat = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (x_hat * weight + bias).astype(x.dtype)


def rotate(first: jax.Array, second: jax.Array, angle: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """The pairs (first[i], second[i]), rotated by `angle[i]` and multiplied by the magnitude: all first halves, then
    all second ones, `[..., dim]` in the dtype of `first`. angle is float32 and broadcasts against the halves."""
    cos, sin = jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(first.dtype)


def swiglu(gate_up: jax.Array, limit: float | None) -> jax.Array:
    """`silu(gate) * up` of `[..., 2 * width]`, the gate first; both bounded by the limit, the gate from above only."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def mlp(x: jax.Array, gate_up: Weight, down: Weight, limit: float | None = None) -> jax.Array:
    """A SwiGLU of one width: x `[T, hidden]`, gate_up `[2 * width, hidden]`, down `[hidden, width]`."""
    by_xla = functools.partial(_matmul, dtype=x.dtype)
    return swiglu_product(linear, by_xla, linear(x, gate_up), down, limit=limit, dtype=x.dtype.name)


def swiglu_product(
    product: Callable[..., jax.Array],
    by_xla: Callable[..., jax.Array],
    gate_up: jax.Array,
    down: Weight,
    *which: jax.Array,
    limit: float | None,
    **static: Any,
) -> jax.Array:
    """`product(swiglu(gate_up, limit), down, *which)`, or a kernel that computes the SwiGLU too.

    Args:
      by_xla: the same as `product`, without kernels.
      static: of `quantised_cuda.chosen`.
    """
    if takes_swiglu(gate_up, down, *which, **static):

        def plain(gate_up: jax.Array, down: Weight, *which: jax.Array) -> jax.Array:
            return by_xla(swiglu(gate_up, limit), down, *which)

        return stored_product(plain, gate_up, down, *which, gated=True, limit=limit, **static)
    return product(swiglu(gate_up, limit), down, *which)
