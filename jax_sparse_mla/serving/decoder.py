"""A step's inputs, and the parts of a decoder that all models share: embedding, a layer around its attention, head.

Each model's module (`deepseek_v4`, `deepseek_v32`, `glm53`) adds its attention by these functions:

    read_attention(config, kind, tensors)            weights, norms and further parameters of a layer's attention
    new_cache(config, layers, sizes)                 empty caches of layers of one pool
    prepare(config, pools, inputs)                   the step, with the metadata that all layers share
    attend(config, layer, cache, x, step, selected)  the attention's output, the cache after it, and the selection;
                                                     `selected` is what it attends to, where it does not select
    join_token(config, draft, token_rows, states)    the input of a draft layer, where there is one

and, where there is one, `DRAFT_PROJECTIONS` and `DRAFT_NORM`, the names of its tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.layers import V4Step
from jax_sparse_mla.metadata import ForwardBatch, RequestTables, V32Metadata
from jax_sparse_mla.serving import hyper_connections
from jax_sparse_mla.serving.config import Config
from jax_sparse_mla.serving.hyper_connections import Mixing, join
from jax_sparse_mla.serving.kda import KDAStep
from jax_sparse_mla.serving.layers import matmul, rms_norm
from jax_sparse_mla.serving.moe import feed_forward
from jax_sparse_mla.serving.params import (
    HeadParams,
    LayerParams,
    LayerWeights,
    LoopedLayers,
    ModelParams,
    NormParams,
    Run,
    layer_of,
)

ATTENTION, MLP = 0, 1  # the blocks of a layer


@pytree_dataclass
class StepInputs:
    """The inputs of a model's step, beside parameters and caches.

    Attributes:
      batch, tables: the step, as `prepare_v4_step` and `build_v32_metadata` take it.
      tokens, positions: int32 `[T]`, padded like the batch (padding rows: token 0, position 0). Attention alone reads
        no tokens.
      gathered: whether an EXTEND step gathers a bf16 workspace (True) or attends to the pages (False); None: the plan
        says (static).
      expanded: whether an EXTEND step of one prompt's rows from its start, all of which select all that they see,
        attends over expanded heads (static); see `deepseek_v32.attends_expanded`.
      backend: of the attention; None is the router's choice (static).
      batch_invariant: whether a row's result must not depend on the other rows (static).
      pages_axis: the mesh axis whose devices share the pages of the caches, as in `v4_layer` (static).
      trace: whether to keep each layer's attention input and selection (static).
      selected: int32 `[layers that select, T, k]`, positions that these layers (`Model.selecting_layers`) attend to
        instead of selecting; None: they select.
      return_selected: whether to return what they attend to (static).
    """

    batch: ForwardBatch
    tables: RequestTables
    tokens: jax.Array | None = None
    positions: jax.Array
    gathered: bool | None = static(default=None)
    expanded: bool = static(default=False)
    backend: str | None = static(default=None)
    batch_invariant: bool = static(default=False)
    pages_axis: str | None = static(default=None)
    trace: bool = static(default=False)
    selected: jax.Array | None = None
    return_selected: bool = static(default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Sizes of caches: pages of the full pool and of the window's, rows of the request tables, the most draft tokens of
    a step, and whether the layout is the unquantised one."""

    num_pages: int
    num_swa_pages: int
    max_requests: int
    max_draft_tokens: int = 0
    bf16: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A step, the metadata that its layers share, and those of linear attention. `index_scores` float32 `[T, columns]`
    select in place of the indexer's scores."""

    inputs: StepInputs
    shared: V4Step | V32Metadata
    kda: KDAStep | None = None
    index_scores: jax.Array | None = None


def layer_params(
    config: Config, params: ModelParams, run: Run, j: int, number: int | jax.Array = 0
) -> tuple[LayerParams, int | jax.Array]:
    """The parameters of layer j of a run's repetition, and its number in its pool; the repetition's may be traced."""
    like, pools = run.first + j, config.pools
    each = pools[run.first : run.first + run.period].count(pools[like])
    in_pool = config.number_in_pool(like) + number * each
    looped = isinstance(params.layers, LoopedLayers) and run in params.layers.runs
    parameters = LayerParams(
        kind=config.layer_kind(like)[0],
        weights=params.layers.at(run, j, number) if looped else params.layers[like],
        attention=layer_of(params.attention.get(pools[like]), in_pool),
    )
    return parameters, in_pool


class Streams(NamedTuple):
    """What flows from layer to layer: rows `[T, hidden]`, or residual streams `[T, n, hidden]`; and the output of the
    block before, with its mixing, where the next block joins them."""

    rows: jax.Array
    before: tuple[jax.Array, Mixing] | None = None

    def joined(self) -> jax.Array:
        return self.rows if self.before is None else join(self.rows, *self.before)


def embed(config: Config, params: ModelParams, tokens: jax.Array) -> Streams:
    """The rows of tokens, or residual streams that all begin with them."""
    rows = params.embedding[tokens]
    if config.streams is None:
        return Streams(rows)
    return Streams(jnp.broadcast_to(rows[:, None], (rows.shape[0], config.streams.streams, rows.shape[1])))


@functools.partial(jax.jit, static_argnames=("config", "block"))
def block_input(
    config: Config, weights: LayerWeights, norms: NormParams, streams: Streams, *, block: int
) -> tuple[Streams, jax.Array, Mixing | None]:
    """The streams, joined; the input `[T, hidden]` of a layer's attention or MLP; and how its output joins."""
    rows, x, mixing = _block_input(config, weights, norms, *streams, block)
    return Streams(rows), x, mixing


@functools.partial(jax.jit, static_argnames="config")
def after_attention(
    config: Config,
    weights: LayerWeights,
    norms: NormParams,
    streams: Streams,
    out: jax.Array,
    mixing: Mixing | None,
    tokens: jax.Array,
) -> Streams:
    """The streams after a layer, from the attention's output `[T, hidden]` on."""
    rows, x, mixing = _block_input(config, weights, norms, streams.joined(), (out, mixing), MLP)
    out = feed_forward(x, weights.mlp, norms.router_bias, tokens, config=config.moe, axis_name=config.axis_name)
    if mixing is None:
        return Streams(rows + out)
    after = Streams(rows, (out, mixing))
    return after if hyper_connections.joins_later(rows) else Streams(after.joined())


def _block_input(
    config: Config,
    weights: LayerWeights,
    norms: NormParams,
    streams: jax.Array,
    before: tuple[jax.Array, Mixing | None] | None,
    block: int,
) -> tuple[jax.Array, jax.Array, Mixing | None]:
    """As `hyper_connections.block_input`, also of one plain stream, whose mixing is None."""
    norm = (norms.attn_norm, norms.ffn_norm)[block]
    if config.streams is None:
        streams = streams if before is None else streams + before[0]
        return streams, rms_norm(streams, norm, config.norm_eps), None
    fn, options = (weights.attn_fn, weights.ffn_fn)[block], {"config": config.streams, "norm_eps": config.norm_eps}
    return hyper_connections.block_input(streams, fn, norm, before, **options)


@functools.partial(jax.jit, static_argnames="config")
def last_rows(config: Config, head: HeadParams, streams: Streams) -> tuple[jax.Array, jax.Array]:
    """`[T, hidden]`, from which logits are made: V4's head joins the streams, GLM-5.3 takes their mean; and what a
    draft layer reads of each row: V4's streams, of other models the same rows."""
    if head.fn is not None:
        options = {"config": config.streams, "norm_eps": config.norm_eps}
        rows, hidden, _ = hyper_connections.block_input(streams.rows, head.fn, head.norm, streams.before, **options)
        return hidden, rows
    rows = streams.joined()
    if config.streams is not None:
        rows = jnp.mean(rows.astype(jnp.float32), axis=1).astype(rows.dtype)
    hidden = rms_norm(rows, head.norm, config.norm_eps)
    return hidden, hidden


def logits(params: ModelParams, hidden: jax.Array) -> jax.Array:
    """float32 `[n, vocab]` of `last_rows`."""
    return matmul(hidden, params.embedding if params.unembedding is None else params.unembedding)
