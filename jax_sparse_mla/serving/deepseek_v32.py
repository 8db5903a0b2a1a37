"""DeepSeek-V3.2: its parameters and its forward step; how they are arranged is said in `deepseek_v4.py`.

A head's part without rope is multiplied into the latent space that the cache holds, and its output back out of it.

GLM-5 is the same model with other sizes. Some of its layers have no indexer, no index keys and no parameters of them:
they attend to what the last layer with an indexer selected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.layers import V32LayerCache, V32Rows, gathers, v32_layer
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables, V32Metadata, build_v32_metadata
from jax_sparse_mla.serving.config import V32Config
from jax_sparse_mla.serving.layers import layer_norm, linear, matmul, mlp, rms_norm, rotate, split, summed
from jax_sparse_mla.serving.moe import MoEParams, moe
from jax_sparse_mla.serving.tensors import Tensors

# Of the norms inside attention, whatever the config says of the others.
LATENT_NORM_EPS = 1e-6


@pytree_dataclass
class DenseParams:
    """A wide MLP: gate_up `[2 * width, hidden]`, the gate first, down `[hidden, width]`."""

    gate_up: jax.Array
    down: jax.Array


@pytree_dataclass
class V32Weights:
    """A layer's large weights, `[out, in]`.

    Attributes:
      in_proj: `[widths, hidden]`, all that reads the layer's input, in the order of `_input_widths`.
      q_b: `[heads * (nope_dim + rope_dim) + index_heads * 128, q_rank]`, queries, then those of the indexer, if any.
      k_up: `[heads, nope_dim, 512]`, v_up `[heads, v_dim, 512]`: from the latent to a head's key and value.
      o_proj: `[hidden, heads * v_dim]`.
      mlp: the experts, or the wide MLP of a dense layer.
    """

    in_proj: jax.Array
    q_b: jax.Array
    k_up: jax.Array
    v_up: jax.Array
    o_proj: jax.Array
    mlp: MoEParams | DenseParams


@pytree_dataclass
class V32Small:
    """A layer's small parameters; in `V32Params` with a leading dimension, the layers.

    attn_norm and ffn_norm `[hidden]`, q_norm `[q_rank]`, kv_norm `[512]`: of the RMSNorms, in the model's dtype;
    index_norm `[2, 128]`: weight and bias of the index keys' LayerNorm, zeros in a layer without an indexer;
    router_bias float32 `[experts]`, zeros in a dense layer.
    """

    attn_norm: jax.Array
    ffn_norm: jax.Array
    q_norm: jax.Array
    kv_norm: jax.Array
    index_norm: jax.Array
    router_bias: jax.Array


@pytree_dataclass
class V32Draft:
    """The draft layer's parameters; embedding and logits' weights are the model's.

    Attributes:
      token_norm, states_norm: `[hidden]`, of the next token's row and of the row before it.
      eh_proj: `[hidden, 2 * hidden]`, what both are multiplied by, the token's first.
      weights, small: of a layer. norm: `[hidden]`, of what it returns.
    """

    token_norm: jax.Array
    states_norm: jax.Array
    eh_proj: jax.Array
    weights: V32Weights
    small: V32Small
    norm: jax.Array


@pytree_dataclass
class V32Params:
    """A model's parameters: embedding `[vocab, hidden]`, the logits' weights (None: the embedding), the final norm,
    and the layers': `layers` has the large weights of each, `small` the small ones of all, `draft` the draft layer's,
    if there is one."""

    embedding: jax.Array
    unembedding: jax.Array | None
    norm: jax.Array
    small: V32Small
    layers: list[V32Weights]
    draft: V32Draft | None = None


# --- parameters ------------------------------------------------------------------------------------


def read_params(config: V32Config, tensors: Tensors, draft_layer: bool) -> V32Params:
    """The parameters, of tensors by the names of transformers' modules, the draft layer's behind "draft."."""
    kinds = zip(config.dense, config.indexed)
    layers = [tensors.layer(_read_layer, config, i, kind) for i, kind in enumerate(kinds)]
    weights, small = zip(*layers)
    size = config.vocab_size, config.hidden_size
    return V32Params(
        embedding=tensors("embed_tokens.weight", size),
        unembedding=None if config.tied else tensors("lm_head.weight", size),
        norm=tensors("norm.weight", (config.hidden_size,)),
        small=jax.tree.map(lambda *arrays: jnp.stack(arrays), *small),
        layers=list(weights),
        draft=_read_draft(config, tensors) if draft_layer else None,
    )


def _read_draft(config: V32Config, tensors: Tensors) -> V32Draft:
    i, hidden = config.num_layers, config.hidden_size
    weights, small = tensors.layer(_read_layer, config, i, (False, True))
    tensors = tensors.under("draft.")
    return V32Draft(
        token_norm=tensors("enorm.weight", (hidden,)),
        states_norm=tensors("hnorm.weight", (hidden,)),
        eh_proj=tensors("eh_proj.weight", (hidden, 2 * hidden)),
        weights=weights,
        small=small,
        norm=tensors("shared_head.norm.weight", (hidden,)),
    )


def _input_widths(config: V32Config, indexed: bool) -> list[int]:
    """Rows of `in_proj`: the queries' rank, the latent, its rope part; index keys, the indexer's weights."""
    spec = config.spec
    return [config.q_rank, spec.nope_dim, spec.rope_dim] + [spec.index_dim, spec.index_heads] * indexed


def _read_layer(config: V32Config, i: int, tensors: Tensors) -> tuple[V32Weights, V32Small]:
    spec, hidden = config.spec, config.hidden_size
    is_draft = i >= config.num_layers  # whose layer has experts and an indexer
    dense, indexed = (False, True) if is_draft else (config.dense[i], config.indexed[i])
    tensors = tensors.under("draft." if is_draft else f"layers.{i}.")
    attn, indexer, heads = tensors.under("self_attn."), tensors.under("self_attn.indexer."), spec.num_heads
    head_dim = config.nope_dim + spec.rope_dim
    in_proj = [
        attn("q_a_proj.weight", (config.q_rank, hidden)),
        attn("kv_a_proj_with_mqa.weight", (spec.qk_dim, hidden)),
    ]
    queries = [attn("q_b_proj.weight", (heads * head_dim, config.q_rank))]
    index_norm = jnp.zeros((2, spec.index_dim), tensors.dtype)
    if indexed:
        in_proj.append(indexer("wk.weight", (spec.index_dim, hidden)))
        in_proj.append(indexer("weights_proj.weight", (spec.index_heads, hidden)))
        queries.append(indexer("wq_b.weight", (spec.index_heads * spec.index_dim, config.q_rank)))
        index_norm = jnp.stack([indexer(f"k_norm.{name}", (spec.index_dim,)) for name in ("weight", "bias")])
    kv_b = attn("kv_b_proj.weight", (heads * (config.nope_dim + config.v_dim), spec.nope_dim))
    kv_b = kv_b.reshape(heads, -1, spec.nope_dim)
    experts = (config.moe.num_experts,)
    if dense:
        feed_forward = DenseParams(**tensors.under("mlp.").swiglu(config.dense_width, hidden))
        bias = jnp.zeros(experts)
    else:
        feed_forward = tensors.under("mlp.").moe(config.moe, hidden, None)
        bias = tensors.float32("mlp.gate.e_score_correction_bias", experts)
    weights = V32Weights(
        in_proj=jnp.concatenate(in_proj),
        q_b=jnp.concatenate(queries),
        k_up=kv_b[:, : config.nope_dim],
        v_up=kv_b[:, config.nope_dim :],
        o_proj=attn("o_proj.weight", (hidden, heads * config.v_dim)),
        mlp=feed_forward,
    )
    small = V32Small(
        attn_norm=tensors("input_layernorm.weight", (hidden,)),
        ffn_norm=tensors("post_attention_layernorm.weight", (hidden,)),
        q_norm=attn("q_a_layernorm.weight", (config.q_rank,)),
        kv_norm=attn("kv_a_layernorm.weight", (spec.nope_dim,)),
        index_norm=index_norm,
        router_bias=bias,
    )
    return weights, small


# --- a step ----------------------------------------------------------------------------------------


def new_caches(
    config: V32Config, *, num_pages: int, num_swa_pages: int, max_requests: int, max_draft_tokens: int, bf16: bool
) -> V32LayerCache:
    """Empty caches of all layers. There is no window and no state, so the pages are all that counts."""
    layers = {"num_layers": config.num_layers, "indexed": config.indexed}
    return V32LayerCache.zeros(config.spec, num_pages=num_pages, bf16=bf16, **layers)


def layer_cache(config: V32Config, caches: V32LayerCache, i: int) -> V32LayerCache:
    """The view of layer i's cache."""
    return caches.layer(i)


def with_layer_cache(config: V32Config, caches: V32LayerCache, i: int, cache: V32LayerCache) -> V32LayerCache:
    """The caches with what `layer_cache` gave, updated."""
    return cache.whole()


def forward(
    config: V32Config,
    params: V32Params,
    caches: V32LayerCache,
    batch: ForwardBatch,
    tables: RequestTables,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    layers: int,
    gathered: bool | None,
    backend: str | None,
    trace: Callable[[jax.Array, jax.Array | None], None],
) -> tuple[jax.Array, jax.Array, V32LayerCache, jax.Array]:
    """As `Model.forward`: hidden rows, which a draft layer reads as well, caches and overflow; `trace` is called with
    each layer's input and selection."""
    metadata, streams = _metadata(config, caches, batch, tables, gathered), params.embedding[tokens]
    selected = None
    for i in range(layers):
        weights, small = params.layers[i], jax.tree.map(lambda x, i=i: x[i], params.small)
        options = {"positions": positions, "tokens": tokens, "backend": backend, "trace": trace}
        options["selected"] = None if config.indexed[i] else selected
        streams, caches, selected = _run(config, weights, small, caches.layer(i), streams, batch, metadata, **options)
    hidden = rms_norm(streams, params.norm, config.norm_eps)
    return hidden, hidden, caches.whole(), metadata.overflow


def new_draft(
    config: V32Config, params: V32Params, *, num_pages: int, num_swa_pages: int, max_requests: int, bf16: bool
) -> tuple[V32LayerCache, jax.Array]:
    """The draft layer's empty cache, and zeros in the place of each request's row."""
    states = jnp.zeros((max_requests, config.hidden_size), params.embedding.dtype)
    return V32LayerCache.zeros(config.spec, num_pages=num_pages, bf16=bf16), states


def draft(
    config: V32Config,
    params: V32Params,
    cache: V32LayerCache,
    batch: ForwardBatch,
    tables: RequestTables,
    tokens: jax.Array,
    positions: jax.Array,
    states: jax.Array,
    *,
    gathered: bool | None,
    backend: str | None,
) -> tuple[jax.Array, jax.Array, V32LayerCache, jax.Array]:
    """As `Model.draft`: hidden rows, the same as what it reads next, the cache and overflow."""
    own, metadata = params.draft, _metadata(config, cache, batch, tables, gathered)
    token_rows = rms_norm(params.embedding[tokens], own.token_norm, config.norm_eps)
    rows = jnp.concatenate([token_rows, rms_norm(states, own.states_norm, config.norm_eps)], axis=-1)
    options = {"positions": positions, "tokens": tokens, "backend": backend, "trace": lambda *_: None}
    rows = linear(rows, own.eh_proj)
    rows, cache, _ = _run(config, own.weights, own.small, cache, rows, batch, metadata, **options)
    hidden = rms_norm(rows, own.norm, config.norm_eps)
    return hidden, hidden, cache.whole(), metadata.overflow


def _run(
    config: V32Config,
    weights: V32Weights,
    small: V32Small,
    cache: V32LayerCache,
    streams: jax.Array,
    batch: ForwardBatch,
    metadata: V32Metadata,
    *,
    positions: jax.Array,
    tokens: jax.Array,
    backend: str | None,
    trace: Callable[[jax.Array, jax.Array | None], None],
    selected: jax.Array | None = None,
) -> tuple[jax.Array, V32LayerCache, jax.Array]:
    """The rows after a layer, its cache, and what it has selected; a layer without an indexer takes `selected`."""
    x, rows = _before_attention(config, weights, small, streams, positions, indexed=selected is None)
    options = {"spec": config.spec, "selected": selected, "backend": backend}
    out, cache, selected = v32_layer(cache, rows, batch, metadata, **options)
    trace(x, selected)
    return _after_attention(config, weights, small, streams, out, tokens), cache, selected


def _metadata(config: V32Config, caches: V32LayerCache, batch: ForwardBatch, tables: RequestTables, gathered):
    spec = config.spec
    if gathered is None:
        gathered = batch.mode is ForwardMode.EXTEND and gathers(spec, batch.out_cache_loc.shape[0])
    return build_v32_metadata(
        spec,
        batch,
        tables,
        fp8_kv_cache=caches.kv.layout is spec.kv_layout,
        prefill_backend="flashmla_sparse" if gathered else "flashmla_kv",
    )


def attention(
    config: V32Config,
    params: V32Params,
    caches: V32LayerCache,
    batch: ForwardBatch,
    tables: RequestTables,
    x: jax.Array,
    positions: jax.Array,
    *,
    layers: Sequence[int],
    gathered: bool | None,
    backend: str | None,
    index_scores: jax.Array | None,
) -> tuple[jax.Array, V32LayerCache]:
    """As `Model.attention`: some layers' attention alone, each from its input to its output."""
    metadata, selected = _metadata(config, caches, batch, tables, gathered), None
    for i in layers:
        weights, small = params.layers[i], jax.tree.map(lambda x, i=i: x[i], params.small)
        indexed = config.indexed[i]
        out, caches, selected = v32_layer(
            caches.layer(i),
            _project(config, weights, small, x, positions, indexed),
            batch,
            metadata,
            spec=config.spec,
            index_scores=index_scores,
            selected=None if indexed or index_scores is not None else selected,
            backend=backend,
        )
        x = _project_out(config, weights, out.astype(x.dtype))
    return x, caches.whole()


@functools.partial(jax.jit, static_argnames=("config", "indexed"))
def _before_attention(config: V32Config, weights: V32Weights, small: V32Small, streams, positions, *, indexed: bool):
    """The attention's input `[T, hidden]` and its projected rows."""
    x = rms_norm(streams, small.attn_norm, config.norm_eps)
    return x, _project(config, weights, small, x, positions, indexed)


def _project(config: V32Config, weights: V32Weights, small: V32Small, x, positions, indexed: bool) -> V32Rows:
    spec, rope = config.spec, config.rope
    q_a, latent, k_rope, *of_index = split(linear(x, weights.in_proj), *_input_widths(config, indexed))
    q_all = linear(rms_norm(q_a, small.q_norm, LATENT_NORM_EPS), weights.q_b)
    width = spec.num_heads * (config.nope_dim + spec.rope_dim)
    q, index_q = split(q_all, width, q_all.shape[1] - width)
    q_nope, q_rope = split(q.reshape(-1, spec.num_heads, config.nope_dim + spec.rope_dim), config.nope_dim, rope.dim)
    angle = positions[:, None, None].astype(jnp.float32) * rope.inv_freq()

    def rotated(rows):
        """Attention rotates neighbours; the rotated values stand half by half, as transformers leaves them."""
        return rotate(rows[..., 0::2], rows[..., 1::2], angle, rope.magnitude)

    def index_rotated(rows):
        """The indexer rotates the first values: neighbours, or their two halves."""
        first, rest = split(rows, spec.rope_dim, spec.index_dim - spec.rope_dim)
        if config.index_interleaved:
            return jnp.concatenate([rotated(first), rest], axis=-1)
        halves = split(first, spec.rope_dim // 2, spec.rope_dim // 2)
        return jnp.concatenate([rotate(*halves, angle, rope.magnitude), rest], axis=-1)

    q_latent = jnp.einsum("thd,hdl->thl", q_nope, weights.k_up)
    rows = {
        "q": jnp.concatenate([q_latent, rotated(q_rope)], axis=-1),
        "kv": jnp.concatenate(
            [rms_norm(latent, small.kv_norm, LATENT_NORM_EPS), rotated(k_rope[:, None])[:, 0]], axis=-1
        ),
    }
    if indexed:
        index_k, index_weights = of_index
        index_k = layer_norm(index_k, *small.index_norm, LATENT_NORM_EPS)
        rows |= {
            "index_q": index_rotated(index_q.reshape(-1, spec.index_heads, spec.index_dim)),
            "index_k": index_rotated(index_k[:, None])[:, 0],
            "index_weights": index_weights.astype(jnp.float32) * (spec.index_dim * spec.index_heads) ** -0.5,
        }
    return V32Rows(**rows)


def _project_out(config: V32Config, weights: V32Weights, out) -> jax.Array:
    """The attention's output `[T, hidden]`."""
    values = jnp.einsum("thl,hvl->thv", out, weights.v_up)
    return summed(matmul(values.reshape(values.shape[0], -1), weights.o_proj), config.axis_name).astype(out.dtype)


@functools.partial(jax.jit, static_argnames="config")
def _after_attention(config: V32Config, weights: V32Weights, small: V32Small, streams, out, tokens):
    """The rows after the attention's output projection and the experts."""
    streams = streams + _project_out(config, weights, out.astype(streams.dtype))
    x = rms_norm(streams, small.ffn_norm, config.norm_eps)
    if isinstance(weights.mlp, DenseParams):
        return streams + mlp(x, weights.mlp.gate_up, weights.mlp.down)
    options = {"config": config.moe, "float32_router": True, "axis_name": config.axis_name}
    return streams + moe(x, weights.mlp, small.router_bias, tokens, **options)
