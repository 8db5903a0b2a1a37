"""The portable GPU backend: the Triton kernel of `kernels/triton/sparse_mla/`, launched by jax-triton.

SM80 and up, FP8 and BF16 caches, any head count and any topk. How many programs share a row's keys is chosen from the
static shapes and the device's multiprocessors; lengths and indices stay data, so one compilation serves a bucket.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse_mla.kernels.triton.sparse_mla import launch as kernels
from jax_sparse_mla.kernels.triton.sparse_mla import plan as planning
from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from jax_sparse_mla.xla.triton_call import executor


@partial(jax.jit, static_argnames=("softmax_scale", "assume_valid_indices"))
def decode(
    q: jax.Array,  # [batch, q_len, heads, qk_dim]
    cache: PagedKV,
    indices: jax.Array,  # [batch, q_len, topk] slots of cache
    topk_length: jax.Array | None,  # [batch, q_len]; None scans all columns
    extra_cache: PagedKV | None,
    extra_indices: jax.Array | None,  # [batch, q_len, extra_topk] slots of extra_cache
    extra_topk_length: jax.Array | None,  # [batch, q_len]
    attn_sink: jax.Array | None,  # [heads]
    schedule: object,  # FlashMLA's; this kernel splits by shape
    *,
    softmax_scale: float,
    assume_valid_indices: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out bfloat16 `[batch, q_len, heads, v_dim]`, lse float32 `[batch, q_len, heads]`."""
    del schedule, assume_valid_indices  # every index is checked
    planning.check_layout("sparse_mla_decode", cache.layout)
    batch, q_len, heads, _ = q.shape
    tables = [_table(cache, indices, topk_length)]
    if extra_cache is not None:
        tables.append(_table(extra_cache, extra_indices, extra_topk_length))
    out, lse = _attend(q, tables, attn_sink, softmax_scale, cache.layout, batch * q_len)
    return out.reshape(batch, q_len, heads, planning.V_DIM), lse.reshape(batch, q_len, heads)


@partial(jax.jit, static_argnames=("softmax_scale", "v_dim"))
def prefill(
    q: jax.Array,  # [q_len, heads, qk_dim]
    kv: jax.Array,  # [kv_len, qk_dim]
    indices: jax.Array,  # [q_len, topk] rows of kv
    topk_length: jax.Array | None,  # [q_len]; None scans all columns
    attn_sink: jax.Array | None,  # [heads]
    schedule: object,
    *,
    softmax_scale: float,
    v_dim: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out bfloat16 `[q_len, heads, v_dim]`, max_logits and lse float32 `[q_len, heads]`."""
    del schedule, v_dim
    q_len, _, qk_dim = q.shape
    layout = planning.workspace_layout(qk_dim)
    planning.check_layout("sparse_mla_prefill", layout)
    table = (kv, indices, topk_length), Scope(indices.shape[-1], int(topk_length is not None), kv.shape[0])
    out, lse, max_logits = _attend(q, [table], attn_sink, softmax_scale, layout, q_len, max_logits=True)
    return out, max_logits, lse


def _table(cache: PagedKV, indices: jax.Array, lengths: jax.Array | None) -> tuple[tuple, Scope]:
    pages = cache.page_size, cache.layout.page_bytes(cache.page_size)
    scope = Scope(indices.shape[-1], int(lengths is not None), cache.num_slots, *pages)
    return (cache.data, indices, lengths), scope


def _attend(
    q: jax.Array,
    tables: list[tuple[tuple, Scope]],  # (bytes, indices, lengths or None) and their facts
    attn_sink: jax.Array | None,
    softmax_scale: float,
    layout: KVLayout,
    rows: int,
    *,
    max_logits: bool = False,
) -> tuple[jax.Array, ...]:
    """out `[rows, heads, 512]`, lse `[rows, heads]` and, if asked for, max_logits."""
    heads = q.shape[-2]
    # A table without columns or a cache without rows has nothing to read, and no pointer that one could pass.
    tables = [table for table in tables if table[0][0].size and table[0][1].size]
    if rows == 0 or heads == 0 or not tables:
        nothing = jnp.full((rows, heads), -jnp.inf, jnp.float32)
        out = jnp.zeros((rows, heads, planning.V_DIM), jnp.bfloat16)
        return (out, nothing, nothing)[: 3 if max_logits else 2]
    arrays, scopes = zip(*tables)
    execute, has_sink = executor(), attn_sink is not None
    options = {"max_logits": max_logits, "may_split": not max_logits}
    attend, combine = kernels.launches(layout, rows, heads, scopes, softmax_scale, has_sink, execute.device, **options)
    inputs = kernels.inputs(q, arrays, attn_sink)
    out, lse, *logits = execute(attend, inputs)
    if combine is not None:
        return tuple(execute(combine, (out, lse, inputs[-1])))
    return (out, lse, *logits) if max_logits else (out, lse)
