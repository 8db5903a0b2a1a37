"""DeepSeek-V3.2 and GLM-5: a config becomes a spec, whose layers select among the tokens themselves."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.models.config import is_int, layout_of, reader, rope_parameters
from jax_sparse_mla.models.kinds import LayerKind, kind_of_ratio
from jax_sparse_mla.models.spec import ModelSpec, reads


def yarn_mscale(factor: float, mscale_all_dim: float) -> float:
    """YaRN's attention magnitude `0.1 · mscale_all_dim · ln(factor) + 1`, whose square is a factor of V3.2's scale."""
    return 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0


# The defaults of transformers' config classes: heads, a head's values without rope, indexer heads.
_V32_SIZES = {"deepseek_v32": (128, 128, 64), "glm_moe_dsa": (64, 192, 32)}


@reads(*_V32_SIZES)
def _spec_of(config: Any) -> ModelSpec:
    read = reader(config)
    name = read("model_type")
    heads, head_nope_dim, index_heads = _V32_SIZES[name]
    nope_dim, rope_dim = read("kv_lora_rank", 512), read("qk_rope_head_dim", 64)
    head_dim = read("qk_nope_head_dim", head_nope_dim) + rope_dim
    rope = rope_parameters(config)
    mscale = 1.0
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        if rope.get("factor") is None:
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
        kv_layout=layout_of(name, (KVLayout.V32_FP8,), nope_dim + rope_dim, rope_dim, nope_dim),
        page_size=64,
        index_topk=read("index_topk", 2048),
        index_heads=read("index_n_heads", index_heads),
        index_dim=read("index_head_dim", 128),
        layers=_layer_kinds(config),
    )


def _layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """The kind of each layer; () where the config does not say it, which `indexed_layers` refuses."""
    if not is_int(reader(config)("num_hidden_layers")):
        return ()
    try:
        _, indexed = _layers_with_indexer(config)
    except ValueError:
        return ()
    indexing = kind_of_ratio(0, window=None)
    sharing = dataclasses.replace(indexing, selects="shared")
    return tuple(indexing if has_indexer else sharing for has_indexer in indexed)


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
    name, indexed = _layers_with_indexer(config)
    if not all(indexed) and reader(config)("model_type") != "glm_moe_dsa":
        raise ValueError(f"indexed_layers: {name} shares an indexer's entries, which only glm_moe_dsa does")
    if False in indexed[:1]:
        raise ValueError(f"indexed_layers: {name} must begin with a layer that has an indexer")
    return indexed


def _layers_with_indexer(config: Any) -> tuple[str, tuple[bool, ...]]:
    """The key that says which layers have an indexer of their own, and whether each layer has one."""
    read = reader(config)
    if (layers := read("num_hidden_layers")) is None:
        raise ValueError("indexed_layers: the config has no num_hidden_layers")
    freq, offset = read("index_topk_freq"), read("index_skip_topk_offset")
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
    for name, value in (("index_topk_freq", freq), ("index_skip_topk_offset", offset)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"indexed_layers: {name} must be an integer from 0 on, got {value!r}")
    name = next((name for name in ("indexer_types", "index_topk_pattern") if read(name) is not None), None)
    if name is None:
        name, indexed = "index_topk_freq", [max(i - offset + 1, 0) % max(freq, 1) == 0 for i in range(layers)]
    else:
        types = read(name)
        if not isinstance(types, (str, list, tuple)) or len(types) < layers:
            raise ValueError(f"indexed_layers: {name} must name {layers} layers, got {types!r}")
        if unknown := [kind for kind in types if kind not in list(_INDEXER_TYPES)]:
            raise ValueError(f"indexed_layers: {name} must be of {', '.join(_INDEXER_TYPES)}, got {unknown[0]!r}")
        indexed = [_INDEXER_TYPES[kind] for kind in types[:layers]]
    return name, tuple(indexed)


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
