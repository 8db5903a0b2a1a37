"""The indexer's and the compressor's Triton kernels as JAX functions, through jax-triton; as `launch_jax`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jax import lax

from jax_sparse_mla.attention.route import DeviceInfo
from jax_sparse_mla.kernels.triton import compressor as compressor_kernels
from jax_sparse_mla.kernels.triton import indexer as kernels
from jax_sparse_mla.xla.triton_call import triton_call


def quantize_index_q(q: jax.Array, *, hadamard: bool) -> tuple[jax.Array, jax.Array]:
    """(float8_e4m3fn, shaped as q; float32 scales), for a last axis of 128."""
    lines = q.size // q.shape[-1]
    # Triton has no pointers to e4m3 numbers where the GPU does not compute with them.
    dtype = jnp.float8_e4m3fn if _hardware_fp8() else jnp.uint8
    values, scale = triton_call(
        q,
        lines,
        kernel=kernels.quantize_index_q_kernel,
        out_shape=(jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)),
        grid=(kernels.quantize_programs(lines, DeviceInfo.current().sm_count),),
        name="quantize_index_q",
        HADAMARD=hadamard,
        HARDWARE_FP8=_hardware_fp8(),
        **kernels.QUANTIZE_OPTIONS,
    )
    return values if _hardware_fp8() else lax.bitcast_convert_type(values, jnp.float8_e4m3fn), scale


def write_index_k(index_cache: jax.Array, slots: jax.Array, k: jax.Array, *, hadamard: bool) -> jax.Array:
    """uint8 `[num_pages, page_size * 132]` with the keys written."""
    n, (num_pages, page_bytes) = slots.shape[0], index_cache.shape
    return triton_call(
        slots,
        k,
        index_cache,
        n,
        num_pages,
        kernel=kernels.write_index_k_kernel,
        out_shape=jax.ShapeDtypeStruct(index_cache.shape, index_cache.dtype),
        input_output_aliases={2: 0},
        grid=(triton.cdiv(n, kernels.WRITE_OPTIONS["TOKENS"]),),
        name="write_index_k",
        PAGE_SIZE=page_bytes // kernels.TOKEN_BYTES,
        HADAMARD=hadamard,
        HARDWARE_FP8=_hardware_fp8(),
        **kernels.WRITE_OPTIONS,
    )


def index_logits(
    q: jax.Array, weights: jax.Array, index_cache: jax.Array, page_table: jax.Array, lengths: jax.Array
) -> jax.Array:
    """float32 `[rows, capacity]`, for float8_e4m3fn q."""
    (rows, heads, _), (num_pages, page_bytes) = q.shape, index_cache.shape
    pages, page_size = page_table.shape[1], page_bytes // kernels.TOKEN_BYTES
    plan = kernels.plan_logits(rows, heads, pages, page_size, DeviceInfo.current().sm_count)
    if not _hardware_fp8():
        q = lax.bitcast_convert_type(q, jnp.uint8)
    return triton_call(
        q,
        weights,
        index_cache,
        page_table,
        lengths,
        rows,
        num_pages,
        kernel=plan.kernel,
        out_shape=jax.ShapeDtypeStruct((rows, pages * page_size), jnp.float32),
        grid=(plan.programs,),
        name="index_logits",
        capacity=pages * page_size,
        HARDWARE_FP8=_hardware_fp8(),
        **plan.constants,
    )


def compress(
    state_kv: jax.Array,
    state_score: jax.Array,
    kv: jax.Array,
    score: jax.Array,
    positions: jax.Array,
    req_rows: jax.Array,
    query_start_loc: jax.Array,
    ape: jax.Array,
    norm_weight: jax.Array,
    inv_freq: jax.Array,
    *,
    ratio: int,
    norm_eps: float,
    num_entries: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(entries, rows, state_kv, state_score), as `jax_sparse_mla.compress_kv`."""
    num_rows, num_requests = positions.shape[0], query_start_loc.shape[0] - 1
    (max_requests, ring, _), head_dim = state_kv.shape, norm_weight.shape[0]
    pool = compressor_kernels.pool_constants(ratio, head_dim, ring, num_rows)
    rows_shape = jax.ShapeDtypeStruct((num_entries,), jnp.int32)
    found = positions
    if not pool["ROWS_POW2"]:
        found = triton_call(
            *(positions, req_rows, query_start_loc, num_rows, num_requests, num_entries, max_requests),
            kernel=compressor_kernels.find_rows_kernel,
            out_shape=rows_shape,
            grid=(1,),
            name="compress_find_rows",
            RATIO=ratio,
            **compressor_kernels.FIND_OPTIONS,
        )
    pooled, rows = triton_call(
        *(kv, score, state_kv, state_score, positions, req_rows, query_start_loc, ape, found),
        *(num_rows, num_requests, max_requests),
        kernel=compressor_kernels.pool_kernel,
        out_shape=(jax.ShapeDtypeStruct((num_entries, head_dim), jnp.float32), rows_shape),
        grid=(num_entries * triton.cdiv(head_dim, compressor_kernels.CHANNELS),),
        name="compress_pool",
        **pool,
    )
    # It reads what the pooling made, so XLA sees that the pooling has read the state before it is written.
    state_kv, state_score, entries = triton_call(
        *(kv, score, positions, req_rows, query_start_loc, norm_weight, inv_freq, pooled, rows, state_kv, state_score),
        *(np.float32(norm_eps), num_rows, num_requests, max_requests),
        kernel=compressor_kernels.finish_kernel,
        out_shape=(
            *[jax.ShapeDtypeStruct(state_kv.shape, jnp.float32)] * 2,
            jax.ShapeDtypeStruct((num_entries, head_dim), jnp.bfloat16),
        ),
        input_output_aliases={9: 0, 10: 1},
        grid=(num_rows + num_entries,),
        name="compress_finish",
        **compressor_kernels.finish_constants(ratio, head_dim, 2 * inv_freq.shape[0], ring),
    )
    return entries, rows, state_kv, state_score


def _hardware_fp8() -> bool:
    return DeviceInfo.current().compute_capability >= (8, 9)
