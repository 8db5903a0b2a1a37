"""A DeepSeek-V4.1 layer's attention in one step.

Few layers compress. A KV source has a compressor, a compressed cache, and index keys made of the same rows; an index
source selects among them. The other layers have a window alone: they read the cache of the latest KV source, and attend
to what the latest index source has selected.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.indexer.candidates import index_topk_and_blocks, index_topk_in_blocks
from jax_sparse_mla.indexer.logits import as_index_keys, quantize_index_q, write_index_k
from jax_sparse_mla.indexer.select import selected_positions
from jax_sparse_mla.kv_cache import KVLayout, write_kv
from jax_sparse_mla.kv_cache.quantize import decode_rows, encode_rows
from jax_sparse_mla.layers import checks as layer_checks
from jax_sparse_mla.layers.state import IndexKeyParams, IndexRows, V4LayerCache, V4LayerParams, V4Rows
from jax_sparse_mla.layers.v4 import attend
from jax_sparse_mla.layers.write import Step, compress, slots_of_entries, step_of
from jax_sparse_mla.metadata import ForwardBatch, PrefillPlan, V4Metadata
from jax_sparse_mla.models import V41Layer, V41Spec
from jax_sparse_mla.rope import rope_interleaved, round_to_bfloat16


@pytree_dataclass
class V41Selection:
    """What an index source leaves for the layers after it.

    Attributes:
      positions: int32 `[T, index_topk]`, the selected compressed positions, −1 padded.
      blocks: int32 `[T, n]`, the candidate blocks as `candidate_blocks` gives them; None before the candidate source.
    """

    positions: jax.Array
    blocks: jax.Array | None = None


def v41_layer(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    batch: ForwardBatch,
    metadata: V4Metadata,
    plan: PrefillPlan | None,
    *,
    spec: V41Spec,
    layer: V41Layer,
    source: V4LayerCache | None = None,
    selected: V41Selection | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, V4LayerCache, V41Selection | None]:
    """One V4.1 layer's attention.

    Args:
      cache: the layer's caches, of `V4LayerCache.zeros(spec, layer.ratio, …)` in a KV source and
        `V4LayerCache.zeros(spec, 0, …)` in another layer; donate them.
      rows: the projected rows of this step, padded like the batch.
      params: the layer's parameters; `compressor` and `index_keys` in a KV source.
      batch, metadata: the step's, of `prepare_v4_step`, shared by all layers.
      plan: `V4Step.plans` of this ratio, for an EXTEND step that gathers a workspace; None attends to the paged caches.
      spec: the model. layer: its layer, of `models.v41_layers` (static).
      source: what this step's `v41_layer` of layer `layer.kv_source` returned as its caches; None in a KV source and in
        a layer of ratio 0.
      selected: what the layer before returned; None before the first index source.
      backend: of the attention, as in `sparse_mla_decode` and `sparse_mla_prefill`.

    Returns:
      out `[T, heads, 512]` (rope not yet taken back), the updated cache, and what the next layer takes as `selected`.

    Raises:
      TypeError, ValueError: what this layer needs is missing, what it does not have is given, or caches have shapes
        that cannot be right for the model, for each other or for the batch's requests; and what the functions called
        here raise.
    """
    arguments = cache, rows, params, batch, metadata, plan
    layer_checks.check_v41_layer(*arguments, spec=spec, layer=layer, source=source, selected=selected)
    step = step_of(batch, metadata, layer.ratio)
    facts = {"ratio": layer.ratio, "compresses": layer.is_kv_source, "fp4_rows": spec.fp4_rows}
    cache = _write(cache, rows, params, step, **facts)
    read = cache if layer.is_kv_source else source
    if layer.is_index_source:
        selected = _select(rows.index, read, metadata, selected, spec=spec, layer=layer)

    seen, positions = V4LayerCache(swa=cache.swa), None
    if layer.ratio:
        seen, positions = V4LayerCache(swa=cache.swa, compressed=read.compressed), selected.positions
    attn_sink = params.share_of(params.attn_sink)
    facts = {"spec": spec, "ratio": layer.ratio, "attn_sink": attn_sink, "backend": backend}
    return attend(rows.q, seen, metadata, plan, positions, None, **facts), cache, selected


@partial(jax.jit, static_argnames=("ratio", "compresses", "fp4_rows"))
def _write(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    step: Step,
    *,
    ratio: int,
    compresses: bool,
    fp4_rows: bool,
) -> V4LayerCache:
    """The layer's caches with the step's rows in them."""
    swa = write_kv(cache.swa, step.swa_slots, rows.kv)
    if not compresses:
        return V4LayerCache(swa=swa)
    inv_freq = params.compressor.alone().inv_freq
    latents, entry_rows, state = compress(
        cache.state, rows.compressed_kv, rows.compressed_score, params.compressor, step, ratio, rope=False
    )
    first = step.positions[jnp.maximum(entry_rows, 0)] - (ratio - 1)  # an entry stands at its first token
    slots = slots_of_entries(step, entry_rows)
    entries = rope_interleaved(latents, first, inv_freq)
    compressed = write_kv(cache.compressed, slots, _rounded_to_fp4(entries) if fp4_rows else entries)
    index_k = write_index_k(cache.index_k, slots, _index_keys(latents, first, inv_freq, params.index_keys.alone()))
    return V4LayerCache(swa=swa, compressed=compressed, state=state, index_k=index_k)


def _rounded_to_fp4(rows: jax.Array) -> jax.Array:
    """bfloat16 rows as a cache of FP4 rows gives them back."""
    read_back = decode_rows(KVLayout.V41_FP4, *encode_rows(KVLayout.V41_FP4, rows))
    return lax.bitcast_convert_type(read_back, jnp.bfloat16)


def _index_keys(latents: jax.Array, positions: jax.Array, inv_freq: jax.Array, params: IndexKeyParams) -> jax.Array:
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


def _select(
    rows: IndexRows,
    read: V4LayerCache,
    metadata: V4Metadata,
    selected: V41Selection | None,
    *,
    spec: V41Spec,
    layer: V41Layer,
) -> V41Selection:
    """What an index source selects of the KV source's entries."""
    keys, block = as_index_keys(read.index_k), {"block_size": spec.candidate_block_size}
    q, scale = quantize_index_q(rows.q, format=keys.format)
    lengths = metadata.compressed[layer.ratio].lengths
    entries = q, rows.weights * scale, keys, metadata.page_table, lengths
    if layer.among_candidates:
        positions = index_topk_in_blocks(*entries, spec.index_topk, selected.blocks, **block)
        return V41Selection(positions=positions, blocks=selected.blocks)
    if layer.publishes:
        # No more blocks than the bucket has.
        blocks = min(spec.candidate_blocks, metadata.page_table.shape[1] * keys.page_size // spec.candidate_block_size)
        positions, blocks = index_topk_and_blocks(*entries, spec.index_topk, max(1, blocks), **block)
        return V41Selection(positions=positions, blocks=blocks)
    return V41Selection(positions=selected_positions(*entries, spec.index_topk))
