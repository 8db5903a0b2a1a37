"""DeepSeek-V4: attention to a window and to compressed entries, which its indexer selects in layers of ratio 4."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.compressor.state import row_halves
from jax_sparse_mla.layers import (
    CompressorParams,
    IndexRows,
    V4LayerCache,
    V4LayerParams,
    V4Rows,
    prepare_v4_step,
    v4_layer,
)
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.rope import rope_interleaved
from jax_sparse_mla.serving.config import V4Config
from jax_sparse_mla.serving.decoder import CacheSizes, PreparedStep, StepInputs
from jax_sparse_mla.serving.heads import Part, normed_and_rotated
from jax_sparse_mla.serving.layers import grouped_linear, linear, matmul, rms_norm, split, summed
from jax_sparse_mla.serving.params import DraftParams, LatentNorms, LayerParams
from jax_sparse_mla.serving.quantised import Quantised, Weight, in_groups, join_rows
from jax_sparse_mla.serving.tensors import Tensors

# The draft layer's projections, each with how many rows it reads (the token's, the state's), and its last norm.
DRAFT_PROJECTIONS, DRAFT_NORM = {"e_proj": 1, "h_proj": 1}, "norm.weight"


@pytree_dataclass
class V4Weights:
    """The large weights of a layer's attention."""

    in_proj: Weight  # `[widths, hidden]`, all that reads the layer's input, in the order of `_input_widths`
    q_b: Weight  # `[heads * 512 + index_heads * 128, q_rank]`, queries, then those of the indexer (ratio 4)
    o_a: jax.Array | Quantised  # `[groups, o_rank, heads / groups * 512]`
    o_b: Weight  # `[hidden, groups * o_rank]`


def _input_widths(config: V4Config, ratio: int) -> list[int]:
    """Rows of `in_proj`: the queries' rank, K, the compressor's values and scores, the indexer's, its weights."""
    spec, kind = config.spec, config.spec.kind(ratio)
    halves = row_halves(ratio, kind.overlap)
    widths = [config.q_rank, spec.qk_dim]
    if kind.owns_kv:
        widths += 2 * [spec.qk_dim * halves]
    if kind.selects == "own":
        widths += [halves * spec.index_dim, halves * spec.index_dim, spec.index_heads]
    return widths


def read_attention(config: V4Config, ratio: int, attn: Tensors) -> tuple[V4Weights, LatentNorms, V4LayerParams]:
    """The parameters of a layer's attention."""
    spec, hidden, indexer = config.spec, config.hidden_size, attn.under("compressor.indexer.")
    kind = spec.kind(ratio)
    inputs = ["q_a_proj", "kv_proj"] + ["compressor.kv_proj", "compressor.gate_proj"] * kind.owns_kv
    queries = [attn.stored("q_b_proj.weight", (spec.num_heads * spec.qk_dim, config.q_rank))]
    if kind.selects == "own":
        inputs += [f"compressor.indexer.{name}" for name in ("kv_proj", "gate_proj", "scorer.weights_proj")]
        queries.append(indexer.stored("q_b_proj.weight", (spec.index_heads * spec.index_dim, config.q_rank)))
    in_proj = [attn.stored(f"{x}.weight", (width, hidden)) for x, width in zip(inputs, _input_widths(config, ratio))]
    grouped = spec.num_heads * spec.v_dim // config.o_groups

    def compressor(part: Tensors, dim: int) -> CompressorParams:
        return CompressorParams(
            ape=part.float32("position_bias", (ratio, row_halves(ratio, kind.overlap) * dim)),
            norm_weight=part.float32("kv_norm.weight", (dim,)),
            inv_freq=jnp.asarray(config.compress_rope.inv_freq()),
            norm_eps=config.norm_eps,
        )

    weights = V4Weights(
        in_proj=join_rows(in_proj),
        q_b=join_rows(queries),
        o_a=in_groups(attn.stored("o_a_proj.weight", (config.o_groups * config.o_rank, grouped)), config.o_groups),
        o_b=attn.stored("o_b_proj.weight", (hidden, config.o_groups * config.o_rank)),
    )
    norms = LatentNorms(
        q_norm=attn.float32("q_a_norm.weight", (config.q_rank,)), kv_norm=attn.float32("kv_norm.weight", (spec.qk_dim,))
    )
    params = V4LayerParams(
        attn_sink=attn.float32("sinks", (spec.num_heads,)),
        compressor=compressor(attn.under("compressor."), spec.qk_dim) if kind.owns_kv else None,
        index_compressor=compressor(indexer, spec.index_dim) if kind.selects == "own" else None,
    )
    return weights, norms, params


def new_cache(config: V4Config, layers: Sequence[int], sizes: CacheSizes) -> V4LayerCache:
    """Empty caches of layers of one ratio."""
    return V4LayerCache.zeros(
        config.spec,
        config.layer_kind(layers[0])[0],
        num_pages=sizes.num_pages,
        num_swa_pages=sizes.num_swa_pages,
        max_requests=sizes.max_requests,
        max_draft_tokens=sizes.max_draft_tokens,
        bf16=sizes.bf16,
        num_layers=len(layers),
    )


def prepare(config: V4Config, pools: Iterable[Any], inputs: StepInputs) -> PreparedStep:
    """The step with the metadata and plans that its layers share."""
    gathered = inputs.gathered if inputs.batch.mode is ForwardMode.EXTEND else False
    shared = prepare_v4_step(config.spec, inputs.batch, inputs.tables, gathered=gathered)
    return PreparedStep(inputs=inputs, shared=shared)


def attend(
    config: V4Config,
    layer: LayerParams,
    cache: V4LayerCache,
    x: jax.Array,
    step: PreparedStep,
    selected: jax.Array | None,
) -> tuple[jax.Array, V4LayerCache, jax.Array | None]:
    """A layer's attention from its input to its output `[T, hidden]`; its cache, and the selected positions."""
    ratio, weights, inputs = layer.kind, layer.weights.attention, step.inputs
    out, cache, selected = v4_layer(
        cache,
        project(config, ratio, weights, layer.norms.latent, x, inputs.positions),
        layer.attention,
        inputs.batch,
        step.shared.metadata,
        step.shared.plans.get(ratio),
        spec=config.spec,
        ratio=ratio,
        index_scores=step.index_scores,
        selected=selected if config.spec.kind(ratio).selects == "own" else None,
        pages_axis=inputs.pages_axis,
        backend=inputs.backend,
        batch_invariant=inputs.batch_invariant,
    )
    return project_out(config, ratio, weights, out.astype(x.dtype), inputs.positions), cache, selected


@functools.partial(jax.jit, static_argnames=("config", "ratio"))
def project(config: V4Config, ratio: int, weights: V4Weights, norms: LatentNorms, x, positions) -> V4Rows:
    """What attention reads of a layer's input `[T, hidden]`."""
    spec, kind = config.spec, config.spec.kind(ratio)
    inv_freq, dim = jnp.asarray(config.rope(ratio).inv_freq()), spec.qk_dim
    rope_dim = 2 * inv_freq.shape[0]

    def parts(rows, *parts, weights=()):
        return normed_and_rotated(rows, positions, inv_freq, *weights, parts=parts, eps=config.norm_eps)

    rows = linear(x, weights.in_proj)
    _, _, *compressed = split(rows, *_input_widths(config, ratio))
    q_a, kv = parts(
        rows,
        Part(0, 1, config.q_rank, 0, True),
        Part(config.q_rank, 1, dim, rope_dim, True),
        weights=(norms.q_norm, norms.kv_norm),
    )
    heads = [Part(0, spec.num_heads, dim, rope_dim, True)]
    if kind.selects == "own":
        heads.append(Part(spec.num_heads * dim, spec.index_heads, spec.index_dim, rope_dim, False))
    q, *index_q = parts(linear(q_a[:, 0], weights.q_b), *heads)
    index = None
    if kind.selects == "own":
        index_kv, index_score, index_weights = compressed[2:]
        index = IndexRows(
            q=index_q[0],
            weights=index_weights.astype(jnp.float32) * (spec.index_dim * spec.index_heads) ** -0.5,
            kv=index_kv,
            score=index_score,
        )
    return V4Rows(
        q=q,
        kv=kv[:, 0],
        compressed_kv=compressed[0] if kind.owns_kv else None,
        compressed_score=compressed[1] if kind.owns_kv else None,
        index=index,
    )


@functools.partial(jax.jit, static_argnames=("config", "ratio"))
def project_out(config: V4Config, ratio: int, weights: V4Weights, out, positions) -> jax.Array:
    """`[T, hidden]` of attention's output `[T, heads, 512]`."""
    # V is K with its rope part, so the output is rotated back at the query's position.
    inv_freq = jnp.asarray(config.rope(ratio).inv_freq())
    out = rope_interleaved(out, positions[:, None], inv_freq, inverse=True)
    grouped = out.reshape(out.shape[0], config.o_groups, -1)
    grouped = grouped_linear(grouped, weights.o_a).reshape(out.shape[0], -1)
    if config.axis_name is None:
        return linear(grouped, weights.o_b)
    return summed(matmul(grouped, weights.o_b), config.axis_name).astype(out.dtype)


@functools.partial(jax.jit, static_argnames="config")
def join_token(config: V4Config, draft: DraftParams, token_rows: jax.Array, states: jax.Array) -> jax.Array:
    """The draft layer's streams, of the next token's embedding and of the streams before it."""
    e_proj, h_proj = draft.projections
    token_rows = linear(rms_norm(token_rows, draft.token_norm, config.norm_eps), e_proj)
    rows = rms_norm(states, draft.states_norm, config.norm_eps).reshape(-1, config.hidden_size)
    return token_rows[:, None] + linear(rows, h_proj).reshape(states.shape)
