"""The gradient of prefill through kernels: whichever made the forward pass, one kernel makes dq and dkv.

Saved are the arguments, out and lse; the scores are computed again. With p = exp(s − lse), the probabilities without
the sink, f = exp(lse) / (exp(lse) + exp(sink)) and delta = Σ g · out, for each head of a row

    ds    = p · (f · (g Vᵀ − delta) + g_lse)        s: scaled scores, g, g_lse: the gradients of out and lse
    dq    = scale · ds K
    dK    = scale · dsᵀ q,  and to its first v_dim columns  (f · p)ᵀ g;  dkv sums it over heads and rows
    dsink = −Σ_rows (1 − f) · delta

max_logits are statistics here, without a gradient. Where a program is lowered for another platform than CUDA, and under
`vmap`, the reference is differentiated instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import sharding
from jax_sparse_mla.attention import reference
from jax_sparse_mla.attention.backend import GRADIENT_BACKENDS, GradientArrays, GradientCall
from jax_sparse_mla.attention.merge import sink_factor
from jax_sparse_mla.backend import first_able, load
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch.transforms import KernelCall, shared, varying_alike
from jax_sparse_mla.launch.triton_call import executor
from jax_sparse_mla.packages import why_not

# Sums of integers of 64 bits: at a key's scale none is larger than 2^62.
FIXED_POINT_BITS = 62
LARGEST_EXPONENT = 128  # of float32


def differentiable(
    forward: Callable[..., tuple], name: str, softmax_scale: float, deterministic: bool
) -> Callable[..., tuple]:
    """`forward(q, kv, indices, topk_length, attn_sink)`, which is prefill, with a gradient in q, kv and the sink.

    `name` is the public function's, for errors. `deterministic`: dkv repeats to the bit, as dq and dsink always do.
    """
    attend = jax.custom_vjp(forward)

    def save(*arguments):
        out, top, lse = forward(*arguments)
        return (out, top, lse), (*arguments, out, lse)

    def pull(saved, cotangents):
        if why := why_not("triton"):
            raise NotImplementedError(f'{name}: its gradient needs triton: {why}; or use backend="reference"')
        g_out, _, g_lse = cotangents
        arrays = Arrays(*saved, g_out, g_lse)
        rule = _rule(arrays)
        kernel = partial(by_kernel, softmax_scale=softmax_scale, deterministic=deterministic)
        plain = shared(partial(by_reference, softmax_scale=softmax_scale), rule)
        kernel.__name__ = f"gradient of {name}"
        dq, dkv, dsink = KernelCall(kernel, plain, rule=rule)(arrays)
        return dq, dkv, None, None, dsink

    attend.defvjp(save, pull)

    def called(*arguments):
        # Gradients of what every device of a `shard_map` has are summed here, and not in the kernel's gradient.
        return attend(*varying_alike(arguments))

    return called


class Arrays(NamedTuple):
    """The arrays that a gradient is made of: the arguments and results of prefill, and the gradients of out and lse."""

    q: jax.Array
    kv: jax.Array
    indices: jax.Array
    topk_length: jax.Array | None
    attn_sink: jax.Array | None
    out: jax.Array
    lse: jax.Array
    g_out: jax.Array
    g_lse: jax.Array


def _rule(arrays: Arrays) -> sharding.PartitionRule:
    """Rows and heads may be cut; what every device computes of dkv and dsink is then added up."""
    of_q = P("rows", "heads")
    lengths = None if arrays.topk_length is None else P("rows")
    sink = None if arrays.attn_sink is None else P("heads")
    arguments = Arrays(of_q, P(), P("rows"), lengths, sink, of_q, of_q, of_q, of_q)
    return sharding.PartitionRule((arguments,), (of_q, P(), sink), summed=True)


def by_reference(arrays: Arrays, *, softmax_scale: float) -> tuple:
    """dq, dkv and dsink (None without a sink). dkv is summed in float32, as a kernel does it."""

    def attend(q, kv, attn_sink):
        indices, lengths = arrays.indices, arrays.topk_length
        out, _, lse = reference.prefill(q, kv, indices, lengths, attn_sink, softmax_scale=softmax_scale)
        return out, lse

    _, pull = jax.vjp(attend, arrays.q, arrays.kv.astype(jnp.float32), arrays.attn_sink)
    dq, dkv, dsink = pull((arrays.g_out, arrays.g_lse))
    return dq, dkv.astype(arrays.kv.dtype), dsink


def by_kernel(arrays: Arrays, *, softmax_scale: float, deterministic: bool, tile: Any = None) -> tuple:
    """As `by_reference`, by the first kernel of `GRADIENT_BACKENDS` that can.

    `tile` is one of Triton's kernel, which then serves (tuning).
    """
    q, kv, indices, lengths, attn_sink, out, lse, g_out, g_lse = arrays
    factor, offset, dsink = statistics(attn_sink, out, lse, g_out, g_lse)
    scales = key_scales(q, kv, g_out, offset, softmax_scale) if deterministic else None
    call = GradientCall(DeviceInfo.current(), q.shape[-1], deterministic)
    if tile is None:
        backward = load(first_able(GRADIENT_BACKENDS, call, "gradient").function)
    else:
        backward = partial(load(GRADIENT_BACKENDS["triton"].function), tile=tile)
    arrays = GradientArrays(q, kv, indices, lengths, g_out, lse, factor, offset, scales)
    dq, dkv = backward(executor(), arrays, softmax_scale=softmax_scale)
    if deterministic:
        dkv = from_fixed_point(dkv, scales)
    return dq, dkv.astype(kv.dtype), dsink


def statistics(
    attn_sink: jax.Array | None, out: jax.Array, lse: jax.Array, g_out: jax.Array, g_lse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """f and f · delta − g_lse of each head of each row, float32 `[q_len, heads]`; dsink `[heads]`, or None."""
    delta = jnp.sum(g_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    empty = lse == -jnp.inf
    g_lse = jnp.where(empty, 0.0, g_lse)
    if attn_sink is None:
        return (~empty).astype(jnp.float32), delta - g_lse, None
    factor = jnp.where(empty, 0.0, sink_factor(lse, attn_sink))
    # 1 − f, without its rounding; out and so delta are 0 where the sink is +inf and where there is no key.
    finite = ~empty & jnp.isfinite(attn_sink)
    taken = jax.nn.sigmoid(jnp.where(finite, attn_sink, 0.0) - jnp.where(finite, lse, 0.0))
    dsink = -jnp.sum(jnp.where(finite, taken * delta, 0.0), 0)
    return factor, factor * delta - g_lse, dsink


def key_scales(q: jax.Array, kv: jax.Array, g_out: jax.Array, offset: jax.Array, softmax_scale: float) -> jax.Array:
    """For each key the power of two at which its sums fit into 64 bits; float32 `[kv_len]`.

    By |ds| ≤ |scale| · (|g| |V| + |offset|) and p ≤ 1, of which each head of each row adds one at most, times 2 for
    what rounding adds. All are NaN where one of the rows has something that is not finite, as it has after reading such
    a key; a key that nobody reads may be anything.
    """
    rows, heads, _ = q.shape
    values = kv[:, : g_out.shape[-1]].astype(jnp.float32)
    value = jnp.sqrt(jnp.sum(values * values, -1))
    g = g_out.astype(jnp.float32)
    longest, largest = jnp.sqrt(jnp.max(jnp.sum(g * g, -1))), jnp.max(jnp.abs(g))
    furthest, query = jnp.max(jnp.abs(offset)), jnp.max(jnp.abs(q.astype(jnp.float32)))
    of_scores = abs(softmax_scale) * (longest * value + furthest)
    most = 2.0 * rows * heads * (of_scores * query + largest)
    _, exponent = jnp.frexp(most)
    exponent = jnp.where(jnp.isfinite(most), exponent, LARGEST_EXPONENT)
    scales = jnp.ldexp(jnp.ones_like(most), jnp.clip(FIXED_POINT_BITS - exponent, -126, 126))
    return jnp.where(jnp.isfinite(longest + largest + furthest + query), scales, jnp.nan)


def from_fixed_point(sums: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 `[kv_len, qk_dim]` of int64 in int32 `[kv_len, 2 · qk_dim]`, low halves first."""
    halves = sums.reshape(sums.shape[0], -1, 2)
    low, high = halves[..., 0], halves[..., 1]
    negative = high < 0
    # Two's complement by hand: of a small negative number the halves are large, and would cancel.
    high = jnp.where(negative, ~high + (low == 0), high)
    low = jnp.where(negative, -low, low)
    size = high.astype(jnp.float32) * 2.0**32 + jax.lax.bitcast_convert_type(low, jnp.uint32).astype(jnp.float32)
    return jnp.where(negative, -size, size) / scales[:, None]
