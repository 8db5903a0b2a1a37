"""DeepSeek-V4: a config becomes a spec and its layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.models.config import is_int, layout_of, reader
from jax_sparse_mla.models.kinds import kind_of_ratio
from jax_sparse_mla.models.spec import ModelSpec, reads

# transformers names a layer by its kind; the checkpoint by its compress ratio.
_V4_LAYER_KIND = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def v4_layer_ratios(config: Any) -> tuple[int, ...]:
    """The compress ratio of each layer of a V4 config (mapping or transformers config), in layer order. Released
    configs give that of the draft layer behind them."""
    read = reader(config)
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


@reads("deepseek_v4")
def _spec_of(config: Any) -> ModelSpec:
    read = reader(config)
    head_dim = read("head_dim", 512)
    rope_dim = read("qk_rope_head_dim") or round(head_dim * (read("partial_rotary_factor") or 64 / 512))
    ratios, window, num_layers = v4_layer_ratios(config), read("sliding_window", 128), read("num_hidden_layers")
    layers = ratios[:num_layers] if is_int(num_layers) else ratios
    kv_layout = layout_of("deepseek_v4", (KVLayout.V4_FP8,), head_dim, rope_dim, head_dim)  # refuses other dimensions
    return ModelSpec(
        name="deepseek_v4",
        num_heads=read("num_attention_heads", 64),
        qk_dim=head_dim,
        v_dim=head_dim,
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        softmax_scale=head_dim**-0.5,
        kv_layout=kv_layout,
        page_size=256,
        index_topk=read("index_topk", 512),
        index_heads=read("index_n_heads", 64),
        index_dim=read("index_head_dim", 128),
        window=window,
        compress_ratios=tuple(sorted(set(ratios))),
        has_attn_sink=True,
        layers=tuple(kind_of_ratio(ratio, window=window) for ratio in layers),
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
