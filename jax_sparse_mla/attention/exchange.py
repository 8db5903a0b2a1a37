"""The exchange of context parallel decode: what a device sends of its attention, and the merge of what it gets.

A launch copies outputs and lse into one buffer, one all-to-all moves it, and a launch merges what came. NCCL sends each
peer one block, so outputs of several rows have to be copied for it in any case; lse goes with them, because an exchange
of its own would cost a second collective's launch and synchronisation.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla.attention.merge import apply_attn_sink, merge_attention
from jax_sparse_mla.indices.ownership import AxisName
from jax_sparse_mla.launch.dispatch import dispatch, use_triton
from jax_sparse_mla.launch.transforms import KernelCall, differentiated_as
from jax_sparse_mla.launch.triton_call import launching

# A device's words are a multiple of these: 16 bytes, so that every part is aligned as the first one is.
_QUAD = 4


def exchanged(
    out: jax.Array, lse: jax.Array, attn_sink: jax.Array | None, axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    """out `[..., heads / n, v_dim]` and lse of the device's own heads, from every device's out and lse of all heads.

    Sums are float32 and in the devices' order; out is rounded to its dtype once, after the sink.
    """
    words = lax.all_to_all(send(out, lse, lax.axis_size(axis_name)), axis_name, 0, 0, tiled=True)
    *leading, heads, v_dim = out.shape
    return merge_received(words, attn_sink, (*leading, heads // len(words), v_dim), out.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
@partial(jax.jit, static_argnames="n")
def send(out: jax.Array, lse: jax.Array, n: int) -> jax.Array:
    """int32 `[n, words]`, one row a peer: the bits of its heads' `out`, then of `lse`, padded to 16 bytes."""
    if out.size == 0:
        return send_reference(out, lse, n)
    *leading, heads, v_dim = out.shape
    words = n, _words(math.prod(leading) * heads // n, v_dim, out.dtype)
    kernel = launching("attention.triton.exchange.send", words=words)
    return dispatch(kernel, partial(send_reference, n=n), out, lse)


@send.defjvp
def _refuse(n, primals, tangents):
    raise NotImplementedError(
        "context_parallel_decode: what devices exchange are bits, without a gradient; only attn_sink has one. "
        "Differentiate sparse_mla_decode over whole caches"
    )


def send_reference(out: jax.Array, lse: jax.Array, n: int) -> jax.Array:
    """`send` in plain JAX."""
    *leading, heads, v_dim = out.shape
    rows, items = math.prod(leading), math.prod(leading) * heads // n
    if out.dtype == jnp.bfloat16:
        out = out.reshape(rows, heads, v_dim // 2, 2)
    parts = []
    for x in (out, lse):
        bits = lax.bitcast_convert_type(x, jnp.int32).reshape(rows, n, heads // n, -1 if x.size else 0)
        parts.append(jnp.moveaxis(bits, 1, 0).reshape(n, items * bits.shape[-1]))
    words = jnp.concatenate(parts, axis=1)
    return jnp.pad(words, ((0, 0), (0, _words(items, v_dim, out.dtype) - words.shape[1])))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def merge_received(
    words: jax.Array, attn_sink: jax.Array | None, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """`merge_attention` of the parts, int32 `[n, words]`, that all devices sent by `send`, and `apply_attn_sink`.

    The sink is that of the device's own heads; shape and dtype are out's, `[..., own heads, v_dim]`.
    """
    dtype = np.dtype(dtype).name
    plain = partial(merge_received_reference, shape=shape, dtype=dtype)
    if 0 in shape or not use_triton():
        return plain(words, attn_sink)
    kernel = launching("attention.triton.exchange.merge_received", shape=shape, dtype=dtype)
    return differentiated_as(KernelCall(kernel, plain), plain)(words, attn_sink)


def merge_received_reference(
    words: jax.Array, attn_sink: jax.Array | None, shape: tuple[int, ...], dtype: str
) -> tuple[jax.Array, jax.Array]:
    """`merge_received` in plain JAX."""
    items, parts = math.prod(shape[:-1]), len(words)
    end = items * shape[-1] * np.dtype(dtype).itemsize // 4
    outs = lax.bitcast_convert_type(words[:, :end], dtype).reshape(parts, *shape).astype(jnp.float32)
    lses = lax.bitcast_convert_type(words[:, end : end + items], jnp.float32).reshape(parts, *shape[:-1])
    out, lse = merge_attention(outs, lses)
    out = out if attn_sink is None else apply_attn_sink(out, lse, attn_sink)
    return out.astype(dtype), lse


def _words(items: int, v_dim: int, dtype: np.dtype) -> int:
    """Words for a device that gets so many heads of rows."""
    words = items * (v_dim * np.dtype(dtype).itemsize // 4 + 1)
    return -(-words // _QUAD) * _QUAD
