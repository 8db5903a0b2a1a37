"""The top-k kernels as a JAX function, through jax-triton. Arguments are checked by `jax_sparse_mla.indices.topk`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_sparse_mla.kernels_triton import topk as kernels
from jax_sparse_mla.kernels_triton.call import triton_call
from jax_sparse_mla.kernels_triton.launch_jax import compute_capability


def topk(
    logits: jax.Array,
    lengths: jax.Array,
    *,
    topk: int,
    row_starts: jax.Array | None = None,
    page_table: jax.Array | None = None,
    page_size: int = 1,
    row_to_request: jax.Array | None = None,
    offsets: jax.Array | None = None,
) -> jax.Array:
    """int32 `[rows, topk]`: positions; slots with a page table; rows of the concatenated KV with offsets."""
    rows, columns = logits.shape
    plan = kernels.plan_topk(rows, columns, topk)
    has_starts, has_requests = row_starts is not None, row_to_request is not None
    row = (logits, lengths, row_starts if has_starts else lengths)
    width = columns // plan.align
    candidates = (logits, lengths, lengths)  # not read
    if plan.filtered:
        candidates = _filter(row, width, plan, topk, has_starts)
    method = kernels.PAGED if page_table is not None else kernels.RAGGED if offsets is not None else kernels.POSITIONS
    return _call(
        *row,
        lengths if page_table is None else page_table,
        lengths if row_to_request is None else row_to_request,
        lengths if offsets is None else offsets,
        *candidates,
        width,
        *((0, 0) if page_table is None else page_table.shape),
        kernel=kernels.topk_select_kernel,
        out_shape=jax.ShapeDtypeStruct((rows, topk), jnp.int32),
        grid=(rows,),
        name="topk_select",
        **kernels.select_constants(plan, topk, method.value, page_size, has_starts, has_requests),
    )


def _filter(row, width, plan, topk, has_starts):
    """(candidates, their positions, how many)."""
    logits = row[0]
    rows = logits.shape[0]
    shared = (row[1], row[1])  # not read
    if plan.chunks > 1:
        shared = _call(
            *row,
            width,
            kernel=kernels.topk_threshold_kernel,
            out_shape=[
                jax.ShapeDtypeStruct((rows,), jnp.float32),
                jax.ShapeDtypeStruct((rows, plan.chunks), jnp.int32),
            ],
            grid=(rows,),
            name="topk_threshold",
            **kernels.threshold_constants(plan, topk, has_starts),
        )
    return _call(
        *row,
        width,
        *shared,
        kernel=kernels.topk_filter_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((rows, plan.tile), logits.dtype),
            jax.ShapeDtypeStruct((rows, plan.tile), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ],
        grid=(rows * plan.chunks,),
        name="topk_filter",
        **kernels.filter_constants(plan, topk, has_starts),
    )


def _call(*args, **kwargs):
    return triton_call(*args, compute_capability=compute_capability(), **kwargs)
