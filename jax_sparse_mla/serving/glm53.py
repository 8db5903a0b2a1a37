"""GLM-5.3-Flash (`glm5_next`): its parameters and its forward step; how they are arranged is said in `deepseek_v4.py`.

Three of four layers have linear attention, `serving.kda`. The others are V3.2's without rope, with an index key for
each pool of tokens. Residual streams and hyper-connections are V4's; the last streams are averaged.

Linear attention carries a state for each request that is that of its last token. So this model neither drafts nor
verifies: a rejected token could not be taken back. Its draft layer is not read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.layers import V32LayerCache, V32Rows, gathers, v32_layer
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables, V32Metadata, build_v32_metadata
from jax_sparse_mla.serving.config import Glm53Config
from jax_sparse_mla.serving.deepseek_v32 import DenseParams
from jax_sparse_mla.serving.kda import KDAParams, KDARows, KDAState, KDAStep, gated_norm, kda_layer, prepare
from jax_sparse_mla.serving.layers import (
    collapse_streams,
    expand_streams,
    layer_norm,
    linear,
    mlp,
    rms_norm,
    split,
)
from jax_sparse_mla.serving.moe import MoEParams, moe
from jax_sparse_mla.serving.tensors import Tensors

INDEX_NORM_EPS = 1e-6


@pytree_dataclass
class SparseWeights:
    """A sparse attention layer's large weights: in_proj in the order of `_input_widths`; q_b, k_up, v_up and o_proj as
    in `V32Weights`."""

    in_proj: jax.Array
    q_b: jax.Array
    k_up: jax.Array
    v_up: jax.Array
    o_proj: jax.Array


@pytree_dataclass
class SparseSmall:
    """Its small parameters: q_norm `[q_rank]`, kv_norm `[512]`, index_norm `[2, 128]` (weight and bias) in the model's
    dtype; index_ape float32 `[pool, 128]`, added to the scores that weigh the keys of a pool."""

    q_norm: jax.Array
    kv_norm: jax.Array
    index_norm: jax.Array
    index_ape: jax.Array


@pytree_dataclass
class LinearWeights:
    """A linear attention layer's large weights: in_proj in the order of `_input_widths`, decay_b and gate_b
    `[heads * dim, dim]` from the ranks of the decay and of the output's gate, o_proj `[hidden, heads * dim]`."""

    in_proj: jax.Array
    decay_b: jax.Array
    gate_b: jax.Array
    o_proj: jax.Array


@pytree_dataclass
class Glm53Weights:
    """A layer's large weights: of its attention; of its MLP; attn_fn and ffn_fn float32, of the hyper-connections
    before the two, see `collapse_streams`."""

    attention: SparseWeights | LinearWeights
    mlp: MoEParams | DenseParams
    attn_fn: jax.Array
    ffn_fn: jax.Array


@pytree_dataclass
class Glm53Small:
    """A layer's small parameters; in `Glm53Params` with a leading dimension, the layers.

    attn_norm and ffn_norm `[hidden]`, of the RMSNorms, in the model's dtype; float32 base `[2, (2 + n) * n]` and scale
    `[2, 3]`, of the hyper-connections before attention and MLP, and router_bias `[experts]`, zeros in a dense layer.
    """

    attn_norm: jax.Array
    ffn_norm: jax.Array
    base: jax.Array
    scale: jax.Array
    router_bias: jax.Array


@pytree_dataclass
class Glm53Params:
    """A model's parameters: embedding `[vocab, hidden]`, the logits' weights (None: the embedding), the final norm, and
    the layers': `layers` has the large weights of each, `small` the small ones of all, `sparse` and `linear` the small
    ones of the attention of all layers of their kind (None: there is none). There is no draft layer."""

    embedding: jax.Array
    unembedding: jax.Array | None
    norm: jax.Array
    small: Glm53Small
    sparse: SparseSmall
    linear: KDAParams | None
    layers: list[Glm53Weights]
    draft: None = None


@pytree_dataclass
class Glm53Caches:
    """What the layers keep between steps: the caches of those with sparse attention, the states of the others."""

    sparse: V32LayerCache
    linear: KDAState | None


# --- parameters ------------------------------------------------------------------------------------


def read_params(config: Glm53Config, tensors: Tensors, draft_layer: bool) -> Glm53Params:
    """The parameters, of tensors by the names of transformers' text model."""
    kinds = zip(config.linear, config.dense)
    layers = [tensors.layer(_read_layer, config, i, kind) for i, kind in enumerate(kinds)]
    weights, small, of_attention = zip(*layers)
    size = config.vocab_size, config.hidden_size

    def stacked(parts):
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts) if parts else None

    return Glm53Params(
        embedding=tensors("embed_tokens.weight", size),
        unembedding=None if config.tied else tensors("lm_head.weight", size),
        norm=tensors("norm.weight", (config.hidden_size,)),
        small=stacked(small),
        sparse=stacked([part for part in of_attention if isinstance(part, SparseSmall)]),
        linear=stacked([part for part in of_attention if isinstance(part, KDAParams)]),
        layers=list(weights),
    )


def _input_widths(config: Glm53Config, is_linear: bool) -> list[int]:
    """Rows of `in_proj`. Linear attention: queries, keys and values together, the ranks of decay and gate, β. Sparse:
    the queries' rank, the latent, index keys, their scores, the indexer's weights."""
    spec, kda = config.spec, config.kda
    if is_linear:
        return [3 * kda.heads * kda.head_dim, kda.head_dim, kda.head_dim, kda.heads]
    return [config.q_rank, spec.nope_dim, spec.index_dim, spec.index_dim, spec.index_heads]


def _read_layer(
    config: Glm53Config, i: int, tensors: Tensors
) -> tuple[Glm53Weights, Glm53Small, SparseSmall | KDAParams]:
    hidden, n = config.hidden_size, config.streams.streams
    tensors = tensors.under(f"layers.{i}.")
    read = _read_linear if config.linear[i] else _read_sparse
    attention, of_attention = read(config, tensors.under("self_attn."))
    experts, mixes = (config.moe.num_experts,), (2 + n) * n
    if config.dense[i]:
        feed_forward = DenseParams(**tensors.under("mlp.").swiglu(config.dense_width, hidden))
        bias = jnp.zeros(experts)
    else:
        feed_forward = tensors.under("mlp.").moe(config.moe, hidden, None)
        bias = tensors.float32("mlp.gate.e_score_correction_bias", experts)

    def streams(name, *shape):
        return [tensors.float32(f"{block}_hc.{name}", shape) for block in ("attn", "ffn")]

    attn_fn, ffn_fn = streams("fn", mixes, n * hidden)
    small = Glm53Small(
        attn_norm=tensors("input_layernorm.weight", (hidden,)),
        ffn_norm=tensors("post_attention_layernorm.weight", (hidden,)),
        base=jnp.stack(streams("base", mixes)),
        scale=jnp.stack(streams("scale", 3)),
        router_bias=bias,
    )
    return Glm53Weights(attention=attention, mlp=feed_forward, attn_fn=attn_fn, ffn_fn=ffn_fn), small, of_attention


def _read_sparse(config: Glm53Config, attn: Tensors) -> tuple[SparseWeights, SparseSmall]:
    spec, hidden, indexer = config.spec, config.hidden_size, attn.under("indexer.")
    heads = spec.num_heads
    kv_b = attn("kv_b_proj.weight", (heads * (config.nope_dim + config.v_dim), spec.nope_dim))
    kv_b = kv_b.reshape(heads, -1, spec.nope_dim)
    inputs = [
        attn("q_a_proj.weight", (config.q_rank, hidden)),
        attn("kv_a_proj_with_mqa.weight", (spec.nope_dim, hidden)),
        indexer("wk.weight", (spec.index_dim, hidden)),
        indexer("index_kpool_compress_gate", (spec.index_dim, hidden)),
        indexer("weights_proj.weight", (spec.index_heads, hidden)),
    ]
    queries = [
        attn("q_b_proj.weight", (heads * config.nope_dim, config.q_rank)),
        indexer("wq_b.weight", (spec.index_heads * spec.index_dim, config.q_rank)),
    ]
    weights = SparseWeights(
        in_proj=jnp.concatenate(inputs),
        q_b=jnp.concatenate(queries),
        k_up=kv_b[:, : config.nope_dim],
        v_up=kv_b[:, config.nope_dim :],
        o_proj=attn("o_proj.weight", (hidden, heads * config.v_dim)),
    )
    small = SparseSmall(
        q_norm=attn("q_a_layernorm.weight", (config.q_rank,)),
        kv_norm=attn("kv_a_layernorm.weight", (spec.nope_dim,)),
        index_norm=jnp.stack([indexer(f"k_norm.{name}", (spec.index_dim,)) for name in ("weight", "bias")]),
        index_ape=indexer.float32("index_kpool_compress_ape", (spec.index_pool, spec.index_dim)),
    )
    return weights, small


def _read_linear(config: Glm53Config, attn: Tensors) -> tuple[LinearWeights, KDAParams]:
    kda, hidden = config.kda, config.hidden_size
    width, dim = kda.heads * kda.head_dim, kda.head_dim
    inputs = [attn(f"{name}_proj.weight", (width, hidden)) for name in "qkv"]
    inputs += [attn(f"{name}_a_proj.weight", (dim, hidden)) for name in ("forget_gate.f", "g")]
    weights = LinearWeights(
        in_proj=jnp.concatenate([*inputs, attn("b_proj.weight", (kda.heads, hidden))]),
        decay_b=attn("forget_gate.f_b_proj.weight", (width, dim)),
        gate_b=attn("g_b_proj.weight", (width, dim)),
        o_proj=attn("o_proj.weight", (hidden, width)),
    )
    small = KDAParams(
        conv=attn.float32("conv1d.weight", (3 * width, 1, kda.kernel))[:, 0],
        dt_bias=attn.float32("forget_gate.dt_bias", (width,)),
        a_log=attn.float32("forget_gate.A_log", (kda.heads,)),
        o_norm=attn.float32("o_norm.weight", (dim,)),
    )
    return weights, small


# --- a step ----------------------------------------------------------------------------------------


def new_caches(
    config: Glm53Config, *, num_pages: int, num_swa_pages: int, max_requests: int, max_draft_tokens: int, bf16: bool
) -> Glm53Caches:
    """Empty caches and states of all layers. There is no window."""
    sizes = {"num_pages": num_pages, "bf16": bf16, "max_requests": max_requests}
    count = sum(config.linear)
    return Glm53Caches(
        sparse=V32LayerCache.zeros(config.spec, num_layers=config.num_layers - count, **sizes),
        linear=KDAState.zeros(config.kda, max_requests, num_layers=count) if count else None,
    )


def layer_cache(config: Glm53Config, caches: Glm53Caches, i: int) -> V32LayerCache | KDAState:
    """The view of a layer's caches."""
    return (caches.linear if config.linear[i] else caches.sparse).layer(_number(config, i))


def with_layer_cache(config: Glm53Config, caches: Glm53Caches, i: int, cache: V32LayerCache | KDAState) -> Glm53Caches:
    """The caches with what `layer_cache` gave, updated."""
    return dataclasses.replace(caches, **{"linear" if config.linear[i] else "sparse": cache.whole()})


def _number(config: Glm53Config, i: int) -> int:
    """A layer's number among those of its kind."""
    return config.linear[:i].count(config.linear[i])


def forward(
    config: Glm53Config,
    params: Glm53Params,
    caches: Glm53Caches,
    batch: ForwardBatch,
    tables: RequestTables,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    layers: int,
    gathered: bool | None,
    backend: str | None,
    trace: Callable[[jax.Array, jax.Array | None], None],
) -> tuple[jax.Array, jax.Array, Glm53Caches, jax.Array]:
    """As `Model.forward`: hidden rows, the same again, caches and overflow; `trace` is called with each layer's input
    and selection. A batch of drafts is refused."""
    step = _prepare(config, caches, batch, tables, gathered)
    rows = params.embedding[tokens]
    streams = jnp.broadcast_to(rows[:, None], (rows.shape[0], config.streams.streams, rows.shape[1]))
    for i in range(layers):
        weights, small = params.layers[i], jax.tree.map(lambda x, i=i: x[i], params.small)
        x, post, comb = _before_attention(config, weights, small, streams)
        out, caches, selected = _attend(config, params, i, caches, x, batch, step, backend=backend)
        trace(x, selected)
        streams = _after_attention(config, weights, small, streams, out, post, comb, tokens)
    mean = jnp.mean(streams.astype(jnp.float32), axis=1).astype(streams.dtype)
    hidden = rms_norm(mean, params.norm, config.norm_eps)
    return hidden, hidden, caches, step[0].overflow


def attention(
    config: Glm53Config,
    params: Glm53Params,
    caches: Glm53Caches,
    batch: ForwardBatch,
    tables: RequestTables,
    x: jax.Array,
    positions: jax.Array,
    *,
    layers: Sequence[int],
    gathered: bool | None,
    backend: str | None,
    index_scores: jax.Array | None,
) -> tuple[jax.Array, Glm53Caches]:
    """As `Model.attention`: some layers' attention alone, each from its input to its output."""
    step = _prepare(config, caches, batch, tables, gathered)
    for i in layers:
        x, caches, _ = _attend(config, params, i, caches, x, batch, step, backend=backend, index_scores=index_scores)
    return x, caches


def _prepare(
    config: Glm53Config, caches: Glm53Caches, batch: ForwardBatch, tables: RequestTables, gathered: bool | None
) -> tuple[V32Metadata, KDAStep]:
    spec = config.spec
    if gathered is None:
        gathered = batch.mode is ForwardMode.EXTEND and gathers(spec, batch.out_cache_loc.shape[0])
    metadata = build_v32_metadata(
        spec,
        batch,
        tables,
        fp8_kv_cache=caches.sparse.kv.layout is spec.kv_layout,
        prefill_backend="flashmla_sparse" if gathered else "flashmla_kv",
    )
    return metadata, prepare(batch, metadata)


def _attend(
    config: Glm53Config,
    params: Glm53Params,
    i: int,
    caches: Glm53Caches,
    x: jax.Array,
    batch: ForwardBatch,
    step: tuple[V32Metadata, KDAStep],
    *,
    backend: str | None,
    index_scores: jax.Array | None = None,
) -> tuple[jax.Array, Glm53Caches, jax.Array | None]:
    """A layer's attention from its input `[T, hidden]` to its output, the caches after it, and what it selected."""
    weights, cache, selected = params.layers[i].attention, layer_cache(config, caches, i), None
    own = params.linear if config.linear[i] else params.sparse
    small = jax.tree.map(lambda array: array[_number(config, i)], own)
    metadata, of_rows = step
    if config.linear[i]:
        rows, gate = _project_linear(config, weights, x)
        chunked = batch.mode is not ForwardMode.DECODE
        out, cache = kda_layer(cache, rows, small, of_rows, config=config.kda, chunked=chunked)
        out = gated_norm(out, gate, small.o_norm, config.norm_eps)
    else:
        rows = _project_sparse(config, weights, small, x)
        options = {"index_ape": small.index_ape, "index_scores": index_scores, "backend": backend}
        out, cache, selected = v32_layer(cache, rows, batch, metadata, spec=config.spec, **options)
        out = jnp.einsum("thl,hvl->thv", out.astype(x.dtype), weights.v_up)
    caches = with_layer_cache(config, caches, i, cache)
    return linear(out.reshape(out.shape[0], -1), weights.o_proj), caches, selected


def _project_linear(config: Glm53Config, weights: LinearWeights, x: jax.Array) -> tuple[KDARows, jax.Array]:
    """The rows, and the output's gate `[T, heads, dim]`."""
    qkv, decay, gate, beta = split(linear(x, weights.in_proj), *_input_widths(config, True))
    gate = linear(gate, weights.gate_b).reshape(-1, config.kda.heads, config.kda.head_dim)
    return KDARows(qkv=qkv, decay=linear(decay, weights.decay_b), beta=beta), gate


def _project_sparse(config: Glm53Config, weights: SparseWeights, small: SparseSmall, x: jax.Array) -> V32Rows:
    spec = config.spec
    projected = split(linear(x, weights.in_proj), *_input_widths(config, False))
    q_a, latent, index_k, index_score, index_weights = projected
    q_all = linear(rms_norm(q_a, small.q_norm, config.norm_eps), weights.q_b)
    width = spec.num_heads * config.nope_dim
    q, index_q = split(q_all, width, q_all.shape[1] - width)
    return V32Rows(
        q=jnp.einsum("thd,hdl->thl", q.reshape(-1, spec.num_heads, config.nope_dim), weights.k_up),
        kv=rms_norm(latent, small.kv_norm, config.norm_eps),
        index_q=index_q.reshape(-1, spec.index_heads, spec.index_dim),
        index_k=layer_norm(index_k, *small.index_norm, INDEX_NORM_EPS),
        index_weights=index_weights.astype(jnp.float32) * (spec.index_dim * spec.index_heads) ** -0.5,
        index_score=index_score,
    )


@functools.partial(jax.jit, static_argnames="config")
def _before_attention(config: Glm53Config, weights: Glm53Weights, small: Glm53Small, streams: jax.Array):
    """The attention's input `[T, hidden]`, and how its output joins the streams."""
    options = {"config": config.streams, "norm_eps": config.norm_eps}
    x, post, comb = collapse_streams(streams, weights.attn_fn, small.base[0], small.scale[0], **options)
    return rms_norm(x, small.attn_norm, config.norm_eps), post, comb


@functools.partial(jax.jit, static_argnames="config")
def _after_attention(config: Glm53Config, weights: Glm53Weights, small: Glm53Small, streams, out, post, comb, tokens):
    """The streams after the attention's output and the MLP."""
    streams = expand_streams(streams, out, post, comb)
    options = {"config": config.streams, "norm_eps": config.norm_eps}
    x, post, comb = collapse_streams(streams, weights.ffn_fn, small.base[1], small.scale[1], **options)
    x = rms_norm(x, small.ffn_norm, config.norm_eps)
    if isinstance(weights.mlp, DenseParams):
        out = mlp(x, weights.mlp.gate_up, weights.mlp.down, config.moe.limit)
    else:
        out = moe(x, weights.mlp, small.router_bias, tokens, config=config.moe, float32_router=True)
    return expand_streams(streams, out, post, comb)
