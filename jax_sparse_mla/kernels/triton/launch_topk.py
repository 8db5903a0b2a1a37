"""The top-k kernels as JAX functions: the CUDA one, and Triton's through jax-triton.

Arguments are checked by `jax_sparse_mla.indices.topk`, whose records name these functions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla.kernels import build
from jax_sparse_mla.kernels.triton import topk as kernels
from jax_sparse_mla.kernels.triton.launch_jax import compute_capability
from jax_sparse_mla.xla import tvm
from jax_sparse_mla.xla.triton_call import triton_call


def topk_triton(
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


@functools.cache
def _cuda_module():
    return build.topk_module(divmod(compute_capability(), 10))


def topk_cuda(
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
    """As `topk_triton`."""
    operands = [logits, lengths]
    arguments = [tvm.Buffer(0), tvm.Buffer(1)]
    for x in (row_starts, page_table, row_to_request, offsets):
        arguments.append(None if x is None else tvm.Buffer(len(operands)))
        operands += [] if x is None else [x]
    arguments += [page_size, tvm.Buffer(len(operands))]
    out = jax.ShapeDtypeStruct((logits.shape[0], topk), jnp.int32)
    return tvm.call(_cuda_module, "topk", arguments, [out], *operands)[0]


def _filter(row, width, plan, topk, has_starts):
    """(candidates, their positions, how many)."""
    logits = row[0]
    rows = logits.shape[0]
    shared = (row[1], row[1])  # not read
    if plan.chunks > 1:
        shared = _call(
            *row,
            width,
            plan.chunks,
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
        plan.chunks,
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
