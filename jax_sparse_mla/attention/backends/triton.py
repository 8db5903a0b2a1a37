"""The portable GPU backend: the Triton kernel of `kernels/triton/sparse_mla/`, launched by jax-triton.

SM80 and up, FP8 and BF16 caches, any head count and any topk. How many programs share a row's keys is chosen from the
static shapes and the device's multiprocessors; lengths and indices stay data, so one compilation serves a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.attention.backend import IndexTable
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kernels.triton.sparse_mla import plan as planning
from jax_sparse_mla.kernels.triton.sparse_mla.kernel import combine_kernel, sparse_mla_kernel
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from jax_sparse_mla.kv_cache.layout import workspace_layout
from jax_sparse_mla.xla.triton_call import triton_call

_LOG2_E = 1.4426950408889634


@partial(jax.jit, static_argnames=("softmax_scale", "assume_valid_indices"))
def decode(
    q: jax.Array,  # [batch, q_len, heads, qk_dim]
    tables: Sequence[IndexTable],  # one or two
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    assume_valid_indices: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out bfloat16 `[batch, q_len, heads, v_dim]`, lse float32 `[batch, q_len, heads]`."""
    del assume_valid_indices  # every index is checked
    batch, q_len, heads, _ = q.shape
    layout = tables[0].cache.layout
    out, lse = _attend(q, [_table(*table) for table in tables], attn_sink, softmax_scale, layout, batch * q_len)
    return out.reshape(batch, q_len, heads, planning.V_DIM), lse.reshape(batch, q_len, heads)


@partial(jax.jit, static_argnames=("softmax_scale",))
def prefill(
    q: jax.Array,  # [q_len, heads, qk_dim]
    kv: jax.Array,  # [kv_len, qk_dim]
    indices: jax.Array,  # [q_len, topk] rows of kv
    topk_length: jax.Array | None,  # [q_len]; None scans all columns
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out bfloat16 `[q_len, heads, v_dim]`, max_logits and lse float32 `[q_len, heads]`."""
    q_len, _, qk_dim = q.shape
    layout = workspace_layout(qk_dim)
    table = (kv, indices, topk_length, kv.shape[0], 0)
    out, lse, max_logits = _attend(q, [table], attn_sink, softmax_scale, layout, q_len, max_logits=True)
    return out, max_logits, lse


def _table(cache: PagedKV, indices: jax.Array, lengths: jax.Array | None) -> tuple:
    return cache.data, indices, lengths, cache.num_slots, cache.page_size


def _attend(
    q: jax.Array,
    tables: list[tuple],  # bytes, indices, lengths or None, number of slots, page size (0: a workspace)
    attn_sink: jax.Array | None,
    softmax_scale: float,
    layout: KVLayout,
    rows: int,
    *,
    max_logits: bool = False,
) -> tuple[jax.Array, ...]:
    """out `[rows, heads, 512]`, lse `[rows, heads]` and, if asked for, max_logits."""
    heads = q.shape[-2]
    out_shape = jax.ShapeDtypeStruct((rows, heads, planning.V_DIM), jnp.bfloat16)
    lse_shape = jax.ShapeDtypeStruct((rows, heads), jnp.float32)
    # A table without columns or a cache without rows has nothing to read, and no pointer that one could pass.
    tables = [table for table in tables if table[0].size and table[1].size]
    if rows == 0 or heads == 0 or not tables:
        nothing = jnp.full((rows, heads), -jnp.inf, jnp.float32)
        return (jnp.zeros(out_shape.shape, out_shape.dtype), nothing, nothing)[: 3 if max_logits else 2]
    extra_topk = tables[1][1].shape[-1] if len(tables) > 1 else 0
    device = DeviceInfo.current()
    plan = planning.launch_plan(
        layout,
        rows=rows,
        num_heads=heads,
        topk=tables[0][1].shape[-1],
        extra_topk=extra_topk,
        has_sink=attn_sink is not None,
        capability=device.compute_capability,
        sm_count=device.sm_count,
        may_split=not max_logits,
    )
    sink = q if attn_sink is None else attn_sink
    split = plan.num_splits > 1
    if split:
        some_shapes = (
            jax.ShapeDtypeStruct((plan.num_splits, rows, heads, planning.V_DIM), jnp.float32),
            jax.ShapeDtypeStruct((plan.num_splits, rows, heads), jnp.float32),
        )
    else:
        some_shapes = (out_shape, lse_shape, lse_shape) if max_logits else (out_shape, lse_shape)
    arrays, scalars = [], []
    for data, indices, lengths, num_slots, _ in (tables[0], tables[-1]):
        # Without lengths or an extra table there is a pointer all the same, which is not read.
        arrays += (data, indices, indices if lengths is None else lengths)
        scalars += (int(lengths is not None), indices.shape[-1], num_slots)
    if not extra_topk:
        scalars[3:] = (0, 0, 0)
    results = triton_call(
        *(q, *arrays, sink, np.float32(softmax_scale * _LOG2_E), heads, *scalars),
        kernel=sparse_mla_kernel,
        out_shape=some_shapes,
        grid=plan.grid,
        name="sparse_mla",
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **plan.constexprs,
        **planning.page_constants(layout, tables[0][4], tables[-1][4]),
        **({} if max_logits else {"max_logits": None}),
    )
    if not split:
        return tuple(results)
    return tuple(
        triton_call(
            *(*results, sink, heads, plan.num_splits),
            kernel=combine_kernel,
            out_shape=(out_shape, lse_shape),
            grid=plan.combine_grid,
            name="sparse_mla_combine",
            **plan.combine_constexprs,
        )
    )
