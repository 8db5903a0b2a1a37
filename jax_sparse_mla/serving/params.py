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
    """Norms inside an attention layer.

    Attributes:
      q_norm, kv_norm: `[q_rank]` and `[512]`, of the RMSNorms of queries and latent: float32 for V4, else in the
        model's dtype.
      index_norm: `[2, 128]`, weight and bias of the index keys' LayerNorm, zeros in a layer without an indexer.
      index_ape: float32 `[pool, 128]`, added to the scores that weigh the keys of a pool (GLM-5.3).
    """

    q_norm: jax.Array
    kv_norm: jax.Array
    index_norm: jax.Array | None = None
    index_ape: jax.Array | None = None


@pytree_dataclass
class NormParams:
    """A layer's small parameters; in `ModelParams` with a leading dimension, the layers.

    Attributes:
      attn_norm, ffn_norm: `[hidden]`, of the RMSNorms before attention and MLP: float32 for V4, else in the model's
        dtype.
      router_bias: float32 `[experts]`; zeros in a layer without a router or with a table of experts.
      latent: the norms inside attention; None for GLM-5.3, whose layers have no common form.
      base, scale: float32 `[2, (2 + n) * n]` and `[2, 3]`, of the hyper-connections before attention and MLP; None
        without them.
    """

    attn_norm: jax.Array
    ffn_norm: jax.Array
    router_bias: jax.Array
    latent: LatentNorms | None = None
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
    """One layer's parameters.

    Attributes:
      kind: the kind of its attention, see `layer_kind` of the config (static).
      weights, norms: the large and the small ones.
      attention: further small ones of attention: V4's `V4LayerParams`, GLM-5.3's `LatentNorms` or `KDAParams`.
    """

    kind: Hashable = static()
    weights: LayerWeights
    norms: NormParams
    attention: Any = None


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
    """The draft layer's parameters; embedding and logits' weights are the model's.

    Attributes:
      token_norm, states_norm: `[hidden]`, of the next token's row and of the state before it (of each stream).
      projections: V4 multiplies the two by `[hidden, hidden]` each and adds them, the token's first; V3.2 multiplies
        both in a row by one `[hidden, 2 * hidden]`.
      layer, head: as in the model.
    """

    token_norm: jax.Array
    states_norm: jax.Array
    projections: list[jax.Array]
    layer: LayerParams
    head: HeadParams


@pytree_dataclass
class ModelParams:
    """A model's parameters.

    Attributes:
      embedding, unembedding: `[vocab, hidden]`; the logits' weights are the embedding where there are none.
      head: the final norm.
      layers: the large weights of each layer.
      norms: the small parameters of all layers, stacked.
      attention: `LayerParams.attention`, stacked by `Config.pools`.
      draft: the draft layer's, if there is one.
    """

    embedding: jax.Array
    unembedding: jax.Array | None
    head: HeadParams
    layers: list[LayerWeights]
    norms: NormParams
    attention: dict[Hashable, Any]
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
