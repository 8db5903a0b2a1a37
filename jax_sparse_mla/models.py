"""The attention constants of a model: head counts, dimensions, scale, cache layout, selection."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jax_sparse_mla.indexer.keys import INDEX_DIM, IndexFormat
from jax_sparse_mla.kv_cache.layout import KVLayout

# V4's compress ratio whose layers have an indexer; its layers of ratio 128 attend to every compressed entry.
INDEXED_RATIO = 4
# V4.1's, all of which select: by an indexer of their own or by that of an earlier layer.
V41_RATIOS = (1, 2)


def is_indexed(ratio: int) -> bool:
    """Whether a query of a layer of this compress ratio attends to selected entries alone, `index_topk` at most."""
    return ratio == INDEXED_RATIO or ratio in V41_RATIOS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The attention constants of a model, hashable (it may be a static argument).

    Attributes:
      name: the model's name in messages.
      num_heads: query heads of the whole model (a tensor-parallel rank holds a share of them).
      qk_dim, v_dim: values of a K row and of a V row; V is the leading part of K.
      nope_dim, rope_dim: values of a K row without and with rotary embedding, in this order.
      softmax_scale: the factor of q·k.
      kv_layout: the byte layout of a cached row.
      page_size: tokens per page of the request's own cache (V4: the sliding-window cache).
      index_topk: entries that the indexer keeps per query.
      index_heads, index_dim: the indexer's heads and head dimension.
      window: tokens of the sliding window; None where the model has none.
      compress_ratios: the distinct compress ratios of the layers, ascending; 0 is a sliding-window layer.
      has_attn_sink: whether each head has an attention sink.

    `index_pool`, `compressed_layout` and `index_format` are constants here, and fields of the classes below.
    """

    name: str
    num_heads: int
    qk_dim: int
    v_dim: int
    nope_dim: int
    rope_dim: int
    softmax_scale: float
    kv_layout: KVLayout
    page_size: int
    index_topk: int
    index_heads: int
    index_dim: int
    window: int | None = None
    compress_ratios: tuple[int, ...] = ()
    has_attn_sink: bool = False

    # Fields of `V41Spec`, and of `PooledModelSpec`, alone.
    compressed_layout = None
    index_format = IndexFormat.FP8
    index_pool = 1

    @property
    def index_width(self) -> int:
        """Columns of a row's selection: `index_topk`, and with pools the tokens of an unfinished one."""
        return self.index_topk + self.index_pool - 1

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelSpec:
        """The spec of a Hugging Face config: a checkpoint's `config.json` as a mapping, or a transformers config.

        Args:
          config: `model_type` must be `deepseek_v32`, `deepseek_v4`, `deepseek_v41`, `glm_moe_dsa` (GLM-5, 5.1, 5.2) or
            `glm5_next` (GLM-5.3: a `PooledModelSpec` of its layers with sparse attention). Both the checkpoint's own
            keys (`compress_ratios`, `rope_scaling`) and transformers' (`layer_types`, `rope_parameters`) are read.
            Those of V4.1 and GLM-5.3 may stand in its `text_config`.

        Raises:
          ValueError: another model type, dimensions for which no cache layout exists, or, of V4.1, what is missing or
            unknown, by its name.
        """
        read = _reader(config)
        model_type = read("model_type")
        if model_type == "deepseek_v4":
            return _v4_from_config(read)
        if model_type in _V41_TYPES:
            return _v41_from_config(config)
        if model_type in _V32_SIZES:
            return _v32_from_config(read)
        if model_type in GLM53_TYPES:
            return _glm53_from_config(_reader(text_config(config)))
        raise ValueError(
            "ModelSpec.from_hf_config: model_type must be 'deepseek_v32' or 'deepseek_v4' or 'glm_moe_dsa' or "
            f"'deepseek_v41' or 'glm5_next', got {model_type!r}"
        )


# GLM-5.3 with its vision tower, and its text model alone.
GLM53_TYPES = ("glm5_next", "glm5_next_text")


def text_config(config: Any) -> Any:
    """The part of a config that is the text model's: `text_config`, or all of it."""
    part = _reader(config)("text_config")
    return config if part is None else part


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledModelSpec(ModelSpec):
    """The constants of a model with an index key for each pool of tokens (KPool, GLM-5.3).

    Attributes:
      index_pool: tokens of an index key. `index_topk` counts tokens, in whole pools, and a page holds whole pools too.
    """

    index_pool: int = dataclasses.field()


def _reader(config: Any) -> Callable[..., Any]:
    """`read(key, default=None)` of a mapping or of an object with attributes."""
    if isinstance(config, Mapping):
        return config.get
    return lambda key, default=None: getattr(config, key, default)


def yarn_mscale(factor: float, mscale_all_dim: float) -> float:
    """YaRN's attention magnitude `0.1 · mscale_all_dim · ln(factor) + 1`, whose square is a factor of V3.2's scale."""
    return 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0


def _layout(model: str, layouts: tuple[KVLayout, ...], qk_dim: int, rope_dim: int, v_dim: int) -> KVLayout:
    for layout in layouts:
        if (layout.qk_dim, layout.rope_dim, layout.v_dim) == (qk_dim, rope_dim, v_dim):
            return layout
    known = ", ".join(f"{x} ({x.nope_dim} + {x.rope_dim}, v {x.v_dim})" for x in layouts)
    raise ValueError(
        f"ModelSpec.from_hf_config: {model} with {qk_dim - rope_dim} + {rope_dim} K values and {v_dim} V values "
        f"has no cache layout; known: {known}"
    )


# What transformers' config classes take for a missing key: heads, a head's values without rope, indexer heads.
_V32_SIZES = {"deepseek_v32": (128, 128, 64), "glm_moe_dsa": (64, 192, 32)}


def _v32_from_config(read) -> ModelSpec:
    name = read("model_type")
    heads, head_nope_dim, index_heads = _V32_SIZES[name]
    nope_dim, rope_dim = read("kv_lora_rank", 512), read("qk_rope_head_dim", 64)
    head_dim = read("qk_nope_head_dim", head_nope_dim) + rope_dim
    rope = read("rope_scaling") or read("rope_parameters") or {}
    mscale = 1.0
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        if "factor" not in rope:
            raise ValueError("ModelSpec.from_hf_config: the yarn rope parameters have no factor")
        mscale = yarn_mscale(rope["factor"], rope["mscale_all_dim"])
    return ModelSpec(
        name=name,
        num_heads=read("num_attention_heads", heads),
        qk_dim=nope_dim + rope_dim,
        v_dim=nope_dim,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        softmax_scale=head_dim**-0.5 * mscale**2,
        kv_layout=_layout(name, (KVLayout.V32_FP8,), nope_dim + rope_dim, rope_dim, nope_dim),
        page_size=64,
        index_topk=read("index_topk", 2048),
        index_heads=read("index_n_heads", index_heads),
        index_dim=read("index_head_dim", 128),
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise ValueError(f"ModelSpec.from_hf_config: {name} must be a positive integer, got {value!r}")
    return value


def _index_dim(value: Any) -> int:
    if value != INDEX_DIM:
        raise ValueError(f"ModelSpec.from_hf_config: index_head_dim must be {INDEX_DIM}, got {value}")
    return value


def _glm53_from_config(read) -> ModelSpec:
    latent, rope_dim, pool = read("kv_lora_rank", 512), read("qk_rope_head_dim", 0), read("index_kpool", 16)
    topk, index_dim = _positive("index_topk", read("index_topk", 2048)), _index_dim(read("index_head_dim", INDEX_DIM))
    if rope_dim:
        raise ValueError(f"ModelSpec.from_hf_config: qk_rope_head_dim must be 0 in glm5_next, got {rope_dim}")
    if not _is_int(pool) or pool < 2 or topk % pool:
        raise ValueError(
            "ModelSpec.from_hf_config: index_kpool must be an integer from 2 on that divides index_topk, got "
            f"{pool!r} and {topk}"
        )
    if read("index_kpool_always_select_tail") is False:
        raise ValueError("ModelSpec.from_hf_config: index_kpool_always_select_tail must be True, got False")
    return PooledModelSpec(
        name="glm5_next",
        num_heads=read("num_attention_heads", 64),
        qk_dim=latent,
        v_dim=latent,
        nope_dim=latent,
        rope_dim=0,
        softmax_scale=read("qk_nope_head_dim", 256) ** -0.5,
        kv_layout=_layout("glm5_next", (KVLayout.NOPE_FP8,), latent, 0, latent),
        page_size=64 * pool,  # so that a page has 64 index keys, as those of every model
        index_topk=topk,
        index_heads=read("index_n_heads", 32),
        index_dim=index_dim,
        index_pool=pool,
    )


_INDEXER_TYPES = {"full": True, "F": True, "shared": False, "S": False}


def indexed_layers(config: Any) -> tuple[bool, ...]:
    """Whether each layer of a model without a window has an indexer of its own, in layer order (IndexShare,
    arXiv 2603.12201); one without takes the entries that the last layer with one selected.

    Args:
      config: a mapping or a transformers config. `glm_moe_dsa` says it by `indexer_types`, else by
        `index_topk_pattern`, else by `index_topk_freq` and `index_skip_topk_offset`, as transformers reads them.

    Raises:
      ValueError: what cannot be read, by its name; a first layer without an indexer; sharing in another model.
    """
    read = _reader(config)
    if (layers := read("num_hidden_layers")) is None:
        raise ValueError("indexed_layers: the config has no num_hidden_layers")
    freq, offset = read("index_topk_freq"), read("index_skip_topk_offset")
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
    for name, value in (("index_topk_freq", freq), ("index_skip_topk_offset", offset)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"indexed_layers: {name} must be an integer from 0 on, got {value!r}")
    name = next((name for name in ("indexer_types", "index_topk_pattern") if read(name) is not None), None)
    if name is None:
        name, types = "index_topk_freq", [max(i - offset + 1, 0) % max(freq, 1) == 0 for i in range(layers)]
    else:
        given = read(name)
        if not isinstance(given, (str, list, tuple)) or len(given) < layers:
            raise ValueError(f"indexed_layers: {name} must name {layers} layers, got {given!r}")
        if unknown := [kind for kind in given if kind not in list(_INDEXER_TYPES)]:
            raise ValueError(f"indexed_layers: {name} must be of {', '.join(_INDEXER_TYPES)}, got {unknown[0]!r}")
        types = [_INDEXER_TYPES[kind] for kind in given[:layers]]
    if not all(types) and read("model_type") != "glm_moe_dsa":
        raise ValueError(f"indexed_layers: {name} shares an indexer's entries, which only glm_moe_dsa does")
    if False in types[:1]:
        raise ValueError(f"indexed_layers: {name} must begin with a layer that has an indexer")
    return tuple(types)


# transformers names a layer by its kind; the checkpoint by its compress ratio.
_V4_LAYER_KIND = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def v4_layer_ratios(config: Any) -> tuple[int, ...]:
    """The compress ratio of each layer of a V4 config (mapping or transformers config), in layer order."""
    read = _reader(config)
    if (ratios := read("compress_ratios")) is not None:
        return tuple(ratios)
    kinds = dict(_V4_LAYER_KIND, **(read("compress_rates") or {}))
    if (layer_types := read("layer_types")) is None:
        raise ValueError("ModelSpec.from_hf_config: a deepseek_v4 config needs compress_ratios or layer_types")
    if unknown := sorted(set(layer_types) - set(kinds)):
        raise ValueError(
            f"ModelSpec.from_hf_config: layer_types must be of {', '.join(kinds)}, got {', '.join(unknown)}"
        )
    return tuple(kinds[kind] for kind in layer_types)


def _v4_from_config(read) -> ModelSpec:
    head_dim = read("head_dim", 512)
    rope_dim = read("qk_rope_head_dim") or round(head_dim * (read("partial_rotary_factor") or 64 / 512))
    ratios = v4_layer_ratios({k: read(k) for k in ("compress_ratios", "compress_rates", "layer_types")})
    return ModelSpec(
        name="deepseek_v4",
        num_heads=read("num_attention_heads", 64),
        qk_dim=head_dim,
        v_dim=head_dim,
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        softmax_scale=head_dim**-0.5,
        kv_layout=_layout("deepseek_v4", (KVLayout.V4_FP8,), head_dim, rope_dim, head_dim),
        page_size=256,
        index_topk=read("index_topk", 512),
        index_heads=read("index_n_heads", 64),
        index_dim=read("index_head_dim", 128),
        window=read("sliding_window", 128),
        compress_ratios=tuple(sorted(set(ratios))),
        has_attn_sink=True,
    )


# A checkpoint's model_type, and that of the text_config in it.
_V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
_V41_PAGE_SIZE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    """What a layer of DeepSeek-V4.1 owns, and of which layers it reads the rest; a static argument of `v41_layer`.

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


def _v41_reader(config: Any) -> Callable[..., Any]:
    """`read(key, default=None)` of a V4.1 config, whose keys may stand in its text_config; those outside win."""
    outer = _reader(config)
    inner = _reader(text) if (text := outer("text_config")) is not None else lambda key, default=None: default

    def read(key, default=None):
        found = outer(key)
        return inner(key, default) if found is None else found

    return read


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
    if not _is_int(num_layers) or num_layers < 1:
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
        if not isinstance(sources[name], (list, tuple)) or not all(map(_is_int, sources[name])):
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
            found = f"layer {layer} of ratio {ratios[layer]} and {max(below)} of ratio {ratios[max(below)]}"
            raise fail(f"{name} must be of their readers' ratio, got {found}")
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


def _v41_from_config(config: Any) -> V41Spec:
    read, layers = _v41_reader(config), v41_layers(config)

    def need(name: str) -> Any:
        if (value := read(name)) is None:
            raise ValueError(f"ModelSpec.from_hf_config: the deepseek_v41 config has no {name}")
        return _positive(name, value)

    head_dim, rope_dim, index_dim = need("head_dim"), need("qk_rope_head_dim"), _index_dim(need("index_head_dim"))
    publishes = any(layer.publishes for layer in layers)
    blocks, block_size = (need(name) if publishes else 0 for name in ("candidate_topk_blocks", "candidate_block_size"))
    if publishes and (_V41_PAGE_SIZE // max(V41_RATIOS)) % block_size:
        raise ValueError(
            "ModelSpec.from_hf_config: candidate_block_size must be a divisor of "
            f"{_V41_PAGE_SIZE // max(V41_RATIOS)}, got {block_size}"
        )
    return V41Spec(
        name="deepseek_v41",
        num_heads=need("num_attention_heads"),
        qk_dim=head_dim,
        v_dim=head_dim,
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        softmax_scale=head_dim**-0.5,
        kv_layout=_layout("deepseek_v41", (KVLayout.V41_FP8,), head_dim, rope_dim, head_dim),
        page_size=_V41_PAGE_SIZE,
        index_topk=need("index_topk"),
        index_heads=need("index_n_heads"),
        index_dim=index_dim,
        window=need("sliding_window"),
        compress_ratios=tuple(sorted({layer.ratio for layer in layers})),
        has_attn_sink=True,
        compressed_layout=KVLayout.V41_FP4,
        index_format=IndexFormat.FP4,
        candidate_blocks=blocks,
        candidate_block_size=block_size,
    )


DEEPSEEK_V32 = ModelSpec(
    name="DeepSeek-V3.2",
    num_heads=128,
    qk_dim=576,
    v_dim=512,
    nope_dim=512,
    rope_dim=64,
    softmax_scale=192**-0.5 * yarn_mscale(40, 1.0) ** 2,
    kv_layout=KVLayout.V32_FP8,
    page_size=64,
    index_topk=2048,
    index_heads=64,
    index_dim=128,
)

DEEPSEEK_V4_FLASH = ModelSpec(
    name="DeepSeek-V4-Flash",
    num_heads=64,
    qk_dim=512,
    v_dim=512,
    nope_dim=448,
    rope_dim=64,
    softmax_scale=512**-0.5,
    kv_layout=KVLayout.V4_FP8,
    page_size=256,
    index_topk=512,
    index_heads=64,
    index_dim=128,
    window=128,
    compress_ratios=(0, 4, 128),
    has_attn_sink=True,
)

DEEPSEEK_V4_PRO = dataclasses.replace(DEEPSEEK_V4_FLASH, name="DeepSeek-V4-Pro", num_heads=128, index_topk=1024)
