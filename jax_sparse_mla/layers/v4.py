"""A V4 layer's attention in one step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_sparse_mla.attention import sparse_mla_decode, sparse_mla_extend
from jax_sparse_mla.indexer.select import logits_at_once, selected_positions
from jax_sparse_mla.indices import TopkTransform, topk_positions, topk_transform
from jax_sparse_mla.indices.lookup import page_slot_or_minus_one
from jax_sparse_mla.layers import checks as layer_checks
from jax_sparse_mla.layers.state import V4LayerCache, V4LayerParams, V4Rows
from jax_sparse_mla.layers.write import write_v4_layer
from jax_sparse_mla.metadata import ForwardBatch, PrefillPlan, V4Metadata
from jax_sparse_mla.models import INDEXED_RATIO, ModelSpec


def v4_layer(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    batch: ForwardBatch,
    metadata: V4Metadata,
    plan: PrefillPlan | None,
    *,
    spec: ModelSpec,
    ratio: int,
    index_scores: jax.Array | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, V4LayerCache, jax.Array | None]:
    """One V4 layer's attention.

    Args:
      cache: the layer's caches; donate them.
      rows: the projected rows of this step, padded like the batch.
      params: the layer's parameters.
      batch, metadata: the step's, shared by all layers; `metadata = build_v4_metadata(spec, batch, tables)`.
      plan: `V4Step.plans` of this ratio, for an EXTEND step that gathers a workspace; None attends to the paged caches
        directly, in any mode.
      spec: the model. ratio: the layer's compress ratio.
      index_scores: float32 `[T, capacity]`, selects by these instead of the indexer's scores (for comparisons).
      backend: of the attention, as in `sparse_mla_decode` and `sparse_mla_prefill`.
      batch_invariant: a row's result does not depend, to the bit, on the other rows of the step or on how many there
        are, as in `sparse_mla_decode` (static). A step of more than 128 rows takes longer: its logits are computed 128
        rows at a time. The result may depend on whether there is a plan.

    Returns:
      out `[T, heads, 512]` (rope not yet taken back), the updated cache, and, for ratio 4, the selected compressed
      positions int32 `[T, index_topk]`, −1 padded (else None).

    Raises:
      TypeError, ValueError: what this ratio needs is missing, or caches have shapes that cannot be right for the model,
        for each other or for the batch's requests; and what the functions called here raise.
    """
    layer_checks.check_v4_layer(cache, rows, params, batch, metadata, plan, spec=spec, ratio=ratio)
    cache, attn_sink, index_q, index_weights = write_v4_layer(cache, rows, params, batch, metadata, ratio=ratio)

    positions = slots = None
    if ratio == INDEXED_RATIO:
        lengths = metadata.compressed[ratio].lengths
        indexed = index_q, index_weights, cache.index_k, metadata.page_table, lengths
        if index_scores is None and plan is None:
            index_scores = logits_at_once(*indexed, batch_invariant=batch_invariant)
        if index_scores is None:
            positions = selected_positions(*indexed, spec.index_topk, batch_invariant=batch_invariant)
        else:
            positions = topk_positions(index_scores, lengths, spec.index_topk)
            if plan is None:
                paged = {"page_table": metadata.page_table, "page_size": spec.page_size // ratio}
                slots = topk_transform(index_scores, lengths, spec.index_topk, method=TopkTransform.PAGED, **paged)
    facts = {"spec": spec, "ratio": ratio, "attn_sink": attn_sink, "backend": backend}
    out = attend(rows.q, cache, metadata, plan, positions, slots, **facts, batch_invariant=batch_invariant)
    return out, cache, positions


def attend(
    q: jax.Array,
    cache: V4LayerCache,
    metadata: V4Metadata,
    plan: PrefillPlan | None,
    positions: jax.Array | None,
    slots: jax.Array | None,
    *,
    spec: ModelSpec,
    ratio: int,
    attn_sink: jax.Array,
    backend: str | None,
    batch_invariant: bool = False,
) -> jax.Array:
    """`out [T, heads, 512]` of a layer whose caches are written.

    Args:
      cache: its window, and the compressed rows that it reads, whichever layer's.
      positions, slots: int32 `[T, index_topk]`, what the layer attends to, where something is selected. Slots are read
        without a plan; None are those of the positions.
    """
    if plan is not None:
        out, _ = sparse_mla_extend(
            q,
            plan,
            cache.swa,
            cache.compressed,
            positions,
            softmax_scale=spec.softmax_scale,
            attn_sink=attn_sink,
            backend=backend,
            batch_invariant=batch_invariant,
        )
        return out

    extra = {}
    if ratio != 0:
        part = metadata.compressed[ratio]
        extra_indices = part.page_indices
        if slots is None and positions is not None:  # layers that share positions share these: XLA computes them once
            row = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
            slots = page_slot_or_minus_one(metadata.page_table, row, positions, spec.page_size // ratio)
        if slots is not None:
            extra_indices = jnp.pad(slots, ((0, 0), (0, extra_indices.shape[1] - spec.index_topk)), constant_values=-1)
        extra = {
            "extra_cache": cache.compressed,
            "extra_indices": extra_indices[:, None],
            "extra_topk_length": part.topk_lengths,
        }
    out, _ = sparse_mla_decode(
        q[:, None],
        cache.swa,
        metadata.swa_page_indices[:, None],
        softmax_scale=spec.softmax_scale,
        topk_length=metadata.swa_topk_lengths,
        attn_sink=attn_sink,
        backend=backend,
        batch_invariant=batch_invariant,
        **extra,
    )
    return out[:, 0]
