"""One layer's attention in one forward step, from projected rows to attention output; it updates the layer's caches.

The functions put the parts of the library together as a serving engine does: write, compress, index, select, merge,
attend. They are plain JAX: jit them with the layer's cache donated, and the caches are updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_sparse_mla import _layer_checks as layer_checks
from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.attention import sparse_mla_decode, sparse_mla_extend, sparse_mla_prefill
from jax_sparse_mla.attention.api import plan_here
from jax_sparse_mla.compressor import CompressorState, compress_kv, compressor_window
from jax_sparse_mla.index_selection import index_topk
from jax_sparse_mla.indexer import (
    IndexKeys,
    index_logits,
    quantize_index_q,
    write_index_k,
    write_transformed_index_k,
)
from jax_sparse_mla.indices import TopkTransform, topk_positions, topk_transform
from jax_sparse_mla.indices.lookup import add_or_minus_one
from jax_sparse_mla.kv_cache import PagedKV, gather_kv, write_kv
from jax_sparse_mla.kv_cache.layout import bf16_layout
from jax_sparse_mla.kv_cache.pool import LayerPool
from jax_sparse_mla.metadata import (
    ForwardBatch,
    ForwardMode,
    PrefillPlan,
    RequestTables,
    V4Metadata,
    V32Metadata,
    build_prefill_plan,
    build_v4_metadata,
)
from jax_sparse_mla.metadata.rows import bucket
from jax_sparse_mla.metadata.v4 import INDEXED_RATIO
from jax_sparse_mla.models import ModelSpec

_Cache = TypeVar("_Cache", bound="_LayerCache")


@pytree_dataclass
class CompressorParams:
    """A compressor's parameters: ape float32 `[ratio, coff · head_dim]`, norm_weight float32 `[head_dim]`,
    inv_freq float32 `[rope_dim / 2]` of the layer's rotary embedding, and norm_eps of its RMSNorm (static)."""

    ape: jax.Array
    norm_weight: jax.Array
    inv_freq: jax.Array
    norm_eps: float = static(default=1e-6)


@pytree_dataclass
class IndexRows:
    """The projections of a V4 layer's indexer from T rows.

    q bfloat16 `[T, index_heads, index_dim]` after rope; weights float32 `[T, index_heads]`, scaled by
    `index_dim^-0.5 · index_heads^-0.5`; kv and score `[T, 2 · index_dim]`, the input of its own compressor.
    """

    q: jax.Array
    weights: jax.Array
    kv: jax.Array
    score: jax.Array


@pytree_dataclass
class V4Rows:
    """The projections of a V4 layer from T rows: q bfloat16 `[T, heads, 512]` and kv bfloat16 `[T, 512]` after rope;
    compressed_kv and compressed_score `[T, coff · 512]`, the compressor's input (ratio > 0; coff is 2 for ratio 4, else
    1); index (ratio 4)."""

    q: jax.Array
    kv: jax.Array
    compressed_kv: jax.Array | None = None
    compressed_score: jax.Array | None = None
    index: IndexRows | None = None


@pytree_dataclass
class V4LayerParams:
    """attn_sink float32 `[heads]`; the parameters of the compressor (ratio > 0) and of the indexer's (ratio 4)."""

    attn_sink: jax.Array
    compressor: CompressorParams | None = None
    index_compressor: CompressorParams | None = None


class _LayerCache:
    """Caches of one layer, or of several layers of one kind, in the same arrays."""

    def layer(self: _Cache, index: int) -> _Cache:
        """The view of layer `index` (static): what the layer functions take, and what they return, so that `layer` of
        their result is the view of the next."""
        return self._each(lambda pool: pool.layer(index))

    def whole(self: _Cache) -> _Cache:
        """All layers: what a step returns, so that its state is the same pytree before and after."""
        return self._each(lambda pool: pool.whole())

    def _each(self: _Cache, function: Callable[[LayerPool], LayerPool]) -> _Cache:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        pools = {name: function(value) for name, value in fields.items() if isinstance(value, LayerPool)}
        return dataclasses.replace(self, **pools)


@pytree_dataclass
class V4LayerCache(_LayerCache):
    """The caches and states of a V4 layer between steps; a ratio-0 layer has the sliding-window cache only.

    `index_k` is uint8 `[num_pages, page_size * 132]` for one layer, and `IndexKeys` for several.
    """

    swa: PagedKV
    compressed: PagedKV | None = None
    state: CompressorState | None = None
    index_k: jax.Array | IndexKeys | None = None
    index_state: CompressorState | None = None

    @classmethod
    def zeros(
        cls,
        spec: ModelSpec,
        ratio: int,
        *,
        num_pages: int,
        num_swa_pages: int,
        max_requests: int,
        max_draft_tokens: int = 0,
        bf16: bool = False,
        num_layers: int = 1,
    ) -> V4LayerCache:
        """Empty caches for `num_pages` pages of `spec.page_size` tokens, `num_swa_pages` of them within a window.

        `num_layers` layers of this ratio share the arrays, and `cache.layer(i)` is one of them: a step that donates a
        few arrays costs the host less than one that donates a few for each layer.

        `max_draft_tokens` is the most rows of a TARGET_VERIFY step per request: the compressor then keeps as many
        tokens more, so that rejected drafts do not replace what the next step still needs. `bf16` takes the
        unquantised layout.
        """
        layout = bf16_layout(spec.kv_layout) if bf16 else spec.kv_layout
        layers = {"num_layers": num_layers}
        swa = PagedKV.zeros(layout, num_swa_pages, spec.page_size, **layers)
        if ratio == 0:
            return cls(swa=swa)
        entries = spec.page_size // ratio
        compressed = PagedKV.zeros(layout, num_pages, entries, **layers)
        ring = compressor_window(ratio) + max_draft_tokens
        state = CompressorState.zeros(max_requests, ratio=ratio, head_dim=spec.qk_dim, ring=ring, **layers)
        if ratio != INDEXED_RATIO:
            return cls(swa=swa, compressed=compressed, state=state)
        return cls(
            swa=swa,
            compressed=compressed,
            state=state,
            index_k=_index_keys(num_pages, entries, num_layers),
            index_state=CompressorState.zeros(max_requests, ratio=ratio, head_dim=spec.index_dim, ring=ring, **layers),
        )


def _index_keys(num_pages: int, page_size: int, num_layers: int) -> jax.Array | IndexKeys:
    """Empty index keys: an array for one layer."""
    keys = IndexKeys.zeros(num_pages, page_size, num_layers=num_layers)
    return keys.data if num_layers == 1 else keys


@pytree_dataclass
class V4Step:
    """What all V4 layers of a step share: the metadata, and by compress ratio the plans of a gathered prefill, none
    where the layers attend to the paged caches."""

    metadata: V4Metadata
    plans: dict[int, PrefillPlan]

    @property
    def overflow(self) -> jax.Array:
        """bool scalar: a bucket was too small for the step; what did not fit is left out of the attention."""
        return jnp.any(jnp.stack([self.metadata.overflow, *(plan.overflow for plan in self.plans.values())]))


def prepare_v4_step(
    spec: ModelSpec,
    batch: ForwardBatch,
    tables: RequestTables,
    *,
    gathered: bool | None = None,
    gathered_tokens: int | None = None,
) -> V4Step:
    """Builds once what `v4_layer` needs in every layer of a step.

    Args:
      spec: the model (static).
      batch, tables: the step.
      gathered: whether an EXTEND step gathers a bf16 workspace (True) or attends to the paged caches, as the other
        modes do (False); by default the `kernel` of its plan says so, by the number of rows (static).
      gathered_tokens: tokens of all requests together whose compressed entries the workspace holds; by default the
        bucket for every request (static).

    Raises:
      TypeError, ValueError: see `build_v4_metadata` and `build_prefill_plan`; a backend that the environment names and
        that cannot serve the step.
    """
    metadata = build_v4_metadata(spec, batch, tables)
    layer_checks.check_tables("prepare_v4_step", tables)
    pool_tokens = tables.full_to_swa.shape[0] - 1
    parts = {r: dataclasses.replace(part, pool_tokens=pool_tokens) for r, part in metadata.compressed.items()}
    metadata = dataclasses.replace(metadata, compressed=parts)
    (rows,), (num_requests,) = batch.out_cache_loc.shape, batch.seq_lens.shape
    if gathered is None:
        gathered = batch.mode is ForwardMode.EXTEND and gathers(spec, rows)
    if not gathered:
        return V4Step(metadata=metadata, plans={})
    if gathered_tokens is None:
        gathered_tokens = num_requests * bucket(batch, tables)
    plans = {
        ratio: build_prefill_plan(
            spec,
            batch,
            tables,
            compress_ratio=ratio,
            swa_capacity=rows + num_requests * (spec.window - 1),
            compressed_capacity=gathered_tokens // ratio if ratio else 0,
        )
        for ratio in spec.compress_ratios
    }
    return V4Step(metadata=metadata, plans=plans)


def gathers(spec: ModelSpec, rows: int) -> bool:
    """Whether an EXTEND step of so many rows gathers a bf16 workspace: the `kernel` of its plan is "sparse_prefill".

    Other modes attend to the paged caches: their rows have no context in common.
    """
    topk = (spec.window or 0) + spec.index_topk
    plan = plan_here("decode", spec.kv_layout, rows=rows, heads=spec.num_heads, topk=topk, chunk=True)
    return plan.kernel == "sparse_prefill"


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

    Returns:
      out `[T, heads, 512]` (rope not yet taken back), the updated cache, and, for ratio 4, the selected compressed
      positions int32 `[T, index_topk]`, −1 padded (else None).

    Raises:
      TypeError, ValueError: what this ratio needs is missing, or caches have shapes that cannot be right for the model,
        for each other or for the batch's requests; and what the functions called here raise.
    """
    layer_checks.check_v4_layer(cache, rows, params, batch, metadata, plan, spec=spec, ratio=ratio)
    swa = write_kv(cache.swa, metadata.swa_out_cache_loc, rows.kv)
    if ratio == 0:
        cache = V4LayerCache(swa=swa)
    else:
        entries, entry_slots, state = _compress(
            cache.state, rows.compressed_kv, rows.compressed_score, params.compressor, batch, metadata, ratio
        )
        compressed = write_kv(cache.compressed, entry_slots, entries)
        index_k, index_state = cache.index_k, cache.index_state
        if ratio == INDEXED_RATIO:
            index_entries, index_slots, index_state = _compress(
                index_state, rows.index.kv, rows.index.score, params.index_compressor, batch, metadata, ratio
            )
            index_k = write_transformed_index_k(index_k, index_slots, index_entries)
        cache = V4LayerCache(swa=swa, compressed=compressed, state=state, index_k=index_k, index_state=index_state)

    positions = None
    if ratio == INDEXED_RATIO:
        lengths = metadata.compressed[INDEXED_RATIO].lengths
        if index_scores is None:
            index_q, q_scale = quantize_index_q(rows.index.q, hadamard=True)
            selecting = index_q, rows.index.weights * q_scale, cache.index_k, metadata.page_table, lengths
            if plan is not None:  # a long chunk's logits would be the step's largest array
                positions = _positions(*selecting, topk=spec.index_topk)
            else:
                index_scores = index_logits(*selecting)
        if positions is None:
            positions = topk_positions(index_scores, lengths, spec.index_topk)

    if plan is not None:
        out, _ = sparse_mla_extend(
            rows.q,
            plan,
            cache.swa,
            cache.compressed,
            positions,
            softmax_scale=spec.softmax_scale,
            attn_sink=params.attn_sink,
            backend=backend,
        )
        return out, cache, positions

    extra = {}
    if ratio != 0:
        part = metadata.compressed[ratio]
        extra_indices = part.page_indices
        if ratio == INDEXED_RATIO:
            slots = topk_transform(
                index_scores,
                part.lengths,
                spec.index_topk,
                method=TopkTransform.PAGED,
                page_table=metadata.page_table,
                page_size=spec.page_size // INDEXED_RATIO,
            )
            extra_indices = jnp.pad(slots, ((0, 0), (0, extra_indices.shape[1] - spec.index_topk)), constant_values=-1)
        extra = {
            "extra_cache": cache.compressed,
            "extra_indices": extra_indices[:, None],
            "extra_topk_length": part.topk_lengths,
        }
    out, _ = sparse_mla_decode(
        rows.q[:, None],
        cache.swa,
        metadata.swa_page_indices[:, None],
        softmax_scale=spec.softmax_scale,
        topk_length=metadata.swa_topk_lengths,
        attn_sink=params.attn_sink,
        backend=backend,
        **extra,
    )
    return out[:, 0], cache, positions


def _positions(q, weights, index_k, page_table, lengths, *, topk: int, row_to_request=None) -> jax.Array:
    """The positions of the top-k, without an array of all logits."""
    none = jnp.zeros_like(lengths)
    options = {"method": TopkTransform.RAGGED, "topk_indices_offset": none, "row_to_request": row_to_request}
    return index_topk(q, weights, index_k, page_table, lengths, topk, **options)


def _compress(
    state: CompressorState,
    kv: jax.Array,
    score: jax.Array,
    params: CompressorParams,
    batch: ForwardBatch,
    metadata: V4Metadata,
    ratio: int,
) -> tuple[jax.Array, jax.Array, CompressorState]:
    """The entries that this step completes, the slots they go to (−1 for unused ones), and the carried state."""
    entries, entry_rows, state = compress_kv(
        state,
        kv,
        score,
        positions=metadata.positions,
        req_rows=batch.req_pool_indices[metadata.row_to_request],
        query_start_loc=metadata.query_start_loc,
        ape=params.ape,
        norm_weight=params.norm_weight,
        inv_freq=params.inv_freq,
        ratio=ratio,
        norm_eps=params.norm_eps,
    )
    out_loc = metadata.compressed[ratio].out_loc
    return entries, jnp.where(entry_rows >= 0, out_loc[jnp.maximum(entry_rows, 0)], -1), state


@pytree_dataclass
class V32LayerCache(_LayerCache):
    """The caches of a V3.2 layer between steps: kv, and the indexer's keys, uint8 `[num_pages, 64 · 132]` for one layer
    and `IndexKeys` for several."""

    kv: PagedKV
    index_k: jax.Array | IndexKeys

    @classmethod
    def zeros(cls, spec: ModelSpec, *, num_pages: int, bf16: bool = False, num_layers: int = 1) -> V32LayerCache:
        """Empty caches for `num_pages` pages of `spec.page_size` tokens; `bf16` takes the unquantised layout.

        `num_layers` layers share the arrays, as those of `V4LayerCache.zeros` do.
        """
        layout = bf16_layout(spec.kv_layout) if bf16 else spec.kv_layout
        return cls(
            kv=PagedKV.zeros(layout, num_pages, spec.page_size, num_layers=num_layers),
            index_k=_index_keys(num_pages, spec.page_size, num_layers),
        )


@pytree_dataclass
class V32Rows:
    """The projections of a V3.2 layer from T rows.

    q bfloat16 `[T, heads, 576]` (the no-rope part multiplied into the latent space) and kv bfloat16 `[T, 576]`,
    both latent first and rope last; index_q bfloat16 `[T, index_heads, 128]` and index_k `[T, 128]` after rope;
    index_weights float32 `[T, index_heads]`, scaled by `index_dim^-0.5 · index_heads^-0.5`.
    """

    q: jax.Array
    kv: jax.Array
    index_q: jax.Array
    index_k: jax.Array
    index_weights: jax.Array


def v32_layer(
    cache: V32LayerCache,
    rows: V32Rows,
    batch: ForwardBatch,
    metadata: V32Metadata,
    *,
    spec: ModelSpec,
    index_scores: jax.Array | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, V32LayerCache, jax.Array]:
    """One V3.2 layer's attention: with RAGGED metadata from a gathered bf16 workspace, with PAGED from the paged cache.

    Args and Returns as `v4_layer`; out is `[T, heads, 512]` in the latent space, positions int32 `[T, index_topk]`.
    """
    layer_checks.check_v32_layer(cache, spec=spec)
    kv = write_kv(cache.kv, metadata.out_cache_loc, rows.kv)
    cache = V32LayerCache(kv=kv, index_k=write_index_k(cache.index_k, metadata.out_cache_loc, rows.index_k))
    lengths, positions = metadata.seqlens_expanded, None
    ragged = metadata.topk_transform is TopkTransform.RAGGED
    if index_scores is None:
        index_q, q_scale = quantize_index_q(rows.index_q)
        queries = index_q, rows.index_weights * q_scale, cache.index_k
        table, request = metadata.page_table, metadata.row_to_request
        if ragged:  # a long chunk's logits would be the step's largest array
            positions = _positions(*queries, table, lengths, topk=spec.index_topk, row_to_request=request)
        else:
            index_scores = index_logits(*queries, table[request], lengths)
    if positions is None:
        positions = topk_positions(index_scores, lengths, spec.index_topk)

    if ragged:
        indices = add_or_minus_one(positions, metadata.topk_indices_offset[:, None])
        out, _, _ = sparse_mla_prefill(
            rows.q,
            gather_kv(cache.kv, metadata.kv_slots),
            indices,
            softmax_scale=spec.softmax_scale,
            topk_length=metadata.topk_lengths,
            backend=backend,
        )
        return out, cache, positions

    slots = topk_transform(
        index_scores,
        lengths,
        spec.index_topk,
        method=TopkTransform.PAGED,
        page_table=metadata.page_table,
        page_size=spec.page_size,
        row_to_request=metadata.row_to_request,
    )
    out, _ = sparse_mla_decode(
        rows.q[:, None],
        cache.kv,
        slots[:, None],
        softmax_scale=spec.softmax_scale,
        topk_length=metadata.topk_lengths,
        backend=backend,
    )
    return out[:, 0], cache, positions
