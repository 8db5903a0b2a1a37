"""DeepSeek-V4.1: a config becomes a spec and its layers, of which few compress."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.models.config import index_dim_of, is_int, layout_of, positive, reader, text_config
from jax_sparse_mla.models.kinds import V41_RATIOS, LayerKind, kind_of_ratio
from jax_sparse_mla.models.spec import ModelSpec, reads

# A checkpoint's model_type, and that of the text_config in it.
_V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
_V41_PAGE_SIZE = 256


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class V41Spec(ModelSpec):
    """The attention constants of DeepSeek-V4.1: a `ModelSpec`, and what the other models do not have.

    Attributes:
      compressed_layout: the byte layout of a compressed row; None: kv_layout.
      fp4_rows: whether compressed rows are rounded to FP4 before they are written in another layout, as SGLang does in
        caches of 584 bytes and vLLM does not.
      index_format: how the indexer's keys are stored.
      candidate_blocks, candidate_block_size: the most blocks, and positions of a block, that the candidate source
        leaves for later indexers to score; 0 without one.
    """

    compressed_layout: KVLayout | None = None
    fp4_rows: bool = False
    index_format: IndexFormat = IndexFormat.FP8
    candidate_blocks: int = 0
    candidate_block_size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class V41Layer:
    """A layer of DeepSeek-V4.1: what it owns, and which layers it reads; a static argument of `v41_layer`.

    Attributes:
      index: the layer's number.
      ratio: its compress ratio: 0 (the sliding window alone), 1 or 2.
      kv_source: the layer whose compressed cache and index keys it reads, itself in a KV source; None for ratio 0.
      index_source: the layer whose selection it attends to, itself in an index source; None for ratio 0.
      publishes: whether it is the candidate source, whose best blocks later index sources score alone.
      among_candidates: whether it is such a later index source.
    """

    index: int
    ratio: int = 0
    kv_source: int | None = None
    index_source: int | None = None
    publishes: bool = False
    among_candidates: bool = False

    @property
    def is_kv_source(self) -> bool:
        """Whether it has a compressor, a compressed cache and index keys of its own."""
        return self.kv_source == self.index

    @property
    def is_index_source(self) -> bool:
        """Whether it has an indexer of its own."""
        return self.index_source == self.index

    def kind(self, source: LayerKind) -> LayerKind:
        """The layer's kind; `source` is that of a KV source of its ratio."""
        if not self.ratio:
            return source
        candidates = "publishes" if self.publishes else "among" if self.among_candidates else "none"
        return dataclasses.replace(
            source,
            owns_kv=self.is_kv_source,
            gated=source.gated and self.is_kv_source,
            selects="own" if self.is_index_source else "shared",
            candidates=candidates,
        )


def _v41_reader(config: Any) -> Callable[..., Any]:
    """`read(key, default=None)` of a V4.1 config, whose keys may stand in its text_config; those outside win."""
    parts = reader(config), reader(text_config(config))
    return lambda key, default=None: next((value for read in parts if (value := read(key)) is not None), default)


def v41_layers(config: Any) -> tuple[V41Layer, ...]:
    """The layers of a DeepSeek-V4.1 config, in order, without its draft layers.

    A layer reads the latest source at or below itself.

    Args:
      config: a mapping, or an object with attributes. Read are `num_hidden_layers`, `compress_ratios`,
        `kv_source_layer_ids`, `index_source_layer_ids` and `candidate_source_layer_id`.

    Raises:
      ValueError: what is missing or cannot be read, by its name: another ratio than 0, 1 and 2, a layer without a
        source, a source of another ratio or of none, a KV source without an indexer.
    """
    read = _v41_reader(config)

    def fail(message: str) -> ValueError:
        return ValueError(f"v41_layers: {message}")

    if (num_layers := read("num_hidden_layers")) is None:
        raise fail("the config has no num_hidden_layers")
    if not is_int(num_layers) or num_layers < 1:
        raise fail(f"num_hidden_layers must be a positive integer, got {num_layers!r}")
    ratios = read("compress_ratios")
    if not isinstance(ratios, (list, tuple)) or len(ratios) < num_layers:
        raise fail(f"compress_ratios must name {num_layers} layers, got {ratios!r}")
    if unknown := [ratio for ratio in ratios[:num_layers] if ratio not in (0, *V41_RATIOS)]:
        raise fail(f"compress_ratios must be of 0, 1, 2, got {unknown[0]!r}")
    sources = {}
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        sources[name] = read(name)
        if not sources[name]:
            raise fail(f"the config has no {name}")
        if not isinstance(sources[name], (list, tuple)) or not all(map(is_int, sources[name])):
            raise fail(f"{name} must be a list of integers, got {sources[name]!r}")
        if wrong := [i for i in sources[name] if not 0 <= i < num_layers or not ratios[i]]:
            raise fail(f"{name} must name layers that compress, got {wrong[0]!r}")
    kv_ids, index_ids = sources.values()
    if other := sorted(set(kv_ids) - set(index_ids)):
        raise fail(f"kv_source_layer_ids must be of index_source_layer_ids, whose indexer has the keys, got {other[0]}")
    candidates = read("candidate_source_layer_id", -1)
    if candidates != -1 and candidates not in index_ids:
        raise fail(f"candidate_source_layer_id must be -1 or one of index_source_layer_ids, got {candidates!r}")

    def source_of(layer: int, name: str) -> int:
        if not (below := [i for i in sources[name] if i <= layer]):
            raise fail(f"{name} must have a layer at or below {layer}, which has ratio {ratios[layer]}")
        if ratios[max(below)] != ratios[layer]:
            both = f"layer {layer} of ratio {ratios[layer]} and {max(below)} of ratio {ratios[max(below)]}"
            raise fail(f"{name} must be of their readers' ratio, got {both}")
        return max(below)

    layers = []
    for i, ratio in enumerate(ratios[:num_layers]):
        if ratio == 0:
            layers.append(V41Layer(index=i))
            continue
        after = candidates != -1 and i in index_ids and i > candidates
        if after and ratio != ratios[candidates]:
            raise fail(
                f"candidate_source_layer_id must be of the ratio of layer {i}, {ratio}, got {ratios[candidates]}"
            )
        kv_source, index_source = (source_of(i, name) for name in sources)
        layers.append(
            V41Layer(
                index=i,
                ratio=ratio,
                kv_source=kv_source,
                index_source=index_source,
                publishes=i == candidates,
                among_candidates=after,
            )
        )
    return tuple(layers)


@reads(*_V41_TYPES)
def _spec_of(config: Any) -> V41Spec:
    read, layers = _v41_reader(config), v41_layers(config)

    def need(name: str) -> Any:
        if (value := read(name)) is None:
            raise ValueError(f"ModelSpec.from_hf_config: the deepseek_v41 config has no {name}")
        return positive(name, value)

    head_dim, rope_dim = need("head_dim"), need("qk_rope_head_dim")
    publishes, entries = any(layer.publishes for layer in layers), _V41_PAGE_SIZE // max(V41_RATIOS)
    blocks, block_size = (need(name) if publishes else 0 for name in ("candidate_topk_blocks", "candidate_block_size"))
    if publishes and entries % block_size:
        divisor = f"a divisor of {entries}, got {block_size}"
        raise ValueError(f"ModelSpec.from_hf_config: candidate_block_size must be {divisor}")
    window = need("sliding_window")
    return V41Spec(
        name="deepseek_v41",
        num_heads=need("num_attention_heads"),
        qk_dim=head_dim,
        v_dim=head_dim,
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        softmax_scale=head_dim**-0.5,
        kv_layout=layout_of("deepseek_v41", (KVLayout.V41_FP8,), head_dim, rope_dim, head_dim),
        page_size=_V41_PAGE_SIZE,
        index_topk=need("index_topk"),
        index_heads=need("index_n_heads"),
        index_dim=index_dim_of(need("index_head_dim")),
        window=window,
        compress_ratios=tuple(sorted({layer.ratio for layer in layers})),
        has_attn_sink=True,
        compressed_layout=KVLayout.V41_FP4,
        index_format=IndexFormat.FP4,
        candidate_blocks=blocks,
        candidate_block_size=block_size,
        layers=tuple(layer.kind(kind_of_ratio(layer.ratio, window=window)) for layer in layers),
    )
