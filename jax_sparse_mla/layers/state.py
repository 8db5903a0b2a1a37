"""A layer's projected rows, its parameters and its caches: what it takes and what it carries between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.compressor.state import CompressorState, compressor_window
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys
from jax_sparse_mla.indices.ownership import AxisName
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache.layout import bf16_layout
from jax_sparse_mla.kv_cache.pool import LayerPool
from jax_sparse_mla.metadata import ForwardBatch, PrefillPlan, V4Metadata
from jax_sparse_mla.models import ModelSpec

_Cache = TypeVar("_Cache", bound="_LayerCache")


class LayerStep(NamedTuple):
    """A step as its V4 and V4.1 layers share it: the batch, its metadata, and the plan of this layer's ratio (None:
    the layer attends to the paged caches)."""

    batch: ForwardBatch
    metadata: V4Metadata
    plan: PrefillPlan | None = None


class LayerOptions(NamedTuple):
    """How a layer attends; see the arguments of `v4_layer`."""

    index_scores: jax.Array | None = None
    backend: str | None = None
    batch_invariant: bool = False
    replayed: jax.Array | None = None  # positions that an indexer's layer takes instead of selecting
    pages_axis: AxisName | None = None  # the mesh axis whose devices share the pages


@pytree_dataclass
class V41Selection:
    """The selection of an index source, for the layers after it.

    Attributes:
      positions: int32 `[T, index_topk]`, the selected compressed positions, −1 padded.
      blocks: int32 `[T, n]`, the candidate blocks as `candidate_blocks` gives them; None before the candidate source.
    """

    positions: jax.Array
    blocks: jax.Array | None = None


@pytree_dataclass
class CompressorParams(LayerPool):
    """A compressor's parameters, or those of several layers in the same arrays; see `V4LayerParams.stack`.

    Attributes:
      ape: float32 `[num_layers * ratio, coff * head_dim]`, coff 2 where windows overlap and 1
        otherwise; None in V4.1.
      norm_weight: float32 `[num_layers * head_dim]`.
      inv_freq: float32 `[num_layers * rope_dim / 2]` of the layer's rotary embedding.
      norm_eps: of its RMSNorm (static).
      round_pooled: V4.1: whether the sum of a pair is rounded before the norm, as in `compress_kv` (static).
      num_layers: how many layers' parameters the arrays hold, one layer after the other (static).
      layer_index: the layer of a view; None for all of them (static).
    """

    ape: jax.Array | None = None
    norm_weight: jax.Array
    inv_freq: jax.Array
    norm_eps: float = static(default=1e-6)
    round_pooled: bool = static(default=False)
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)


@pytree_dataclass
class IndexKeyParams(LayerPool):
    """How a KV source of V4.1 makes its index keys of the compressed rows; or those of several layers.

    Attributes:
      wk: bfloat16 or float32 `[num_layers * 128, 512]`, by which a row is multiplied before rope.
      norm_weight: float32 `[num_layers * 128]`, of the RMSNorm behind it. Rope follows, with the compressor's inv_freq.
      norm_eps: of that RMSNorm (static).
      num_layers, layer_index: as in `CompressorParams` (static).
    """

    wk: jax.Array
    norm_weight: jax.Array
    norm_eps: float = static(default=1e-6)
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)


@pytree_dataclass
class IndexRows:
    """The projections of a V4 layer's indexer from T rows.

    q bfloat16 `[T, index_heads, index_dim]` after rope; weights float32 `[T, index_heads]`, scaled by
    `index_dim^-0.5 · index_heads^-0.5`; kv and score `[T, 2 · index_dim]`, the input of its own compressor (V4; V4.1
    has none).
    """

    q: jax.Array
    weights: jax.Array
    kv: jax.Array | None = None
    score: jax.Array | None = None


@pytree_dataclass
class V4Rows:
    """The projections of a V4 layer from T rows.

    q bfloat16 `[T, heads, 512]` and kv bfloat16 `[T, 512]` after rope; compressed_kv and compressed_score
    `[T, coff · 512]`, the compressor's input (ratio > 0; coff is 2 where windows overlap, else 1); index of a layer
    that selects. In V4.1 a KV source has compressed_kv, and of ratio 2 compressed_score; an index source has index.
    """

    q: jax.Array
    kv: jax.Array
    compressed_kv: jax.Array | None = None
    compressed_score: jax.Array | None = None
    index: IndexRows | None = None


@pytree_dataclass
class V4LayerParams(LayerPool):
    """The parameters of a V4 layer, or of several layers of one ratio in the same arrays: `layer(i)` is one of them.

    Attributes:
      attn_sink: float32 `[num_layers * heads]`.
      compressor: of a layer that compresses (ratio > 0).
      index_compressor: the indexer's, where its keys are compressed apart (V4).
      index_keys: of a KV source of V4.1.
      num_layers, layer_index: as in `CompressorParams` (static).
    """

    attn_sink: jax.Array
    compressor: CompressorParams | None = None
    index_compressor: CompressorParams | None = None
    index_keys: IndexKeyParams | None = None
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)

    @classmethod
    def stack(cls, layers: Sequence[V4LayerParams]) -> V4LayerParams:
        """The parameters of layers of one ratio in the same arrays, so that a step takes few arrays: each costs the
        host a few microseconds. On a GPU a sink that is stacked has no gradient: differentiate a layer's own.

        Raises:
          ValueError: no layer, layers of several ratios, or a norm_eps that differs.
        """
        check = ArgumentChecks("V4LayerParams.stack")
        if not layers:
            raise check.fail("layers must hold a layer's parameters, got none")
        if len({jax.tree.structure(layer) for layer in layers}) > 1:
            raise check.fail("layers must have the same parts and the same norm_eps: stack those of one ratio")
        stacked = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *layers)
        return stacked._each(lambda pool: dataclasses.replace(pool, num_layers=len(layers), layer_index=None))

    def layer(self, index: int) -> V4LayerParams:
        """The view of layer `index` (static)."""
        return self._each(lambda pool: LayerPool.layer(pool, index))

    def alone(self) -> V4LayerParams:
        """The view's layer in arrays of its own; JAX copies them if there are more layers, torch has views."""
        return self._each(LayerPool.alone)

    def _each(self, function: Callable[[LayerPool], LayerPool]) -> V4LayerParams:
        names, view = ("compressor", "index_compressor", "index_keys"), function(self)
        parts = {name: getattr(self, name) for name in names}
        return dataclasses.replace(view, **{name: function(part) for name, part in parts.items() if part is not None})


class _LayerCache:
    """Caches of one layer, or of several layers of one kind, in the same arrays."""

    def layer(self: _Cache, index: int) -> _Cache:
        """The view of layer `index` (static): what the layer functions take, and what they return, so that `layer` of
        their result is the view of the next."""
        return self._each(lambda pool: pool.layer(index))

    def whole(self: _Cache) -> _Cache:
        """All layers: what a step returns, so that its state is the same pytree before and after."""
        return self._each(lambda pool: pool.whole())

    def alone(self: _Cache) -> _Cache:
        """The view's layer in arrays of its own; JAX copies them if there are more layers, torch has views."""
        return self._each(lambda pool: pool.alone())

    def _each(self: _Cache, function: Callable[[LayerPool], LayerPool]) -> _Cache:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        pools = {name: function(value) for name, value in fields.items() if isinstance(value, LayerPool)}
        return dataclasses.replace(self, **pools)


@pytree_dataclass
class V4LayerCache(_LayerCache):
    """The caches and states of a V4 layer between steps; a ratio-0 layer has the sliding-window cache only, and so has
    a layer of V4.1 that is no KV source.

    `index_k` is uint8 `[num_pages, page_size * 132]` for one layer, and `IndexKeys` for several layers or FP4 keys.
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

        `max_draft_tokens` is the most rows of a TARGET_VERIFY or DRAFT_EXTEND step per request: the compressor then
        keeps as many tokens more, so that rejected drafts do not replace what the next step still needs. A layer
        refuses a step of more. Where a DRAFT_EXTEND step goes back to tokens before those that the same caches have
        verified, it needs twice as many. `bf16` takes the unquantised layout.

        Of V4.1 they are the caches of a KV source. Ratio 0 makes those of its other layers, whatever their ratio.
        """
        kind = spec.kind(ratio)
        layout = bf16_layout(spec.kv_layout) if bf16 else spec.kv_layout
        swa = PagedKV.zeros(layout, num_swa_pages, spec.page_size, num_layers=num_layers)
        if ratio == 0 or not kind.owns_kv:
            return cls(swa=swa)

        def state(head_dim):
            return CompressorState.zeros(
                max_requests,
                ratio=ratio,
                head_dim=head_dim,
                ring=compressor_window(ratio, kind.overlap) + max_draft_tokens,
                num_layers=num_layers,
                overlap=kind.overlap,
            )

        entries = spec.page_size // ratio
        if spec.compressed_layout is not None and not bf16:
            layout = spec.compressed_layout
        return cls(
            swa=swa,
            compressed=PagedKV.zeros(layout, num_pages, entries, num_layers=num_layers),
            state=state(spec.qk_dim) if kind.gated else None,
            index_k=_index_keys(num_pages, entries, num_layers, spec.index_format) if kind.selected else None,
            index_state=state(spec.index_dim) if kind.index_keys == "compressor" else None,
        )


def _index_keys(num_pages: int, page_size: int, num_layers: int, format: IndexFormat) -> jax.Array | IndexKeys:
    """Empty index keys: an array for one layer of keys whose format needs no name."""
    keys = IndexKeys.zeros(num_pages, page_size, num_layers=num_layers, format=format)
    return keys.data if num_layers == 1 and format == IndexFormat.FP8 else keys


@pytree_dataclass
class V32LayerCache(_LayerCache):
    """The caches of a V3.2 layer between steps: kv, and the indexer's keys, uint8 `[num_pages, 64 · 132]` for one layer
    and `IndexKeys` for several; a page has 64 keys, of a token or of a pool each. With pools `index_state` carries the
    tokens of the requests' unfinished ones.

    Layers may share an indexer (IndexShare): `indexed` (static) then says which layers have one, and index_k and
    index_state are of those layers only; they are None in the cache of a single layer without one. Empty, all layers
    have an indexer.
    """

    kv: PagedKV
    index_k: jax.Array | IndexKeys | None = None
    index_state: CompressorState | None = None
    indexed: tuple[bool, ...] = static(default=())

    @classmethod
    def zeros(
        cls,
        spec: ModelSpec,
        *,
        num_pages: int,
        bf16: bool = False,
        num_layers: int = 1,
        indexed: Sequence[bool] | None = None,
        max_requests: int | None = None,
        max_draft_tokens: int = 0,
    ) -> V32LayerCache:
        """Empty caches for `num_pages` pages of `spec.page_size` tokens; `bf16` takes the unquantised layout.

        `num_layers` layers share the arrays, as those of `V4LayerCache.zeros` do. `indexed` says of each whether it has
        an indexer of its own (`models.indexed_layers`); by default all have. A model with pools of index keys needs
        `max_requests`, the rows of the request tables; `max_draft_tokens` is as in `V4LayerCache.zeros`.

        Raises:
          ValueError: `indexed` does not name each layer; pools, and no `max_requests`.
        """
        kind, index_state = spec.kind(), None
        indexed = (True,) * num_layers if indexed is None else tuple(map(bool, indexed))
        if len(indexed) != num_layers:
            raise ValueError(f"V32LayerCache.zeros: indexed must name {num_layers} layers, got {len(indexed)}")
        layout, keys = bf16_layout(spec.kv_layout) if bf16 else spec.kv_layout, sum(indexed)
        if kind.pool > 1 and keys:
            if max_requests is None:
                raise ValueError(f"V32LayerCache.zeros: max_requests must be given: {spec.name} has index pools")
            index_state = CompressorState.zeros(
                max_requests,
                ratio=kind.pool,
                head_dim=spec.index_dim,
                ring=kind.pool + max_draft_tokens,
                num_layers=keys,
                overlap=False,
            )
        return cls(
            kv=PagedKV.zeros(layout, num_pages, spec.page_size, num_layers=num_layers),
            index_k=_index_keys(num_pages, spec.page_size // kind.pool, keys, spec.index_format) if keys else None,
            index_state=index_state,
            indexed=() if all(indexed) or num_layers == 1 else indexed,
        )

    @property
    def has_index_k(self) -> bool:
        """Whether the view's layer has index keys. A view of another layer carries those of all layers along."""
        return self.indexed[self.kv.layer_index or 0] if self.indexed else self.index_k is not None

    def layer(self, index: int) -> V32LayerCache:
        if not self.indexed:
            return super().layer(index)

        def of_index(part):
            if not isinstance(part, LayerPool):
                return part
            return part.layer(sum(self.indexed[:index])) if self.indexed[index] else part.whole()

        index_k, index_state = of_index(self.index_k), of_index(self.index_state)
        return dataclasses.replace(self, kv=self.kv.layer(index), index_k=index_k, index_state=index_state)

    def alone(self) -> V32LayerCache:
        parts = (self.index_k, self.index_state) if self.has_index_k else (None, None)
        keys, state = (part.alone() if isinstance(part, LayerPool) else part for part in parts)
        return dataclasses.replace(self, kv=self.kv.alone(), index_k=keys, index_state=state, indexed=())


@pytree_dataclass
class V32Rows:
    """The projections of a V3.2 layer from T rows.

    q bfloat16 `[T, heads, 576]` (the no-rope part multiplied into the latent space) and kv bfloat16 `[T, 576]`,
    both latent first and rope last (GLM-5.3: 512, and no rope); index_q bfloat16 `[T, index_heads, 128]` and index_k
    `[T, 128]` after rope; index_weights float32 `[T, index_heads]`, scaled by `index_dim^-0.5 · index_heads^-0.5`;
    with pools index_score `[T, 128]`, what weighs the keys of a pool in each channel. A layer without an indexer of
    its own has none of these four.
    """

    q: jax.Array
    kv: jax.Array
    index_q: jax.Array | None = None
    index_k: jax.Array | None = None
    index_weights: jax.Array | None = None
    index_score: jax.Array | None = None
