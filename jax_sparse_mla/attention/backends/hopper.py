"""Our own kernels for SM90: FP8 and bfloat16 caches, FP4 ones beside FP8, any head count, any topk.

Decode is CUDA C++ (`kernels_cuda/sparse_decode/`), called through TVM FFI: XLA gives the kernel results and scratch,
and may record it in a command buffer. Prefill is Pallas Mosaic GPU (`attention/hopper/prefill/`,
docs/internals/kernels-prefill.md): one kernel for few heads, one for any number. JAX compiles it with the program,
which so needs no torch, lowers on a machine without a GPU, exports through `jax.export` (the call is on its list of
stable ones), and shards under `shard_map`. Launches are planned from static shapes; lengths and indices are data, so
one compilation serves a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.hopper.decode_plan import NO_CACHE, cache_numbers, decode_format, decode_plan
from jax_sparse_mla.attention.index_table import V_DIM, IndexTable
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.launch import build, tvm
from jax_sparse_mla.launch.tvm import Buffer, pages_of

_DECODE = build.Binary(*BACKENDS["hopper"].binaries["decode"])
_H200_SM_COUNT = 132  # what a prefill is made for where there is no GPU; it is right on any other, too


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
    outputs = [Buffer(len(operands) + i) for i in range(len(results))] + [None] * (3 - len(results))
    numbers = (kernel_format, *pages, softmax_scale, float("-inf"), plan.tile, plan.groups, plan.cuts)
    arguments = (q_buffer, *buffers, sink, *numbers, *outputs)
    out, lse, *_ = tvm.call(_DECODE, "sparse_decode", arguments, results, *operands)
    return out, lse


def _pages(cache: PagedKV | None) -> tuple[int, ...]:
    if cache is None:
        return NO_CACHE
    return cache_numbers(cache.layout, cache.num_slots, cache.page_size, cache.data.shape[1])


@partial(jax.jit, static_argnames=("softmax_scale", "batch_invariant"))
def prefill(
    q: jax.Array,  # [q_len, heads, qk_dim], qk_dim 512 or 576
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
    from jax_sparse_mla.attention.hopper.prefill.few_heads.kernel import serves, sparse_prefill_few_heads
    from jax_sparse_mla.attention.hopper.prefill.kernel import sparse_prefill

    sm_count = DeviceInfo.current().sm_count or _H200_SM_COUNT
    attend = sparse_prefill_few_heads if serves(*q.shape[1:]) else sparse_prefill
    return attend(q, kv, indices, topk_length, attn_sink, softmax_scale=softmax_scale, sm_count=sm_count)
