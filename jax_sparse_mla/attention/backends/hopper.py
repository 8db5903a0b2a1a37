"""Our own kernels for SM90: FP8 and bfloat16 caches, FP4 ones beside FP8, any head count, any topk.

Decode is CUDA C++ (`kernels_cuda/sparse_decode/`), called through TVM FFI: XLA gives the kernel results and scratch,
and may record it in a command buffer. Prefill is Pallas Mosaic GPU (`attention/hopper/prefill/`,
docs/internals/kernels-prefill.md): one kernel for few heads, one for any number. A serving engine's programs call the
one that is compiled ahead (`alone.py`). Elsewhere JAX compiles it with the program, which so needs no torch, lowers on
a machine without a GPU, exports through `jax.export` (the call is on its list of stable ones), and shards under
`shard_map`. Launches are planned from static shapes; lengths and indices are data, so one compilation serves a bucket.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.hopper.decode_plan import NO_CACHE, cache_numbers, decode_format, decode_plan
from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.attention.index_table import V_DIM
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.launch import build, tvm
from jax_sparse_mla.launch.transforms import ENGINE_PROGRAM, batched_as
from jax_sparse_mla.launch.tvm import Buffer, pages_of

_DECODE = build.Binary(*BACKENDS["hopper"].binaries["decode"])
_H200_SM_COUNT = 132  # what a prefill is made for where there is no GPU; it is right on any other, too


@partial(jax.jit, static_argnames=("softmax_scale", "assume_valid_indices", "batch_invariant"))
def decode(q, tables, attn_sink, *, softmax_scale, assume_valid_indices=False, batch_invariant=False):
    """As `reference.decode`; out is bfloat16."""
    del assume_valid_indices  # every index is checked
    batch, q_len, heads, _ = q.shape
    shapes = (
        jax.ShapeDtypeStruct((batch, q_len, heads, V_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
    )
    topks, has_lengths = tuple(table.indices.shape[-1] for table in tables), any(x.lengths is not None for x in tables)
    sizes, sm_count = (batch * q_len, heads, topks), DeviceInfo.current().sm_count
    kernel_format = decode_format(table.cache.layout for table in tables)
    how = {"has_lengths": has_lengths, "kernel_format": kernel_format, "batch_invariant": batch_invariant}
    plan = decode_plan(*sizes, sm_count=sm_count, **how)
    operands: list[jax.Array] = []

    def operand(x: PagedKV | jax.Array | None) -> Buffer | None:
        if x is None:
            return None
        operands.append(x.data if isinstance(x, PagedKV) else x)
        return pages_of(x, len(operands) - 1) if isinstance(x, PagedKV) else Buffer(len(operands) - 1)

    q_buffer = operand(q)
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


def prefill(q, kv, indices, topk_length, attn_sink, *, softmax_scale, batch_invariant=False):
    """As `reference.prefill`; out is bfloat16."""
    del batch_invariant  # a row's result never depends on the others
    kernel = alone.kernel_for_xla(*q.shape[1:]) if ENGINE_PROGRAM.value else None  # compiled ahead
    return _prefill(q, kv, indices, topk_length, attn_sink, softmax_scale=softmax_scale, kernel=kernel)


@partial(jax.jit, static_argnames=("softmax_scale", "kernel"))
def _prefill(*arrays, softmax_scale, kernel):
    """By a kernel that is compiled, or, also under `vmap`, by one that XLA compiles."""
    sizes = {"softmax_scale": softmax_scale, "sm_count": DeviceInfo.current().sm_count or _H200_SM_COUNT}
    if kernel is not None:
        return batched_as(partial(alone.launch, kernel, **sizes), partial(_by_xla, **sizes))(*arrays)
    return _by_xla(*arrays, **sizes)


def _by_xla(*arrays, **sizes):
    from jax_sparse_mla.attention.hopper.prefill.few_heads.kernel import serves, sparse_prefill_few_heads
    from jax_sparse_mla.attention.hopper.prefill.kernel import sparse_prefill

    attend = sparse_prefill_few_heads if serves(*arrays[0].shape[1:]) else sparse_prefill
    return attend(*arrays, **sizes)
