"""Merging partial attention results, and the attention sink."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, ArgumentChecks


def merge_attention(
    outs: Sequence[jax.Array] | jax.Array, lses: Sequence[jax.Array] | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of disjoint key sets, from the attention over each.

    `lse = logsumexp_i lse_i`, `out = Σ_i out_i · exp(lse_i − lse)`. Every part must be without the attention sink
    (apply it to the result with `apply_attn_sink`).

    Args:
      outs: parts `[..., heads, v_dim]`, bfloat16 or float32, as a sequence or stacked on a leading axis.
      lses: parts float32 `[..., heads]`, natural log; −inf where a part has no valid key.

    Returns:
      out `[..., heads, v_dim]` in the parts' dtype, 0 where no part has a valid key, and lse float32
      `[..., heads]`, −inf there.

    Raises:
      TypeError, ValueError: wrong dtypes, no parts, a different number of outs and lses, or mismatched shapes.
    """
    check = ArgumentChecks("merge_attention")
    outs, lses = _parts(check, "outs", outs), _parts(check, "lses", lses)
    if len(outs) == 0 or len(outs) != len(lses):
        raise check.fail(f"outs and lses must have as many parts, at least 1; got {len(outs)} and {len(lses)}")
    dims = (*(f"dim {d}" for d in range(check.rank("outs[0]", outs[0]) - 2)), "heads", "v_dim")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        outs[i] = check(f"outs[{i}]", out, dims, FLOATS)
        lses[i] = check(f"lses[{i}]", lse, dims[:-1], FLOAT32)
        if outs[i].dtype != outs[0].dtype:
            raise TypeError(f"merge_attention: outs[{i}] is {outs[i].dtype}, outs[0] is {outs[0].dtype}")
    return _merge(jnp.stack(outs), jnp.stack(lses))


def _parts(check: ArgumentChecks, name: str, parts: Sequence[jax.Array] | jax.Array) -> list[jax.Array]:
    stacked = isinstance(parts, (jax.Array, np.ndarray)) and parts.ndim > 0
    if not stacked and not isinstance(parts, (list, tuple)):
        raise TypeError(
            f"{check.function}: {name} must be a sequence of arrays or a stacked array, got {type(parts).__name__}"
        )
    return list(parts)


@jax.jit
def _merge(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    top = jax.lax.stop_gradient(jnp.max(lses, axis=0))
    empty = top == -jnp.inf
    # A part without valid keys weighs 0. Both `where`s keep −inf − −inf and its gradient out of the graph.
    shift = jnp.where(empty, 0.0, top)
    absent = lses == -jnp.inf
    weights = jnp.where(absent, 0.0, jnp.exp(jnp.where(absent, shift, lses) - shift))
    total = jnp.where(empty, 1.0, jnp.sum(weights, axis=0))
    # An absent part's out may be anything, NaN included: 0 · NaN is NaN.
    outs32 = jnp.where(absent[..., None], 0.0, outs.astype(jnp.float32))
    out = jnp.sum(outs32 * (weights / total)[..., None], axis=0)
    return out.astype(outs.dtype), jnp.where(empty, -jnp.inf, shift + jnp.log(total))


def apply_attn_sink(out: jax.Array, lse: jax.Array, attn_sink: jax.Array) -> jax.Array:
    """Adds each head's attention sink to the softmax denominator: `out · exp(lse) / (exp(lse) + exp(sink))`.

    Args:
      out: `[..., heads, v_dim]`, bfloat16 or float32, attention without the sink.
      lse: float32 `[..., heads]`, natural log, without the sink; −inf where no key is valid.
      attn_sink: float32 `[heads]`, a logit that is not scaled. +inf gives 0, −inf changes nothing.

    Returns:
      out `[..., heads, v_dim]` in its dtype, 0 where no key is valid.

    Raises:
      TypeError, ValueError: wrong dtypes or mismatched shapes.
    """
    check = ArgumentChecks("apply_attn_sink")
    leading = tuple(f"dim {d}" for d in range(check.rank("out", out) - 2))
    out = check("out", out, (*leading, "heads", "v_dim"), FLOATS)
    lse = check("lse", lse, (*leading, "heads"), FLOAT32)
    attn_sink = check("attn_sink", attn_sink, ("heads",), FLOAT32)
    with_sink = out.astype(jnp.float32) * sink_factor(lse, attn_sink)[..., None]
    return jnp.where((lse == -jnp.inf)[..., None], 0.0, with_sink).astype(out.dtype)


def sink_factor(lse: jax.Array, attn_sink: jax.Array) -> jax.Array:
    """`exp(lse) / (exp(lse) + exp(sink))` for `[..., heads]` and `[heads]`, with finite gradients everywhere."""
    attn_sink = jnp.broadcast_to(attn_sink, lse.shape)
    finite = jnp.isfinite(lse) & jnp.isfinite(attn_sink)
    factor = jax.nn.sigmoid(jnp.where(finite, lse, 0.0) - jnp.where(finite, attn_sink, 0.0))
    return jnp.where(finite, factor, jnp.where(attn_sink == jnp.inf, 0.0, 1.0))
