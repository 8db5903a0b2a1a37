"""The metadata kernels as JAX functions, through jax-triton; arguments are checked by the functions that dispatch here.

Sizes are not zero: what has none stays plain JAX.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton

from jax_sparse_mla.kernels.triton.launch_jax import compute_capability
from jax_sparse_mla.kernels.triton.metadata import schedules
from jax_sparse_mla.kernels.triton.metadata import v4 as kernels
from jax_sparse_mla.metadata.batch import ForwardBatch, RequestTables
from jax_sparse_mla.metadata.v4 import V4Metadata
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.xla.triton_call import triton_call


def _call(*args, **kwargs):
    return triton_call(*args, compute_capability=compute_capability(), **kwargs)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def flashmla_schedule(
    topk_length: jax.Array, extra_topk_length: jax.Array, *, topk: int, extra_topk: int, num_sm_parts: int
) -> tuple[jax.Array, jax.Array]:
    """As `jax_sparse_mla.metadata.schedules.flashmla_schedule_reference`."""
    batch = topk_length.shape[0]
    return tuple(
        _call(
            topk_length,
            extra_topk_length,
            batch,
            kernel=schedules.flashmla_kernel,
            out_shape=[_int32(num_sm_parts, 8), _int32(batch + 1)],
            grid=(1,),
            name="flashmla_schedule",
            **schedules.flashmla_constants(topk, extra_topk, batch, num_sm_parts),
        )
    )


def paged_mqa_schedule(context_lens: jax.Array, *, num_sms: int, split_kv: int) -> jax.Array:
    """As `jax_sparse_mla.paged_mqa_schedule`."""
    num_rows = context_lens.shape[0]
    return _call(
        context_lens,
        num_rows,
        kernel=schedules.paged_mqa_kernel,
        out_shape=_int32(num_sms + 1, 2),
        grid=(1,),
        name="paged_mqa_schedule",
        num_warps=schedules.paged_mqa_warps(num_rows),
        **schedules.paged_mqa_constants(num_rows, num_sms, split_kv),
    )


def swa_gather_plan(
    seq_lens, extend_lens, req_rows, req_to_token, full_to_swa, *, window: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `jax_sparse_mla.swa_gather_plan`, in two launches."""
    requests = seq_lens.shape[0]
    first_pos, gather_lens, offsets = _call(
        seq_lens,
        extend_lens,
        requests,
        kernel=kernels.gather_lens_kernel,
        out_shape=[_int32(requests), _int32(requests), _int32(requests + 1)],
        grid=(1,),
        name="gather_lens",
        WINDOW=window,
        **kernels.request_options(requests),
    )
    slots = _call(
        first_pos,
        offsets,
        req_rows,
        req_to_token,
        full_to_swa,
        requests,
        *req_to_token.shape,
        full_to_swa.shape[0],
        capacity,
        kernel=kernels.gather_slots_kernel,
        out_shape=_int32(capacity),
        grid=(triton.cdiv(capacity, kernels.GATHER_OPTIONS["COLUMNS"]),),
        name="gather_slots",
        SEARCH_STEPS=requests.bit_length(),
        **kernels.GATHER_OPTIONS,
    )
    return slots, first_pos, gather_lens, offsets


def v4_metadata(spec: ModelSpec, batch: ForwardBatch, tables: RequestTables, tokens: int) -> V4Metadata:
    """As `jax_sparse_mla.build_v4_metadata` of a model that `has_v4_kernel`; `tokens` is the step's bucket."""
    requests, rows = batch.seq_lens.shape[0], batch.out_cache_loc.shape[0]
    constants = kernels.v4_constants(spec, batch.mode, batch.num_draft_tokens, requests, tokens)
    shapes = [_int32(*shape) for shape in kernels.v4_shapes(constants, requests, rows)]
    shapes[kernels.OVERFLOW] = jax.ShapeDtypeStruct((), jnp.bool_)
    extend_lens = starts = batch.seq_lens  # not read
    if constants["ROWS_EACH"] == 0:
        extend_lens = batch.extend_lens
        starts = _call(
            extend_lens,
            requests,
            kernel=kernels.row_starts_kernel,
            out_shape=_int32(requests + 1),
            grid=(1,),
            name="row_starts",
            **kernels.request_options(requests),
        )
    outputs = _call(
        batch.req_pool_indices,
        batch.seq_lens,
        extend_lens,
        starts,
        batch.out_cache_loc,
        tables.req_to_token,
        tables.full_to_swa,
        requests,
        rows,
        tokens,
        *tables.req_to_token.shape,
        tables.full_to_swa.shape[0],
        kernel=kernels.v4_metadata_kernel,
        out_shape=shapes,
        grid=kernels.v4_grid(constants, rows),
        name="v4_metadata",
        **kernels.v4_absent_outputs(constants),
        **constants,
    )
    return kernels.v4_metadata(outputs, constants)
