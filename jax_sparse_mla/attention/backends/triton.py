"""The portable GPU backend: the Triton kernel of `attention/triton/`.

SM80 and up, FP8 and BF16 caches, FP4 ones beside FP8, any head count and any topk. How many programs share a row's keys
is chosen from the static shapes and the device's multiprocessors; lengths and indices stay data, so one compilation
serves a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

from jax_sparse_mla.attention.index_table import V_DIM, IndexTable, TableShape
from jax_sparse_mla.attention.triton import launch as kernels
from jax_sparse_mla.attention.triton.launch import CallShape
from jax_sparse_mla.kv_cache.layout import workspace_layout
from jax_sparse_mla.launch.triton_call import executor


@partial(jax.jit, static_argnames=("softmax_scale", "assume_valid_indices", "batch_invariant"))
def decode(
    q: jax.Array,  # [batch, q_len, heads, qk_dim]
    tables: Sequence[IndexTable],  # one or two
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    assume_valid_indices: bool = False,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out bfloat16 `[batch, q_len, heads, v_dim]`, lse float32 `[batch, q_len, heads]`."""
    del assume_valid_indices  # every index is checked
    batch, q_len, heads, _ = q.shape
    arrays, shapes = zip(*map(_table, tables))
    shape = CallShape(
        tables[0].cache.layout, batch * q_len, heads, shapes, softmax_scale, has_sink=attn_sink is not None
    )
    out, lse = _attend(q, arrays, attn_sink, shape, may_split=not batch_invariant)
    return out.reshape(batch, q_len, heads, V_DIM), lse.reshape(batch, q_len, heads)


@partial(jax.jit, static_argnames=("softmax_scale", "batch_invariant"))
def prefill(
    q: jax.Array,  # [q_len, heads, qk_dim]
    kv: jax.Array,  # [kv_len, qk_dim]
    indices: jax.Array,  # [q_len, topk] rows of kv
    topk_length: jax.Array | None,  # [q_len]; None scans all columns
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out bfloat16 `[q_len, heads, v_dim]`, max_logits and lse float32 `[q_len, heads]`."""
    del batch_invariant  # a row's result never depends on the others
    q_len, heads, qk_dim = q.shape
    table = TableShape(indices.shape[-1], int(topk_length is not None), kv.shape[0])
    shape = CallShape(workspace_layout(qk_dim), q_len, heads, (table,), softmax_scale, has_sink=attn_sink is not None)
    arrays = ((kv, indices, topk_length),)
    out, lse, max_logits = _attend(q, arrays, attn_sink, shape, may_split=False, max_logits=True)
    return out, max_logits, lse


def _table(table: IndexTable) -> tuple[tuple, TableShape]:
    """A table's arrays and its static shape."""
    cache, indices, lengths = table
    shape = TableShape(
        topk=indices.shape[-1],
        rows_per_length=int(lengths is not None),
        num_slots=cache.num_slots,
        page_size=cache.page_size,
        page_bytes=cache.layout.page_bytes(cache.page_size),
        first_page=cache.first_page,
        layout=cache.layout,
    )
    return (cache.data, indices, lengths, cache.tensor_scale), shape


def _attend(
    q: jax.Array,
    tables: Sequence[tuple],
    attn_sink: jax.Array | None,
    shape: CallShape,
    *,
    may_split: bool,
    max_logits: bool = False,
) -> list[jax.Array]:
    """out `[rows, heads, 512]`, lse `[rows, heads]` and, if asked for, max_logits."""
    execute, inputs = executor(), kernels.inputs(q, tables, attn_sink)
    attend, combine = kernels.launches(shape, execute.device, max_logits=max_logits, may_split=may_split)
    results = execute(attend, inputs)
    if combine is not None:
        return execute(combine, (*results[:2], inputs[-1]))
    return results if max_logits else results[:2]
