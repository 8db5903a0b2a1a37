"""The module of each model, and its parameters by the names of transformers' modules."""

from __future__ import annotations

import jax.numpy as jnp

from jax_sparse_mla.serving import deepseek_v4, deepseek_v32, glm53
from jax_sparse_mla.serving.config import BlockDrafter, Config, Glm53Config, V4Config, V32Config
from jax_sparse_mla.serving.hyper_connections import with_affine
from jax_sparse_mla.serving.params import (
    BlockDraftParams,
    DraftParams,
    HeadParams,
    LayerParams,
    LayerWeights,
    ModelParams,
    NormParams,
    Packed,
    stack_layers,
)
from jax_sparse_mla.serving.tensors import Tensors

MODULES = {V4Config: deepseek_v4, V32Config: deepseek_v32, Glm53Config: glm53}


def read_params(config: Config, tensors: Tensors, draft_layer: bool) -> ModelParams:
    """The parameters of tensors by the names of transformers' modules, those of the draft layer behind "draft."."""
    layers = [tensors.layer(_read_layer, config, i, config.layer_kind(i)) for i in range(config.num_layers)]
    size = config.vocab_size, config.hidden_size
    return ModelParams(
        embedding=tensors("embed_tokens.weight", size),
        unembedding=None if config.tied else tensors("lm_head.weight", size),
        head=_read_head(config, tensors, "norm.weight"),
        layers=[layer.weights for layer in layers],
        attention={
            pool: stack_layers([layer.attention for layer, its_pool in zip(layers, config.pools) if its_pool == pool])
            for pool in set(config.pools)
        },
        draft=_read_drafter(config, tensors) if draft_layer else None,
    )


def _read_norm(config: Config, tensors: Tensors, name: str):
    shape = (config.hidden_size,)
    return tensors.float32(name, shape) if config.float32_norms else tensors(name, shape)


def _read_head(config: Config, tensors: Tensors, name: str) -> HeadParams:
    norm = _read_norm(config, tensors, name)
    if config.streams is None or not config.streams.has_head:
        return HeadParams(norm=norm)
    n = config.streams.streams
    return HeadParams(
        norm=norm,
        fn=with_affine(
            tensors.float32("hc_head.hc_fn", (n, n * config.hidden_size)),
            tensors.float32("hc_head.hc_base", (n,)),
            tensors.float32("hc_head.hc_scale", (1,)),
        ),
    )


def _read_drafter(config: Config, tensors: Tensors) -> DraftParams | BlockDraftParams:
    if isinstance(config, V4Config) and config.block_drafter is not None:
        return _read_block_drafter(config, config.block_drafter, tensors)
    i, hidden, module = config.num_layers, config.hidden_size, MODULES[type(config)]
    layer = tensors.layer(_read_layer, config, i, config.layer_kind(i))
    tensors = tensors.under("draft.")
    return DraftParams(
        token_norm=_read_norm(config, tensors, "enorm.weight"),
        states_norm=_read_norm(config, tensors, "hnorm.weight"),
        projections=[tensors.stored(f"{x}.weight", (hidden, n * hidden)) for x, n in module.DRAFT_PROJECTIONS.items()],
        layer=layer,
        head=_read_head(config, tensors, module.DRAFT_NORM),
    )


def _read_block_drafter(config: V4Config, drafter: BlockDrafter, tensors: Tensors) -> BlockDraftParams:
    hidden, layers, number = config.hidden_size, config.num_layers, len(drafter.targets)
    stages = [tensors.layer(_read_layer, config, i, config.layer_kind(i)) for i in range(layers, layers + number)]
    first, last = tensors.under("draft.0."), tensors.under(f"draft.{number - 1}.")
    size = config.vocab_size, drafter.markov_rank
    return BlockDraftParams(
        target_proj=first.stored("main_proj.weight", (hidden, number * hidden)),
        target_norm=_read_norm(config, first, "main_norm.weight"),
        stages=stages,
        head=_read_head(config, last, "norm.weight"),
        markov_rows=last("markov_head.markov_w1.weight", size),
        markov_logits=last("markov_head.markov_w2.weight", size),
    )


def _read_layer(config: Config, i: int, tensors: Tensors) -> LayerParams:
    """The parameters of layer i; behind the last one are the draft layer, or the stages of a drafter."""
    kind, mlp_kind = config.layer_kind(i)
    is_stage = getattr(config, "block_drafter", None) is not None
    draft = f"draft.{i - config.num_layers}." if is_stage else "draft."
    tensors = tensors.under(f"layers.{i}." if i < config.num_layers else draft)
    read_attention = MODULES[type(config)].read_attention
    attention, latent, attention_params = read_attention(config, kind, tensors.under("self_attn."))
    hidden, experts, mlp = config.hidden_size, (config.moe.num_experts,), tensors.under("mlp.")
    if mlp_kind == "dense":
        mlp_weights = mlp.swiglu(config.dense_width, hidden)
    else:
        mlp_weights = mlp.moe(config.moe, hidden, config.vocab_size if mlp_kind == "hash" else None)
    attn_fn = ffn_fn = None
    if config.streams is not None:
        n = config.streams.streams

        shapes = {"fn": ((2 + n) * n, n * hidden), "base": ((2 + n) * n,), "scale": (3,)}
        attn_fn, ffn_fn = (
            with_affine(*(tensors.float32(f"{block}_hc.{name}", shape) for name, shape in shapes.items()))
            for block in ("attn", "ffn")
        )
    has_bias = mlp_kind == "moe"
    norms = NormParams(
        attn_norm=_read_norm(config, tensors, "input_layernorm.weight"),
        ffn_norm=_read_norm(config, tensors, "post_attention_layernorm.weight"),
        router_bias=mlp.float32("gate.e_score_correction_bias", experts) if has_bias else jnp.zeros(experts),
        latent=latent,
    )
    return LayerParams(
        kind=kind,
        weights=LayerWeights(
            attention=attention, mlp=mlp_weights, norms=Packed.of(norms), attn_fn=attn_fn, ffn_fn=ffn_fn
        ),
        attention=attention_params,
    )
