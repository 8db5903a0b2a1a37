"""A model's parameters.

Weights that read the same rows are joined, so that a layer's input is multiplied once. Small parameters of a layer
share an array, since each array costs the host some microseconds a step. They do not share one with other layers: the
place of a layer in an array would be a constant of XLA's kernels, which would be compiled for each layer again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.layers import V4LayerParams
from jax_sparse_mla.serving.moe import DenseParams, MoEParams
from jax_sparse_mla.serving.quantised import Weight

_LONGEST_PERIOD = 4  # layers that repeat together: GLM's models have an order of four


@pytree_dataclass
class LatentNorms:
    """Norms inside an attention layer."""

    q_norm: jax.Array  # `[q_rank]`, of the queries' RMSNorm: float32 for V4, else in the model's dtype
    kv_norm: jax.Array  # `[512]`, of the latent's RMSNorm, likewise
    index_norm: jax.Array | None = None  # `[2, 128]`, weight and bias of the index keys' LayerNorm; zeros if unindexed
    index_ape: jax.Array | None = None  # float32 `[pool, 128]`, added to scores that weigh a pool's keys (GLM-5.3)


@pytree_dataclass
class NormParams:
    """A layer's small parameters."""

    attn_norm: jax.Array  # `[hidden]`, of the RMSNorm before attention: float32 for V4, else in the model's dtype
    ffn_norm: jax.Array  # before the MLP, likewise
    router_bias: jax.Array  # float32 `[experts]`; zeros in a layer without a router or with a table of experts
    latent: LatentNorms | None = None  # None for GLM-5.3, whose layers have no common form


@pytree_dataclass
class Packed:
    """Small arrays in one of each dtype, one behind the other."""

    form: Any = static()  # the arrays' pytree
    parts: tuple[tuple[int, tuple[int, ...]], ...] = static()  # of each array the number in `packed`, and its shape
    packed: list[jax.Array]  # one-dimensional, by dtype in the order of their first arrays

    @classmethod
    def of(cls, tree: Any) -> Packed:
        """The arrays of a pytree."""
        arrays, form = jax.tree.flatten(tree)
        dtypes = list(dict.fromkeys(x.dtype for x in arrays))
        return cls(
            form=form,
            parts=tuple((dtypes.index(x.dtype), x.shape) for x in arrays),
            packed=[jnp.concatenate([x.ravel() for x in arrays if x.dtype == dtype]) for dtype in dtypes],
        )

    def tree(self) -> Any:
        """The pytree."""
        begins, arrays = [0] * len(self.packed), []
        for number, shape in self.parts:
            begin = begins[number]
            begins[number] += math.prod(shape)
            arrays.append(self.packed[number][begin : begins[number]].reshape(shape))
        return jax.tree.unflatten(self.form, arrays)


@pytree_dataclass
class LayerWeights:
    """A layer's weights, `[out, in]`: those of its attention and of its MLP, which is wide or has experts; its
    `NormParams`; `hyper_connections.with_affine` before the two, None without
    streams."""

    attention: Any
    mlp: MoEParams | DenseParams
    norms: Packed
    attn_fn: jax.Array | None = None
    ffn_fn: jax.Array | None = None


@pytree_dataclass
class LayerParams:
    """One layer's parameters."""

    kind: Hashable = static()  # of its attention, see `layer_kind` of the config
    weights: LayerWeights
    attention: Any = None  # further small ones of attention: V4's `V4LayerParams`, GLM-5.3's `LatentNorms`, `KDAParams`

    @functools.cached_property
    def norms(self) -> NormParams:
        """The layer's small parameters."""
        return self.weights.norms.tree()


@pytree_dataclass
class HeadParams:
    """From the last rows to those that logits are made of: the final norm `[hidden]`; for V4 the
    head's `hyper_connections.with_affine`, which joins the residual streams."""

    norm: jax.Array
    fn: jax.Array | None = None


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
class BlockDraftParams:
    """The parameters of DSpark's drafter; embedding and logits' weights are the model's."""

    target_proj: Weight  # `[hidden, targets * hidden]`
    target_norm: jax.Array  # float32 `[hidden]`
    stages: list[LayerParams]
    head: HeadParams
    markov_rows: jax.Array  # `[vocab, rank]`, of the token before
    markov_logits: jax.Array  # `[vocab, rank]`


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers from `first` on: `period` of them, and again layers of the same kinds in their order, `times` in all."""

    first: int
    period: int = 1
    times: int = 1

    def number_of(self, i: int) -> int:
        """The number of layer i's repetition; negative or too large for a layer of another run."""
        return (i - self.first) // self.period


def runs_of(kinds: Sequence[Hashable]) -> tuple[Run, ...]:
    """The runs of a model's layers, of which each begins with the longest repetition that there is."""
    runs, first = [], 0
    while first < len(kinds):
        best = Run(first)
        for period in range(1, _LONGEST_PERIOD + 1):
            blocks = [kinds[i : i + period] for i in range(first, len(kinds), period)]
            times = next((n for n, block in enumerate(blocks) if block != blocks[0]), len(blocks))
            if times > 1 and times * period > best.times * best.period:
                best = Run(first, period, times)
        runs.append(best)
        first += best.period * best.times
    return tuple(runs)


def joined(*arrays: jax.Array) -> jax.Array:
    """Arrays in one. XLA on a CPU would widen a whole bfloat16 array to float32 before it takes a part of it: bfloat16
    is kept as its bits."""
    traced = isinstance(arrays[0], jax.core.Tracer)
    array = (jnp if traced else np).stack(arrays)  # numpy compiles nothing
    return jnp.asarray(array.view(np.uint16) if array.dtype == jnp.bfloat16 else array)


def _part(array: jax.Array, number: int | jax.Array) -> jax.Array:
    part = array[number]
    return lax.bitcast_convert_type(part, jnp.bfloat16) if part.dtype == jnp.uint16 else part


@pytree_dataclass
class LoopedLayers:
    """The weights of a model's layers for a program that loops over those of a run: `weights` has those of each run's
    first `period` layers, and where `times` is above 1 their arrays have a leading dimension, the repetitions."""

    runs: tuple[Run, ...] = static()
    weights: list[list[LayerWeights]]

    def at(self, run: Run, j: int, number: int | jax.Array) -> LayerWeights:
        """The weights of layer j of a repetition, whose number may be traced."""
        weights = self.weights[self.runs.index(run)][j]
        return weights if run.times == 1 else jax.tree.map(lambda array: _part(array, number), weights)

    def __getitem__(self, i: int) -> LayerWeights:
        run = next(run for run in self.runs if 0 <= run.number_of(i) < run.times)
        return self.at(run, (i - run.first) % run.period, run.number_of(i))


@pytree_dataclass
class ModelParams:
    """A model's parameters."""

    embedding: jax.Array  # `[vocab, hidden]`
    unembedding: jax.Array | None  # `[vocab, hidden]`; None: the logits' weights are the embedding
    head: HeadParams
    layers: list[LayerWeights] | LoopedLayers
    attention: dict[Hashable, Any]  # `LayerParams.attention`, stacked by `Config.pools`
    draft: DraftParams | BlockDraftParams | None = None


def stack_layers(layers: Sequence[Any]) -> Any:
    """Small parameters of several layers in the same arrays."""
    if isinstance(layers[0], V4LayerParams):
        return V4LayerParams.stack(layers)
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def layer_of(stacked: Any, number: int | jax.Array) -> Any:
    """One layer's parameters of `stack_layers`; the number may be traced."""
    if isinstance(stacked, V4LayerParams):
        return stacked.layer(number)
    return jax.tree.map(lambda array: array[number], stacked)
