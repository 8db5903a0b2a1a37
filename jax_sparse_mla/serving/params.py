"""A model's parameters.

Weights that read the same rows are joined, so that a layer's input is multiplied once. Small parameters of all layers
share arrays, since each array costs the host some microseconds a step. Large weights are arrays of their own: XLA would
copy a layer's part of a stacked one before it multiplies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.layers import V4LayerParams
from jax_sparse_mla.serving.moe import DenseParams, MoEParams


@pytree_dataclass
class LatentNorms:
    """Norms inside an attention layer."""

    q_norm: jax.Array  # `[q_rank]`, of the queries' RMSNorm: float32 for V4, else in the model's dtype
    kv_norm: jax.Array  # `[512]`, of the latent's RMSNorm, likewise
    index_norm: jax.Array | None = None  # `[2, 128]`, weight and bias of the index keys' LayerNorm; zeros if unindexed
    index_ape: jax.Array | None = None  # float32 `[pool, 128]`, added to scores that weigh a pool's keys (GLM-5.3)


@pytree_dataclass
class NormParams:
    """A layer's small parameters; in `ModelParams` with a leading dimension, the layers."""

    attn_norm: jax.Array  # `[hidden]`, of the RMSNorm before attention: float32 for V4, else in the model's dtype
    ffn_norm: jax.Array  # before the MLP, likewise
    router_bias: jax.Array  # float32 `[experts]`; zeros in a layer without a router or with a table of experts
    latent: LatentNorms | None = None  # None for GLM-5.3, whose layers have no common form
    # Float32 `[2, (2 + n) * n]` and `[2, 3]`, of the hyper-connections before attention and MLP; None without them.
    base: jax.Array | None = None
    scale: jax.Array | None = None


@pytree_dataclass
class LayerWeights:
    """A layer's large weights, `[out, in]`: those of its attention and of its MLP, which is wide or has experts;
    float32 attn_fn and ffn_fn of the hyper-connections before the two (`collapse_streams`), None without them."""

    attention: Any
    mlp: MoEParams | DenseParams
    attn_fn: jax.Array | None = None
    ffn_fn: jax.Array | None = None


@pytree_dataclass
class LayerParams:
    """One layer's parameters."""

    kind: Hashable = static()  # of its attention, see `layer_kind` of the config
    weights: LayerWeights
    norms: NormParams
    attention: Any = None  # further small ones of attention: V4's `V4LayerParams`, GLM-5.3's `LatentNorms`, `KDAParams`


@pytree_dataclass
class HeadParams:
    """From the last rows to those that logits are made of: the final norm `[hidden]`; for V4 fn float32
    `[n, n * hidden]`, base `[n]` and scale `[1]`, which join the residual streams."""

    norm: jax.Array
    fn: jax.Array | None = None
    base: jax.Array | None = None
    scale: jax.Array | None = None


@pytree_dataclass
class DraftParams:
    """The draft layer's parameters; embedding and logits' weights are the model's."""

    token_norm: jax.Array  # `[hidden]`, of the next token's row
    states_norm: jax.Array  # `[hidden]`, of the state before it (of each stream)
    # V4 multiplies the two by `[hidden, hidden]` each and adds them, the token's first; V3.2 multiplies both in a row
    # by one `[hidden, 2 * hidden]`.
    projections: list[jax.Array]
    layer: LayerParams
    head: HeadParams


@pytree_dataclass
class ModelParams:
    """A model's parameters."""

    embedding: jax.Array  # `[vocab, hidden]`
    unembedding: jax.Array | None  # `[vocab, hidden]`; None: the logits' weights are the embedding
    head: HeadParams
    layers: list[LayerWeights]
    norms: NormParams  # of all layers, stacked
    attention: dict[Hashable, Any]  # `LayerParams.attention`, stacked by `Config.pools`
    draft: DraftParams | None = None


def stack_layers(layers: Sequence[Any]) -> Any:
    """Small parameters of several layers in the same arrays."""
    if isinstance(layers[0], V4LayerParams):
        return V4LayerParams.stack(layers)
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def layer_of(stacked: Any, number: int) -> Any:
    """One layer's parameters of `stack_layers`."""
    if isinstance(stacked, V4LayerParams):
        return stacked.layer(number)
    return jax.tree.map(lambda array: array[number], stacked)
