"""The first part of a V4 or V4.1 layer: it writes the layer's caches and quantises V4's index queries.

All of it depends on the step's inputs alone. For V4's kinds of layers one kernel does it on a GPU, `layers/triton.py`;
the composition of the library's functions below defines the result. The functions around the kernel take arrays of JAX
and tensors of torch, whose executor launches it in place (`sparse_mla_torch.layers`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.attention import own_slots
from jax_sparse_mla.compressor.api import compress_kv
from jax_sparse_mla.compressor.state import CompressorState, compressor_window
from jax_sparse_mla.indexer.logits import (
    INDEX_DIM,
    IndexKeys,
    quantize_index_q,
    sylvester,
    write_index_k,
    write_transformed_index_k,
)
from jax_sparse_mla.indices.ownership import AxisName
from jax_sparse_mla.kv_cache import KVLayout, write_kv
from jax_sparse_mla.kv_cache.quantize import decode_rows, encode_rows
from jax_sparse_mla.launch.describe import Executor
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import executor
from jax_sparse_mla.layers.state import CompressorParams, IndexKeyParams, LayerStep, V4LayerCache, V4LayerParams, V4Rows
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.models import LayerKind, ModelSpec
from jax_sparse_mla.rope import rope_interleaved, round_to_bfloat16

# A long chunk fills the GPU with each task alone, and programs of one task hold fewer registers.
MAX_ROWS = 1024


class Written(NamedTuple):
    """The layer's caches with the step's rows in them, and the inputs of its selection and its attention."""

    cache: V4LayerCache
    attn_sink: jax.Array  # float32 `[heads]` of this layer
    # Float8_e4m3fn `[T, index_heads, 128]`, and float32 `[T, index_heads]` with its scales multiplied in; None where no
    # compressor makes index keys.
    index_q: jax.Array | None = None
    index_weights: jax.Array | None = None


class Step(NamedTuple):
    """The arrays of a step that the writes read: int32 `[T]`, query_start_loc `[B + 1]`; of JAX, or of torch for its
    executor.

    `entry_slots` are read where a row completes an entry; None where the layer compresses nothing.
    """

    positions: jax.Array
    req_rows: jax.Array
    query_start_loc: jax.Array
    swa_slots: jax.Array
    entry_slots: jax.Array | None = None


def step_of(step: LayerStep, kind: LayerKind) -> Step:
    """The arrays of a step that the writes of a layer of this kind read, of JAX or torch."""
    batch, metadata, _ = step
    req_rows = batch.req_pool_indices
    if batch.mode is not ForwardMode.DECODE:  # there each request is a row
        req_rows = req_rows[metadata.row_to_request]
    return Step(
        positions=metadata.positions,
        req_rows=req_rows,
        query_start_loc=metadata.query_start_loc,
        swa_slots=metadata.swa_out_cache_loc,
        entry_slots=metadata.compressed[kind.ratio].out_loc if kind.owns_kv else None,
    )


def rows_each(step: LayerStep) -> int:
    """The most rows that one request may have in the step."""
    batch = step.batch
    return batch.out_cache_loc.shape[0] if batch.mode is ForwardMode.EXTEND else batch.num_draft_tokens or 1


def write_layer(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    step: LayerStep,
    *,
    spec: ModelSpec,
    kind: LayerKind,
    pages_axis: AxisName | None = None,
) -> Written:
    """Writes the window's rows and the entries that the compressors complete; arguments as of `v4_layer`."""
    read, most = step_of(step, kind), rows_each(step)
    if pages_axis is not None and kind.owns_kv:
        read = read._replace(entry_slots=own_slots(read.entry_slots, cache.compressed, pages_axis))
    by_kernel = all(each.index_keys != "entries" for each in spec.kinds)  # it was not written for any layer of V4.1
    written = _write(
        *(cache, rows, params, read), kind=kind, rows_each=most, fp4_rows=spec.fp4_rows, by_kernel=by_kernel
    )
    # A kernel has no gradient; what attention takes of a single layer's parameters has.
    return written._replace(attn_sink=params.attn_sink) if params.num_layers == 1 else written


@partial(jax.jit, static_argnames=("kind", "rows_each", "fp4_rows", "by_kernel"))
def _write(cache, rows, params, step, *, kind, rows_each, fp4_rows, by_kernel):
    plain = partial(write_layer_reference, kind=kind, fp4_rows=fp4_rows)
    arguments = cache, rows, params, step
    few = by_kernel and rows.kv.shape[0] <= MAX_ROWS
    if not few or kernel_obstacle(*arguments, kind=kind, rows_each=rows_each):
        return plain(*arguments)

    def kernel(*arguments):
        signs = jnp.asarray(sylvester(INDEX_DIM), jnp.bfloat16)
        return write_by_kernel(executor(), signs, *arguments, kind=kind)

    return dispatch(kernel, plain, *arguments)


def write_layer_reference(
    cache: V4LayerCache, rows: V4Rows, params: V4LayerParams, step: Step, *, kind: LayerKind, fp4_rows: bool = False
) -> Written:
    """`write_layer` by the library's functions one after the other."""
    swa, sink = write_kv(cache.swa, step.swa_slots, rows.kv), params.share_of(params.attn_sink)
    if not kind.owns_kv:
        return Written(V4LayerCache(swa=swa), sink)
    keys_of_entries = kind.index_keys == "entries"
    entries, entry_rows, state = compress(
        cache.state, rows.compressed_kv, rows.compressed_score, params.compressor, step, kind, rope=not keys_of_entries
    )
    slots, index_k = slots_of_entries(step, entry_rows), None
    if keys_of_entries:
        inv_freq = params.compressor.alone().inv_freq
        first = step.positions[jnp.maximum(entry_rows, 0)] - (kind.ratio - 1)  # an entry stands at its first token
        keys = _keys_of_entries(entries, first, inv_freq, params.index_keys.alone())
        entries = rope_interleaved(entries, first, inv_freq)
        entries = _rounded_to_fp4(entries) if fp4_rows else entries
        index_k = write_index_k(cache.index_k, slots, keys)
    compressed = write_kv(cache.compressed, slots, entries)
    if kind.index_keys != "compressor":
        return Written(V4LayerCache(swa=swa, compressed=compressed, state=state, index_k=index_k), sink)
    index = rows.index
    keys, key_rows, index_state = compress(
        cache.index_state, index.kv, index.score, params.index_compressor, step, kind
    )
    index_k = write_transformed_index_k(cache.index_k, slots_of_entries(step, key_rows), keys)
    index_q, q_scale = quantize_index_q(index.q, hadamard=True)
    cache = V4LayerCache(swa=swa, compressed=compressed, state=state, index_k=index_k, index_state=index_state)
    return Written(cache, sink, index_q, index.weights * q_scale)


def _rounded_to_fp4(rows: jax.Array) -> jax.Array:
    """bfloat16 rows as a cache of FP4 rows gives them back."""
    read_back = decode_rows(KVLayout.V41_FP4, *encode_rows(KVLayout.V41_FP4, rows))
    return lax.bitcast_convert_type(read_back, jnp.bfloat16)


def _keys_of_entries(
    latents: jax.Array, positions: jax.Array, inv_freq: jax.Array, params: IndexKeyParams
) -> jax.Array:
    """float32 `[n, 128]` of compressed rows before rope: each step is rounded to bfloat16, as the published model's."""
    dtype = jnp.promote_types(latents.dtype, params.wk.dtype)
    k = jnp.einsum(
        "nd,kd->nk",
        latents.astype(dtype),
        params.wk.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    k = round_to_bfloat16(k)
    k = k * lax.rsqrt(jnp.mean(k * k, axis=-1, keepdims=True) + params.norm_eps)
    k = round_to_bfloat16(params.norm_weight.astype(jnp.float32) * k)
    return round_to_bfloat16(rope_interleaved(k, positions, inv_freq))


def compress(
    state: CompressorState | None,
    kv: jax.Array,
    score: jax.Array | None,
    params: CompressorParams,
    step: Step,
    kind: LayerKind,
    *,
    rope: bool = True,
) -> tuple[jax.Array, jax.Array, CompressorState | None]:
    """The entries that this step completes, with rope or before it, the rows that complete them, the carried state."""
    params = params.alone()
    return compress_kv(
        state,
        kv,
        score,
        positions=step.positions,
        req_rows=step.req_rows,
        query_start_loc=step.query_start_loc,
        ape=params.ape,
        norm_weight=params.norm_weight,
        inv_freq=params.inv_freq if rope else params.inv_freq[:0],
        ratio=kind.ratio,
        norm_eps=params.norm_eps,
        round_pooled=params.round_pooled,
        overlap=kind.overlap,
    )


def slots_of_entries(step: Step, rows: jax.Array) -> jax.Array:
    """The slots that the entries of these rows go to; −1 for row −1."""
    return jnp.where(rows >= 0, step.entry_slots[jnp.maximum(rows, 0)], -1)


def kernel_obstacle(
    cache: V4LayerCache, rows: V4Rows, params: V4LayerParams, step: Step, *, kind: LayerKind, rows_each: int
) -> str | None:
    """Why the kernel was not written for this step, of arrays of JAX or torch; None if it was."""
    if cache.swa.layout not in (KVLayout.V4_FP8, KVLayout.V4_BF16):
        return f"it writes rows of V4_FP8 and V4_BF16, got {cache.swa.layout.name}"
    if any(0 in x.shape for x in jax.tree.leaves((cache, rows, params, step))):
        return "an array is empty"
    if not kind.owns_kv:
        return None
    if kind.index_keys == "entries":
        return "it makes no index keys of the compressed rows"
    parts = [(cache.state, params.compressor)]
    if kind.index_keys == "compressor":
        parts.append((cache.index_state, params.index_compressor))
        if rows.index.q.shape[2:] != (INDEX_DIM,):
            return f"index queries must have {INDEX_DIM} values, got {list(rows.index.q.shape)}"
    if len({(*state.kv.shape[:2], of.inv_freq.shape) for state, of in parts}) > 1:
        return "both compressors must have states of the same requests and as many frequencies"
    if any(of.round_pooled or of.ape is None for _, of in parts):
        return "it adds ape to scores, and rounds no sum before the norm"
    if cache.compressed.layout != cache.swa.layout:
        return f"both caches must have one layout, got {cache.swa.layout.name} and {cache.compressed.layout.name}"
    # A row replaces the token `ring` before it, which no other row's window may read.
    ring, needed = cache.state.kv.shape[1], compressor_window(kind.ratio, kind.overlap) + rows_each - 1
    if ring < needed:
        return f"{rows_each} rows of a request need a ring of {needed} tokens in the states, got {ring}"
    return None


def write_by_kernel(
    execute: Executor,
    signs: Any,
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    step: Step,
    *,
    kind: LayerKind,
) -> Written:
    """`write_layer` by the kernel, where there is no obstacle.

    Args:
      execute: launches it, on arrays of JAX or torch.
      signs: bfloat16 `[128, 128]`, Sylvester's matrix.
    """
    from jax_sparse_mla.layers import triton as kernels

    def compressing(rows, params, state, cache):
        return kernels.Compressing(*rows, params.ape, params.norm_weight, params.inv_freq, state.kv, state.score, cache)

    ratio = kind.ratio if kind.owns_kv else 0
    index = rows.index if kind.index_keys == "compressor" else None
    compressor = indexer = kernels.NOTHING
    norm_eps, queries = (0.0, 0.0), (None, None, None)
    if ratio:
        main = rows.compressed_kv, rows.compressed_score
        compressor = compressing(main, params.compressor, cache.state, cache.compressed.data)
        norm_eps = float(params.compressor.norm_eps), 0.0
    if index is not None:
        keys = cache.index_k
        pages = keys.data if isinstance(keys, IndexKeys) else keys
        indexer = compressing((index.kv, index.score), params.index_compressor, cache.index_state, pages)
        norm_eps, queries = (norm_eps[0], float(params.index_compressor.norm_eps)), (index.q, index.weights, signs)
    constants = kernels.LayerConstants(
        layout=cache.swa.layout,
        ratio=ratio,
        page_sizes=(cache.swa.page_size, cache.compressed.page_size if ratio else 1),
        layers=(cache.swa.num_layers, cache.swa.layer_index or 0),
        params=(params.num_layers, params.layer_index or 0),
        norm_eps=norm_eps,
    )
    arrays = step, rows.kv, cache.swa.data, params.attn_sink, compressor, indexer, queries
    results = kernels.v4_layer(execute, *arrays, constants=constants)
    swa, compressed, state_kv, state_score, index_k, index_kv, index_score, sink, *queries = results

    written, replace = V4LayerCache(swa=dataclasses.replace(cache.swa, data=swa)), dataclasses.replace
    if ratio:
        state = replace(cache.state, kv=state_kv, score=state_score)
        written = replace(written, compressed=replace(cache.compressed, data=compressed), state=state)
    if index is not None:
        index_k = replace(keys, data=index_k) if isinstance(keys, IndexKeys) else index_k
        index_state = replace(cache.index_state, kv=index_kv, score=index_score)
        written = replace(written, index_k=index_k, index_state=index_state)
    return Written(written, params.attn_sink if sink is None else sink, *queries)
