"""FlashInfer's sparse MLA of SM120 and SM121: decode of the FP8 caches, V4's two caches in one call.

Compiled and checked against its planner and its argument checks; not run, for want of such a GPU. It has no prefill
over a bf16 workspace: the router says so.

FlashInfer's lse is base 2 and includes the sink, from which the lse without it cannot be had back where the sink is
the larger: so it gets no sink, and `apply_attn_sink` follows. It skips negative indices and clips lengths, but trusts
every other index: those outside the cache become −1 first. Scratch belongs to the call, so that XLA gives every layer
the same memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla import packages
from jax_sparse_mla.attention.index_table import V_DIM, IndexTable
from jax_sparse_mla.attention.merge import apply_attn_sink, merge_attention
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from jax_sparse_mla.launch import tvm
from jax_sparse_mla.launch.tvm import Buffer, pages_of

_CHUNK = 64  # index columns of one split
_DECODE_ROWS = 64  # more rows go to the prefill entry, which reads the same caches without scratch
_HEADS = (8, 16, 32, 64, 128)  # what the prefill entry is compiled for; decode takes any number up to 128
_NO_KEY = -1e29  # lse below this: no valid key (kernels write −inf or −1e30)
_MODELS = {KVLayout.V32_FP8: 0, KVLayout.V4_FP8: 1}  # FlashInfer's DSV3_2 and DSV4
_SINGLE_GROUP, _MULTI_GROUP, _TWO_CACHES, _SWAPPED = 1, 2, 3, 4  # its prefill kernels
_OLDEST = (0, 7)


def unready(phase: str, framework: str) -> str | None:
    """Why FlashInfer's entries cannot be called as they are here; its kernels are built at the first call."""
    version = packages.version("flashinfer-python")
    if (numbers := re.match(r"(\d+)\.(\d+)", version or "")) is None:
        return f"flashinfer is found, but the version of flashinfer-python is {version}: install 0.7 or newer"
    if tuple(map(int, numbers.groups())) < _OLDEST:
        return f"flashinfer-python {version} is too old: install 0.7 or newer"
    return None


def _with_lengths(table: IndexTable) -> IndexTable:
    rows, columns = table.indices.shape
    return table if table.lengths is not None else table._replace(lengths=jnp.full(rows, columns, jnp.int32))


@functools.partial(jax.jit, static_argnames=("softmax_scale", "assume_valid_indices", "batch_invariant"))
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
    del assume_valid_indices, batch_invariant  # every index is checked; its record refuses batch-invariant calls
    batch, q_len, heads, qk_dim = q.shape
    q = q.reshape(batch * q_len, heads, qk_dim)
    tables = [_with_lengths(table.rows()) for table in tables]
    # Only V4's kernels read two caches.
    calls = [tables] if tables[0].cache.layout == KVLayout.V4_FP8 else [[table] for table in tables]
    parts = [_attend(q, call, softmax_scale) for call in calls]
    out, lse = parts[0] if len(parts) == 1 else merge_attention(*zip(*parts))
    if attn_sink is not None:
        out = apply_attn_sink(out, lse, attn_sink)
    return out.reshape(batch, q_len, heads, V_DIM), lse.reshape(batch, q_len, heads)


def _attend(q: jax.Array, tables: list[IndexTable], scale: float) -> tuple[jax.Array, jax.Array]:
    """out bfloat16 `[rows, heads, 512]` and lse float32 `[rows, heads]` by one call, without a sink."""
    rows, heads, _ = q.shape
    layout, decodes = tables[0].cache.layout, rows <= _DECODE_ROWS
    kernel_heads = heads if decodes else next(n for n in _HEADS if n >= heads)
    q = jnp.pad(q, ((0, 0), (0, kernel_heads - heads), (0, 0)))
    if not decodes:  # the prefill entry reads whole chunks of the first table
        padding = -tables[0].indices.shape[1] % _CHUNK
        indices = jnp.pad(tables[0].indices, ((0, 0), (0, padding)), constant_values=-1)
        tables[0] = tables[0]._replace(indices=indices)

    operands = [q]
    for cache, indices, lengths in tables:
        valid = (indices >= 0) & (indices < cache.num_slots)
        operands += [cache.data, jnp.where(valid, indices, -1), lengths]
    splits = sum(-(-table.indices.shape[1] // _CHUNK) for table in tables)
    results = [
        jax.ShapeDtypeStruct((rows, kernel_heads, V_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, kernel_heads), jnp.float32),
    ]
    if decodes:
        partial = (rows, scratch_heads(kernel_heads), splits)
        results += [
            jax.ShapeDtypeStruct((*partial, V_DIM), jnp.bfloat16),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ]
    caches = [table.cache for table in tables]
    function, arguments = _call(layout, caches, kernel_heads, decodes, splits, scale)
    out, lse, *_ = tvm.call(_module, function, arguments, results, *operands)
    out, lse = out[:, :heads], lse[:, :heads]
    no_key = lse <= _NO_KEY
    return jnp.where(no_key[..., None], 0, out), jnp.where(no_key, -jnp.inf, lse * math.log(2))


def scratch_heads(heads: int) -> int:
    """Heads that decode's scratch has room for: 16 at a time, but 8 if there are 8."""
    return 8 if heads == 8 else -(-heads // 16) * 16


def _call(
    layout: KVLayout, caches: list[PagedKV], heads: int, decodes: bool, splits: int, scale: float
) -> tuple[str, tuple]:
    """The entry, and its arguments in its order: operands are q and three per cache, then come the results."""
    tables = [
        (pages_of(cache, 1 + 3 * i, cache.page_size, layout.bytes_per_token), Buffer(2 + 3 * i), Buffer(3 + 3 * i))
        for i, cache in enumerate(caches)
    ]
    first_result = 1 + 3 * len(tables)
    out, lse, mid_out, mid_lse = (Buffer(first_result + i) for i in range(4))
    (cache, indices, lengths), extra = tables[0], tables[1] if len(tables) == 2 else (None, None, None)
    inputs, sink, model = (Buffer(0), cache, indices), None, _MODELS[layout]
    if not decodes:
        # q, kv_cache, indices, output, out_lse, sm_scale, model_type, variant, topk_length, attn_sink,
        # extra_kv_cache, extra_indices, extra_topk_length, extra_fp4
        variant = _prefill_kernel(layout, len(tables), heads)
        arguments = (*inputs, out, lse, scale, model, variant, lengths, sink, *extra, False)
        return "sparse_mla_sm120_paged_attention", arguments
    # q, kv_cache, indices, mid_out, mid_lse, output, out_lse, num_splits, sm_scale, topk_length, attn_sink, …
    arguments = (*inputs, mid_out, mid_lse, out, lse, splits, scale, lengths, sink)
    chunks_per_block, lse_scale = -1, 1.0  # its own choice; base 2
    if layout == KVLayout.V32_FP8:
        # …, model_type, chunks_per_block, lse_scale
        return "sparse_mla_sm120_decode_dsv3_2", (*arguments, model, chunks_per_block, lse_scale)
    # …, extra_kv_cache, extra_indices, extra_topk_length, model_type, chunks_per_block, extra_fp4, lse_scale
    return "sparse_mla_sm120_decode_dsv4", (*arguments, *extra, model, chunks_per_block, False, lse_scale)


def _prefill_kernel(layout: KVLayout, caches: int, heads: int) -> int:
    if layout == KVLayout.V4_FP8:
        return _TWO_CACHES if caches == 2 else _MULTI_GROUP
    if heads >= 64:
        return _SWAPPED
    return _MULTI_GROUP if heads == 32 else _SINGLE_GROUP


@functools.cache
def _module() -> Any:
    from flashinfer.jit.mla import gen_sparse_mla_sm120_module

    return gen_sparse_mla_sm120_module().build_and_load()
