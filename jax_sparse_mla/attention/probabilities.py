"""The heads' probabilities for each index, summed: what the attention looks at. An indexer learns from them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import sharding
from jax_sparse_mla._chunks import map_rows
from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.attention.api import static_scale
from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.reference import rows_at_once, valid_columns
from jax_sparse_mla.kv_cache.layout import workspace_layout
from jax_sparse_mla.launch.dispatch import dispatch


def sparse_mla_prefill_probabilities(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    lse: jax.Array,
    *,
    softmax_scale: float,
    topk_length: jax.Array | None = None,
) -> jax.Array:
    """Σ over the heads of exp(score − lse), for each index of each query: the teacher of an indexer.

    With the lse that `sparse_mla_prefill` returns these are probabilities without the sink, and a row's sum is the
    number of heads; with `jnp.logaddexp(lse, attn_sink)` the sink takes its share. A teacher has no gradient. Under
    `shard_map` the result is a sum over the device's own heads.

    Args:
      q: bfloat16 or float32 `[q_len, heads, qk_dim]`.
      kv: bfloat16 or float32 `[kv_len, qk_dim]`.
      indices: int32 `[q_len, topk]` rows of `kv`; < 0 or ≥ kv_len is skipped.
      lse: float32 `[q_len, heads]`, natural log; a head whose lse is −inf has no probabilities.
      softmax_scale: what q·k is multiplied by (a static number).
      topk_length: int32 `[q_len]`, how many leading columns are scanned; None scans all.

    Returns:
      float32 `[q_len, topk]`, 0 where no key is valid. An index given twice has its probability twice.

    Raises:
      TypeError: a wrong dtype. ValueError: wrong or mismatched shapes.
    """
    check = ArgumentChecks("sparse_mla_prefill_probabilities")
    q = check("q", q, ("q_len", "heads", "qk_dim"), FLOATS)
    kv = check("kv", kv, ("kv_len", "qk_dim"), FLOATS)
    indices = check("indices", indices, ("q_len", "topk"), INT32)
    lse = check("lse", lse, ("q_len", "heads"), FLOAT32)
    topk_length = check.optional("topk_length", topk_length, ("q_len",), INT32)
    arguments = q, kv, indices, topk_length, lse
    softmax_scale = static_scale(check, softmax_scale)
    if not sharding.is_sharded(arguments):
        return _summed_over_heads(*arguments, softmax_scale=softmax_scale)
    sharding.refuse_sharded(check, "kv", kv)
    rule = _rule(topk_length, heads=None)
    return sharding.by_rule(_summed_over_heads, rule, arguments, softmax_scale=softmax_scale)


def _rule(topk_length: jax.Array | None, heads: str | None) -> sharding.PartitionRule:
    """Rows may be cut, and heads, if they are named: the result is then a sum of what the devices have."""
    optional = None if topk_length is None else P("rows")
    operands = P("rows", heads), P(), P("rows"), optional, P("rows", heads)
    return sharding.PartitionRule(operands, P("rows"), summed=True)


@partial(jax.jit, static_argnames="softmax_scale")
def _summed_over_heads(q, kv, indices, topk_length, lse, *, softmax_scale: float) -> jax.Array:
    arguments = jax.lax.stop_gradient((q, kv, indices, topk_length, lse))
    plain = kernel = partial(_plain, softmax_scale=softmax_scale)
    if 0 in (q.size, kv.size, indices.size):
        return plain(*arguments)
    layouts = BACKENDS["triton"].layouts["prefill"]
    if workspace_layout(q.shape[-1]) in layouts and q.dtype == kv.dtype == jnp.bfloat16:
        kernel = partial(_by_kernel, softmax_scale=softmax_scale)
    return dispatch(kernel, plain, *arguments, rule=_rule(topk_length, heads="heads"))


def _by_kernel(q, kv, indices, topk_length, lse, *, softmax_scale: float) -> jax.Array:
    from jax_sparse_mla.attention.triton.backward import probabilities
    from jax_sparse_mla.launch.triton_call import executor

    return probabilities(executor(), q, kv, indices, topk_length, lse, softmax_scale=softmax_scale)


def _plain(q, kv, indices, topk_length, lse, *, softmax_scale: float) -> jax.Array:
    def one_row(row):
        q, index, length, lse = row
        valid = valid_columns(index, length, kv.shape[0])
        keys = jnp.where(valid[:, None], kv[jnp.where(valid, index, 0)].astype(jnp.float32), 0.0)
        scores = softmax_scale * jnp.einsum("hd,kd->hk", q.astype(jnp.float32), keys, precision="highest")
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
        return jnp.sum(jnp.where(valid, jnp.exp(scores - lse[:, None]), 0.0), 0)

    if 0 in (q.size, kv.size, indices.size):
        return jnp.zeros(indices.shape, jnp.float32)
    return map_rows(one_row, (q, indices, topk_length, lse), rows_at_once(indices.shape[1], *q.shape[1:]))
