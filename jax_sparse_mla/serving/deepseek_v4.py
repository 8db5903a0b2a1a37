"""DeepSeek-V4: its parameters and its forward step.

Weights that read the same rows are joined, so that a layer's input is multiplied once. Small parameters of all layers
share arrays, since each array costs the host some microseconds a step. Large weights are arrays of their own: XLA would
copy a layer's part of a stacked one before it multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.layers import (
    CompressorParams,
    IndexRows,
    V4LayerCache,
    V4LayerParams,
    V4Rows,
    V4Step,
    prepare_v4_step,
    v4_layer,
)
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.models import INDEXED_RATIO
from jax_sparse_mla.rope import rope_interleaved
from jax_sparse_mla.serving.config import V4Config
from jax_sparse_mla.serving.layers import (
    collapse_streams,
    expand_streams,
    head_of_streams,
    linear,
    matmul,
    normalised,
    rms_norm,
    split,
    summed,
)
from jax_sparse_mla.serving.moe import MoEParams, moe
from jax_sparse_mla.serving.tensors import Tensors

V4Caches = dict[int, V4LayerCache]  # by ratio, the caches of all its layers


@pytree_dataclass
class V4Weights:
    """A layer's large weights, `[out, in]`.

    Attributes:
      in_proj: `[widths, hidden]`, all that reads the layer's input, in the order of `_input_widths`.
      q_b: `[heads * 512 + index_heads * 128, q_rank]`, queries, then those of the indexer (ratio 4).
      o_a: `[groups, o_rank, heads / groups * 512]`. o_b: `[hidden, groups * o_rank]`.
      attn_fn, ffn_fn: of the hyper-connections before attention and experts, see `collapse_streams`.
      moe: the experts.
    """

    in_proj: jax.Array
    q_b: jax.Array
    o_a: jax.Array
    o_b: jax.Array
    attn_fn: jax.Array
    ffn_fn: jax.Array
    moe: MoEParams


@pytree_dataclass
class NormParams:
    """A layer's small parameters, all float32; in `V4Params` with a leading dimension, the layers.

    Attributes:
      attn_norm, ffn_norm `[hidden]`, q_norm `[q_rank]`, kv_norm `[512]`: of the RMSNorms.
      base `[2, (2 + n) * n]`, scale `[2, 3]`: of the hyper-connections before attention and experts.
      router_bias: `[experts]`; zeros in a hash layer.
    """

    attn_norm: jax.Array
    ffn_norm: jax.Array
    q_norm: jax.Array
    kv_norm: jax.Array
    base: jax.Array
    scale: jax.Array
    router_bias: jax.Array


@pytree_dataclass
class V4Draft:
    """The draft layer's parameters; embedding and logits' weights are the model's.

    Attributes:
      token_norm, states_norm: float32 `[hidden]`, of the next token's row and of each stream.
      e_proj, h_proj: `[hidden, hidden]`, what those are multiplied by before they are added.
      weights, small, attention: of a layer of ratio 0.
      norm, head_fn, head_base, head_scale: as in `V4Params`.
    """

    token_norm: jax.Array
    states_norm: jax.Array
    e_proj: jax.Array
    h_proj: jax.Array
    weights: V4Weights
    small: NormParams
    attention: V4LayerParams
    norm: jax.Array
    head_fn: jax.Array
    head_base: jax.Array
    head_scale: jax.Array


@pytree_dataclass
class V4Params:
    """A model's parameters: embedding `[vocab, hidden]`, the logits' weights (None: the embedding), the final norm, the
    last streams' `head_fn`, `head_base`, `head_scale`, and the layers': `layers` has the large weights of each, `small`
    the small ones of all, `attention` by ratio what `v4_layer` takes, `draft` the draft layer's, if there is one."""

    embedding: jax.Array
    unembedding: jax.Array | None
    norm: jax.Array
    head_fn: jax.Array
    head_base: jax.Array
    head_scale: jax.Array
    small: NormParams
    attention: dict[int, V4LayerParams]
    layers: list[V4Weights]
    draft: V4Draft | None = None


# --- parameters ------------------------------------------------------------------------------------


def read_params(config: V4Config, tensors: Tensors, draft_layer: bool) -> V4Params:
    """The parameters, of tensors by the names of transformers' modules, the draft layer's behind "draft."."""
    layers = [tensors.layer(_read_layer, config, i, _kind(config, i)) for i in range(config.num_layers)]
    weights, small, attention = zip(*layers)
    size = config.vocab_size, config.hidden_size
    return V4Params(
        embedding=tensors("embed_tokens.weight", size),
        unembedding=None if config.tied else tensors("lm_head.weight", size),
        **_read_head(config, tensors),
        small=jax.tree.map(lambda *arrays: jnp.stack(arrays), *small),
        attention={
            ratio: V4LayerParams.stack([part for part, of in zip(attention, config.ratios) if of == ratio])
            for ratio in sorted(set(config.ratios))
        },
        layers=list(weights),
        draft=_read_draft(config, tensors) if draft_layer else None,
    )


def _read_head(config: V4Config, tensors: Tensors) -> dict[str, jax.Array]:
    """From the streams to the rows that logits are made of."""
    hidden, n = config.hidden_size, config.streams.streams
    return {
        "norm": tensors.float32("norm.weight", (hidden,)),
        "head_fn": tensors.float32("hc_head.hc_fn", (n, n * hidden)),
        "head_base": tensors.float32("hc_head.hc_base", (n,)),
        "head_scale": tensors.float32("hc_head.hc_scale", (1,)),
    }


def _read_draft(config: V4Config, tensors: Tensors) -> V4Draft:
    i, hidden = config.num_layers, config.hidden_size
    weights, small, attention = tensors.layer(_read_layer, config, i, _kind(config, i))
    tensors = tensors.under("draft.")
    return V4Draft(
        token_norm=tensors.float32("enorm.weight", (hidden,)),
        states_norm=tensors.float32("hnorm.weight", (hidden,)),
        e_proj=tensors("e_proj.weight", (hidden, hidden)),
        h_proj=tensors("h_proj.weight", (hidden, hidden)),
        weights=weights,
        small=small,
        attention=attention,
        **_read_head(config, tensors),
    )


def _kind(config: V4Config, i: int) -> tuple[int, bool]:
    """A layer's ratio, and whether it is a hash layer; the draft layer's are not in the config."""
    return (config.ratios[i], config.hashed[i]) if i < config.num_layers else (0, False)


def _input_widths(config: V4Config, ratio: int) -> list[int]:
    """Rows of `in_proj`: the queries' rank, K, the compressor's values and scores, the indexer's, its weights."""
    spec = config.spec
    widths = [config.q_rank, spec.qk_dim]
    if ratio:
        widths += 2 * [spec.qk_dim * _coff(ratio)]
    if ratio == INDEXED_RATIO:
        widths += [2 * spec.index_dim, 2 * spec.index_dim, spec.index_heads]
    return widths


def _coff(ratio: int) -> int:
    """Windows of ratio 4 overlap, so a token makes two rows."""
    return 2 if ratio == INDEXED_RATIO else 1


def _read_layer(config: V4Config, i: int, tensors: Tensors) -> tuple[V4Weights, NormParams, V4LayerParams]:
    spec, hidden, n = config.spec, config.hidden_size, config.streams.streams
    ratio, hashed = _kind(config, i)
    tensors = tensors.under(f"layers.{i}." if i < config.num_layers else "draft.")
    attn, indexer = tensors.under("self_attn."), tensors.under("self_attn.compressor.indexer.")

    inputs = ["q_a_proj", "kv_proj"] + ["compressor.kv_proj", "compressor.gate_proj"] * bool(ratio)
    queries = [attn("q_b_proj.weight", (spec.num_heads * spec.qk_dim, config.q_rank))]
    if ratio == INDEXED_RATIO:
        inputs += [f"compressor.indexer.{name}" for name in ("kv_proj", "gate_proj", "scorer.weights_proj")]
        queries.append(indexer("q_b_proj.weight", (spec.index_heads * spec.index_dim, config.q_rank)))
    in_proj = [attn(f"{x}.weight", (width, hidden)) for x, width in zip(inputs, _input_widths(config, ratio))]
    grouped = spec.num_heads * spec.v_dim // config.o_groups
    mixes = (2 + n) * n

    def streams(name, *shape):
        return [tensors.float32(f"{block}_hc.{name}", shape) for block in ("attn", "ffn")]

    def compressor(part: Tensors, dim: int) -> CompressorParams:
        return CompressorParams(
            ape=part.float32("position_bias", (ratio, _coff(ratio) * dim)),
            norm_weight=part.float32("kv_norm.weight", (dim,)),
            inv_freq=jnp.asarray(config.compress_rope.inv_freq()),
            norm_eps=config.norm_eps,
        )

    attn_fn, ffn_fn = streams("fn", mixes, n * hidden)
    weights = V4Weights(
        in_proj=jnp.concatenate(in_proj),
        q_b=jnp.concatenate(queries),
        o_a=attn("o_a_proj.weight", (config.o_groups * config.o_rank, grouped)).reshape(config.o_groups, -1, grouped),
        o_b=attn("o_b_proj.weight", (hidden, config.o_groups * config.o_rank)),
        attn_fn=attn_fn,
        ffn_fn=ffn_fn,
        moe=tensors.under("mlp.").moe(config.moe, hidden, config.vocab_size if hashed else None),
    )
    experts = (config.moe.num_experts,)
    small = NormParams(
        attn_norm=tensors.float32("input_layernorm.weight", (hidden,)),
        ffn_norm=tensors.float32("post_attention_layernorm.weight", (hidden,)),
        q_norm=attn.float32("q_a_norm.weight", (config.q_rank,)),
        kv_norm=attn.float32("kv_norm.weight", (spec.qk_dim,)),
        base=jnp.stack(streams("base", mixes)),
        scale=jnp.stack(streams("scale", 3)),
        router_bias=jnp.zeros(experts) if hashed else tensors.float32("mlp.gate.e_score_correction_bias", experts),
    )
    attention = V4LayerParams(
        attn_sink=attn.float32("sinks", (spec.num_heads,)),
        compressor=compressor(attn.under("compressor."), spec.qk_dim) if ratio else None,
        index_compressor=compressor(indexer, spec.index_dim) if ratio == INDEXED_RATIO else None,
    )
    return weights, small, attention


# --- a step ----------------------------------------------------------------------------------------


def new_caches(config: V4Config, **sizes) -> V4Caches:
    """Empty caches of all layers; `sizes` as of `V4LayerCache.zeros`."""
    return {
        ratio: V4LayerCache.zeros(config.spec, ratio, num_layers=config.ratios.count(ratio), **sizes)
        for ratio in sorted(set(config.ratios))
    }


def layer_cache(config: V4Config, caches: V4Caches, i: int) -> V4LayerCache:
    """The view of layer i's caches."""
    return caches[config.ratios[i]].layer(_number(config, i))


def with_layer_cache(config: V4Config, caches: V4Caches, i: int, cache: V4LayerCache) -> V4Caches:
    """The caches with what `layer_cache` gave, updated."""
    return caches | {config.ratios[i]: cache.whole()}


def forward(
    config: V4Config,
    params: V4Params,
    caches: V4Caches,
    batch: ForwardBatch,
    tables: RequestTables,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    layers: int,
    gathered: bool | None,
    backend: str | None,
    trace: Callable[[jax.Array, jax.Array | None], None],
) -> tuple[jax.Array, jax.Array, V4Caches, jax.Array]:
    """As `Model.forward`: hidden rows, the streams that they are made of, caches and overflow; `trace` is called with
    each layer's input and selection."""
    step = _prepare(config, batch, tables, gathered)
    rows = params.embedding[tokens]
    streams = jnp.broadcast_to(rows[:, None], (rows.shape[0], config.streams.streams, config.hidden_size))
    for i in range(layers):
        layer, ratio = _layer(config, params, i), config.ratios[i]
        options = {"positions": positions, "tokens": tokens, "backend": backend, "trace": trace}
        streams, cache = _run(config, layer, layer_cache(config, caches, i), streams, batch, step, **options)
        caches = caches | {ratio: cache.whole()}
    return _last(config, params, streams), streams, caches, step.overflow


def new_draft(
    config: V4Config, params: V4Params, *, num_pages: int, num_swa_pages: int, max_requests: int, bf16: bool
) -> tuple[V4LayerCache, jax.Array]:
    """The draft layer's empty cache, a window, and zeros in the place of each request's streams."""
    sizes = {"num_pages": num_pages, "num_swa_pages": num_swa_pages, "max_requests": max_requests, "bf16": bf16}
    states = jnp.zeros((max_requests, config.streams.streams, config.hidden_size), params.embedding.dtype)
    return V4LayerCache.zeros(config.spec, 0, **sizes), states


def draft(
    config: V4Config,
    params: V4Params,
    cache: V4LayerCache,
    batch: ForwardBatch,
    tables: RequestTables,
    tokens: jax.Array,
    positions: jax.Array,
    states: jax.Array,
    *,
    gathered: bool | None,
    backend: str | None,
) -> tuple[jax.Array, jax.Array, V4LayerCache, jax.Array]:
    """As `Model.draft`: hidden rows, the streams that they are made of, the cache and overflow."""
    own, step = params.draft, _prepare(config, batch, tables, gathered)
    layer = _Layer(0, own.weights, own.small, own.attention)
    options = {"positions": positions, "tokens": tokens, "backend": backend, "trace": lambda *_: None}
    streams = _join_token(config, own, params.embedding[tokens], states)
    streams, cache = _run(config, layer, cache, streams, batch, step, **options)
    return _last(config, own, streams), streams, cache.whole(), step.overflow


def attention(
    config: V4Config,
    params: V4Params,
    caches: V4Caches,
    batch: ForwardBatch,
    tables: RequestTables,
    x: jax.Array,
    positions: jax.Array,
    *,
    layers: Sequence[int],
    gathered: bool | None,
    backend: str | None,
    index_scores: jax.Array | None,
) -> tuple[jax.Array, V4Caches]:
    """As `Model.attention`: some layers' attention alone, each from its input to its output."""
    step = _prepare(config, batch, tables, gathered)
    for i in layers:
        layer = _layer(config, params, i)
        rows = _project(config, layer.ratio, layer.weights, layer.small, x, positions)
        options = {"backend": backend, "index_scores": index_scores}
        out, cache, _ = _attend(config, layer, layer_cache(config, caches, i), rows, batch, step, **options)
        caches = caches | {layer.ratio: cache.whole()}
        x = _project_out(config, layer.ratio, layer.weights, out.astype(x.dtype), positions)
    return x, caches


class _Layer(NamedTuple):
    """A layer's ratio and parameters."""

    ratio: int
    weights: V4Weights
    small: NormParams
    attention: V4LayerParams


def _layer(config: V4Config, params: V4Params, i: int) -> _Layer:
    ratio = config.ratios[i]
    small = jax.tree.map(lambda x: x[i], params.small)
    return _Layer(ratio, params.layers[i], small, params.attention[ratio].layer(_number(config, i)))


def _number(config: V4Config, i: int) -> int:
    """A layer's number among those of its ratio."""
    return config.ratios[:i].count(config.ratios[i])


def _prepare(config: V4Config, batch: ForwardBatch, tables: RequestTables, gathered: bool | None) -> V4Step:
    return prepare_v4_step(config.spec, batch, tables, gathered=gathered if batch.mode is ForwardMode.EXTEND else False)


def _run(
    config: V4Config,
    layer: _Layer,
    cache: V4LayerCache,
    streams: jax.Array,
    batch: ForwardBatch,
    step: V4Step,
    *,
    positions: jax.Array,
    tokens: jax.Array,
    backend: str | None,
    trace: Callable[[jax.Array, jax.Array | None], None],
) -> tuple[jax.Array, V4LayerCache]:
    """The streams after a layer, and its cache."""
    ratio, weights, small, _ = layer
    x, rows, post, comb = _before_attention(config, ratio, weights, small, streams, positions)
    out, cache, selected = _attend(config, layer, cache, rows, batch, step, backend=backend)
    trace(x, selected)
    return _after_attention(config, ratio, weights, small, streams, out, post, comb, positions, tokens), cache


def _attend(
    config: V4Config,
    layer: _Layer,
    cache: V4LayerCache,
    rows: V4Rows,
    batch: ForwardBatch,
    step: V4Step,
    *,
    backend: str | None,
    index_scores: jax.Array | None = None,
) -> tuple[jax.Array, V4LayerCache, jax.Array | None]:
    """`v4_layer`: its output, the cache after it, and the selected positions."""
    return v4_layer(
        cache,
        rows,
        layer.attention,
        batch,
        step.metadata,
        step.plans.get(layer.ratio),
        spec=config.spec,
        ratio=layer.ratio,
        index_scores=index_scores,
        backend=backend,
    )


@functools.partial(jax.jit, static_argnames="config")
def _join_token(config: V4Config, draft: V4Draft, token_rows: jax.Array, streams: jax.Array) -> jax.Array:
    """The draft layer's streams, of the next token's embedding and of the streams before it."""
    token_rows = linear(rms_norm(token_rows, draft.token_norm, config.norm_eps), draft.e_proj)
    rows = rms_norm(streams, draft.states_norm, config.norm_eps).reshape(-1, config.hidden_size)
    return token_rows[:, None] + linear(rows, draft.h_proj).reshape(streams.shape)


@functools.partial(jax.jit, static_argnames=("config", "ratio"))
def _before_attention(config: V4Config, ratio: int, weights: V4Weights, small: NormParams, streams, positions):
    """The attention's input `[T, hidden]`, its projected rows, and how its output joins the streams."""
    x, post, comb = collapse_streams(
        streams, weights.attn_fn, small.base[0], small.scale[0], config=config.streams, norm_eps=config.norm_eps
    )
    x = rms_norm(x, small.attn_norm, config.norm_eps)
    return x, _project(config, ratio, weights, small, x, positions), post, comb


def _project(config: V4Config, ratio: int, weights: V4Weights, small: NormParams, x, positions) -> V4Rows:
    spec, eps = config.spec, config.norm_eps
    inv_freq = jnp.asarray(config.rope(ratio).inv_freq())

    def heads(rows, count, dim):
        return rows.reshape(-1, count, dim)

    def rotated(rows):
        return rope_interleaved(rows, positions[:, None], inv_freq)

    q_a, kv, *rest = split(linear(x, weights.in_proj), *_input_widths(config, ratio))
    q = linear(rms_norm(q_a, small.q_norm, eps), weights.q_b)
    q, index_q = split(q, spec.num_heads * spec.qk_dim, q.shape[1] - spec.num_heads * spec.qk_dim)
    q = heads(q, spec.num_heads, spec.qk_dim)
    kv = rotated(rms_norm(kv, small.kv_norm, eps)[:, None])[:, 0]
    compressed = dict(zip(("compressed_kv", "compressed_score"), rest[:2]))
    index = None
    if ratio == INDEXED_RATIO:
        index_kv, index_score, index_weights = rest[2:]
        index = IndexRows(
            q=rotated(heads(index_q, spec.index_heads, spec.index_dim)),
            weights=index_weights.astype(jnp.float32) * (spec.index_dim * spec.index_heads) ** -0.5,
            kv=index_kv,
            score=index_score,
        )
    return V4Rows(q=rotated(normalised(q, eps).astype(q.dtype)), kv=kv, **compressed, index=index)


def _project_out(config: V4Config, ratio: int, weights: V4Weights, out, positions) -> jax.Array:
    """The attention's output `[T, hidden]`."""
    # V is K with its rope part, so the output is rotated back at the query's position.
    inv_freq = jnp.asarray(config.rope(ratio).inv_freq())
    out = rope_interleaved(out, positions[:, None], inv_freq, inverse=True)
    grouped = out.reshape(out.shape[0], config.o_groups, -1)
    grouped = jnp.einsum("tgd,god->tgo", grouped, weights.o_a)
    return summed(matmul(grouped.reshape(out.shape[0], -1), weights.o_b), config.axis_name).astype(out.dtype)


@functools.partial(jax.jit, static_argnames=("config", "ratio"))
def _after_attention(
    config: V4Config, ratio: int, weights: V4Weights, small: NormParams, streams, out, post, comb, positions, tokens
):
    """The streams after the attention's output projection and the experts."""
    eps = config.norm_eps
    out = _project_out(config, ratio, weights, out.astype(streams.dtype), positions)
    streams = expand_streams(streams, out, post, comb)
    x, post, comb = collapse_streams(
        streams, weights.ffn_fn, small.base[1], small.scale[1], config=config.streams, norm_eps=eps
    )
    x = rms_norm(x, small.ffn_norm, eps)
    options = {"config": config.moe, "float32_router": False, "axis_name": config.axis_name}
    out = moe(x, weights.moe, small.router_bias, tokens, **options)
    return expand_streams(streams, out, post, comb)


@functools.partial(jax.jit, static_argnames="config")
def _last(config: V4Config, params: V4Params | V4Draft, streams):
    rows = head_of_streams(
        streams,
        params.head_fn,
        params.head_base,
        params.head_scale,
        eps=config.streams.eps,
        norm_eps=config.norm_eps,
    )
    return rms_norm(rows, params.norm, config.norm_eps)
