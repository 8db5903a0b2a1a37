"""Decode on SM90 by our own CUDA kernels, `kernels_cuda/sparse_decode/`: FP8 and bfloat16 caches, FP4 ones beside FP8
ones, any head count, any topk.

They are called through TVM FFI: XLA gives them results and scratch, and may record them in a command buffer. The
launch is planned from static shapes; lengths and indices stay data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse_mla.attention.backend import IndexTable
from jax_sparse_mla.attention.hopper.decode_plan import NO_CACHE, V_DIM, cache_numbers, decode_format, decode_plan
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.launch import build, tvm
from jax_sparse_mla.launch.tvm import Buffer, pages_of


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
    shapes = (
        jax.ShapeDtypeStruct((batch, q_len, heads, V_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
    )
    plan = decode_plan(
        batch * q_len,
        heads,
        tuple(table.indices.shape[-1] for table in tables),
        has_lengths=any(table.lengths is not None for table in tables),
        sm_count=DeviceInfo.current().sm_count,
        batch_invariant=batch_invariant,
    )
    operands: list[jax.Array] = []

    def operand(x: PagedKV | jax.Array | None) -> Buffer | None:
        if x is None:
            return None
        operands.append(x.data if isinstance(x, PagedKV) else x)
        return pages_of(x, len(operands) - 1) if isinstance(x, PagedKV) else Buffer(len(operands) - 1)

    q_buffer = operand(q)
    kernel_format = decode_format(table.cache.layout for table in tables)
    alone = tables[0].cache.layout.extra_only  # what the kernel reads as second cache
    tables = [*[(None, None, None)] * alone, *tables, (None, None, None)][:2]
    buffers = [operand(x) for table in tables for x in table]
    sink = operand(attn_sink)
    pages = [x for cache, *_ in tables for x in _pages(cache)]
    results = shapes
    if plan.scratch_bytes:
        results += (jax.ShapeDtypeStruct((plan.scratch_bytes,), jnp.uint8),)
    places = [Buffer(len(operands) + i) for i in range(len(results))] + [None] * (3 - len(results))
    numbers = (kernel_format, *pages, softmax_scale, float("-inf"), plan.tile, plan.groups, plan.cuts)
    arguments = (q_buffer, *buffers, sink, *numbers, *places)
    out, lse, *_ = tvm.call(build.sparse_decode_module, "sparse_decode", arguments, results, *operands)
    return out, lse


def _pages(cache: PagedKV | None) -> tuple[int, ...]:
    if cache is None:
        return NO_CACHE
    return cache_numbers(cache.layout, cache.num_slots, cache.page_size, cache.data.shape[1])
