"""DeepSeek-V3.2: attention to the entries of one latent cache that its indexer selects.

A head's part without rope is multiplied into the latent space that the cache holds, and its output back out of it.

GLM-5 is the same model with other sizes. Some of its layers have no indexer, no index keys and no parameters of them:
they attend to what the last layer with an indexer selected.

Rows of a prompt no longer than what is selected attend to all before them. Where a library does that sooner, a head's
keys and values are multiplied out of the latent space instead (`attends_expanded`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.attention.serve import EXPANDED_SCOPE
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache import gather_kv
from jax_sparse_mla.layers import V32LayerCache, V32Rows, gathers, v32_layer
from jax_sparse_mla.layers.layer import seen_positions
from jax_sparse_mla.layers.v32 import write_v32
from jax_sparse_mla.metadata import ForwardMode, build_v32_metadata
from jax_sparse_mla.serving.config import Config, Glm53Config, V32Config
from jax_sparse_mla.serving.decoder import CacheSizes, PreparedStep, StepInputs
from jax_sparse_mla.serving.layers import layer_norm, linear, matmul, rms_norm, rotate, split, summed
from jax_sparse_mla.serving.params import DraftParams, LatentNorms, LayerParams
from jax_sparse_mla.serving.quantised import Weight, join_rows
from jax_sparse_mla.serving.tensors import Tensors

# Epsilon of the norms inside attention, whatever the config says about the others.
LATENT_NORM_EPS = 1e-6
# Rows from which a chunk attends over expanded heads; fewer are bound by launches.
EXPANDED_FROM_ROWS = 512
# As in `deepseek_v4`.
DRAFT_PROJECTIONS, DRAFT_NORM = {"eh_proj": 2}, "shared_head.norm.weight"


@pytree_dataclass
class LatentWeights:
    """The large weights of a layer's attention."""

    in_proj: Weight  # `[widths, hidden]`, all that reads the layer's input, in the order of `input_widths`
    # `[heads * (nope_dim + rope_dim) + index_heads * 128, q_rank]`, queries, then those of the indexer, if any.
    q_b: Weight
    k_up: jax.Array  # `[heads, nope_dim, 512]`, from the latent to a head's key
    v_up: jax.Array  # `[heads, v_dim, 512]`, and to its value
    o_proj: Weight  # `[hidden, heads * v_dim]`


def input_widths(config: V32Config | Glm53Config, indexed: bool) -> list[int]:
    """Rows of `in_proj`: the queries' rank, the latent, its rope part; index keys, the scores that weigh them in pools,
    the indexer's weights."""
    spec = config.spec
    widths = [config.q_rank, spec.nope_dim] + [spec.rope_dim] * bool(spec.rope_dim)
    if indexed:
        widths += [spec.index_dim] * (1 + (spec.kind().pool > 1)) + [spec.index_heads]
    return widths


def read_attention(
    config: V32Config | Glm53Config, indexed: bool, attn: Tensors
) -> tuple[LatentWeights, LatentNorms, None]:
    """The parameters of a layer's attention."""
    spec, hidden, indexer, heads = config.spec, config.hidden_size, attn.under("indexer."), config.spec.num_heads
    in_proj = [
        attn.stored("q_a_proj.weight", (config.q_rank, hidden)),
        attn.stored("kv_a_proj_with_mqa.weight", (spec.qk_dim, hidden)),
    ]
    queries = [attn.stored("q_b_proj.weight", (heads * config.query_dim, config.q_rank))]
    index_norm, index_ape = jnp.zeros((2, spec.index_dim), attn.dtype), None
    if indexed:
        in_proj.append(indexer.stored("wk.weight", (spec.index_dim, hidden)))
        if spec.kind().pool > 1:
            in_proj.append(indexer("index_kpool_compress_gate", (spec.index_dim, hidden)))
            index_ape = indexer.float32("index_kpool_compress_ape", (spec.kind().pool, spec.index_dim))
        in_proj.append(indexer.stored("weights_proj.weight", (spec.index_heads, hidden)))
        queries.append(indexer.stored("wq_b.weight", (spec.index_heads * spec.index_dim, config.q_rank)))
        index_norm = jnp.stack([indexer(f"k_norm.{name}", (spec.index_dim,)) for name in ("weight", "bias")])
    kv_b = attn("kv_b_proj.weight", (heads * (config.nope_dim + config.v_dim), spec.nope_dim))
    kv_b = kv_b.reshape(heads, -1, spec.nope_dim)
    weights = LatentWeights(
        in_proj=join_rows(in_proj),
        q_b=join_rows(queries),
        k_up=kv_b[:, : config.nope_dim],
        v_up=kv_b[:, config.nope_dim :],
        o_proj=attn.stored("o_proj.weight", (hidden, heads * config.v_dim)),
    )
    norms = LatentNorms(
        q_norm=attn("q_a_layernorm.weight", (config.q_rank,)),
        kv_norm=attn("kv_a_layernorm.weight", (spec.nope_dim,)),
        index_norm=index_norm,
        index_ape=index_ape,
    )
    return weights, norms, None


def new_cache(config: V32Config, layers: Sequence[int], sizes: CacheSizes) -> V32LayerCache:
    """Empty caches of layers. There is no window and no state, so the pages are all that counts."""
    return V32LayerCache.zeros(
        config.spec,
        num_pages=sizes.num_pages,
        bf16=sizes.bf16,
        num_layers=len(layers),
        indexed=[config.layer_kind(i)[0] for i in layers],
    )


def prepare(config: V32Config | Glm53Config, pools: Iterable[Any], inputs: StepInputs) -> PreparedStep:
    """The step with the metadata that its layers share."""
    spec, batch, gathered = config.spec, inputs.batch, inputs.gathered
    if gathered is None:
        gathered = batch.mode is ForwardMode.EXTEND and gathers(spec, batch.out_cache_loc.shape[0])
    layout = next(pool.kv.layout for pool in pools if isinstance(pool, V32LayerCache))
    metadata = build_v32_metadata(
        spec,
        batch,
        inputs.tables,
        fp8_kv_cache=layout is spec.kv_layout,
        prefill_backend="flashmla_sparse" if gathered else "flashmla_kv",
    )
    return PreparedStep(inputs=inputs, shared=metadata)


def attends_expanded(config: Config, rows: int, max_seq_len: int) -> bool:
    """Whether a chunk of so many rows, those of one prompt from its start, attends over expanded heads: every row
    selects all that it sees, and cuDNN attends with heads of these widths on this device.

    Of V3.2's heads a query and a key take 2 · (192 + 192) operations there (values are padded), and in the latent space
    2 · (576 + 512).
    """
    return (
        isinstance(config, V32Config)
        and rows >= EXPANDED_FROM_ROWS
        and max_seq_len <= config.spec.index_topk
        and config.v_dim <= config.query_dim <= 256
        and config.query_dim % 8 == 0
        and DeviceInfo.current().compute_capability == (9, 0)
    )


def attend(
    config: V32Config,
    layer: LayerParams,
    cache: V32LayerCache,
    x: jax.Array,
    step: PreparedStep,
    selected: jax.Array | None,
) -> tuple[jax.Array, V32LayerCache, jax.Array]:
    """A layer's attention from its input to its output `[T, hidden]`; its cache, and what it has selected."""
    indexed, weights, inputs = layer.kind, layer.weights.attention, step.inputs
    if inputs.expanded:
        return _attend_expanded(config, layer, cache, x, step, selected)
    out, cache, selected = v32_layer(
        cache,
        _project(config, indexed, weights, layer.norms.latent, x, inputs.positions),
        inputs.batch,
        step.shared,
        spec=config.spec,
        index_scores=step.index_scores,
        selected=selected,
        pages_axis=inputs.pages_axis,
        backend=inputs.backend,
        batch_invariant=inputs.batch_invariant,
    )
    return project_out(config, weights, out.astype(x.dtype)), cache, selected


def _attend_expanded(
    config: V32Config,
    layer: LayerParams,
    cache: V32LayerCache,
    x: jax.Array,
    step: PreparedStep,
    selected: jax.Array | None,
) -> tuple[jax.Array, V32LayerCache, jax.Array]:
    """As `attend`, with heads expanded from the rows as the cache holds them.

    Rounded to bfloat16 are a head's keys and values, where `attend` rounds its queries and output in the latent space.
    """
    indexed, weights, inputs, metadata = layer.kind, layer.weights.attention, step.inputs, step.shared
    rows = _project(config, indexed, weights, layer.norms.latent, x, inputs.positions, expanded=True)
    cache = write_v32(cache, rows, inputs.batch, metadata)
    if indexed:
        everything = jnp.arange(config.spec.index_topk, dtype=jnp.int32)[None]
        selected = seen_positions(everything, metadata.seqlens_expanded)
    live = metadata.positions >= 0
    stored = gather_kv(cache.kv, jnp.where(live, metadata.out_cache_loc, -1))
    values = attend_to_all(config, weights, rows.q.astype(stored.dtype), stored, jnp.sum(live))
    values = jnp.where(live[:, None, None], values, 0).astype(x.dtype)
    return _output(config, weights, values).astype(x.dtype), cache, selected


def attend_to_all(
    config: V32Config, weights: LatentWeights, q: jax.Array, stored: jax.Array, count: jax.Array
) -> jax.Array:
    """Causal attention over expanded heads.

    Args:
      q: bfloat16 `[T, heads, query_dim]`, rotated.
      stored: bfloat16 `[T, qk_dim]`, the latent rows of the same tokens, in their order.
      count: int scalar, the rows that are no padding; those behind them have any finite or NaN result.

    Returns:
      bfloat16 `[T, heads, v_dim]`.
    """
    spec, (tokens, heads, width) = config.spec, q.shape
    latent, k_rope = split(stored, spec.nope_dim, spec.rope_dim)
    k_nope, v = (jnp.einsum("tl,hdl->thd", latent, up).astype(q.dtype) for up in (weights.k_up, weights.v_up))
    k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope[:, None], (tokens, heads, spec.rope_dim))], axis=-1)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, width - config.v_dim)))  # `jax.nn` takes one width alone
    length = count.astype(jnp.int32)[None]
    with jax.named_scope(EXPANDED_SCOPE):
        out = jax.nn.dot_product_attention(
            *(rows[None] for rows in (q, k, v)),
            scale=spec.softmax_scale,
            is_causal=True,
            query_seq_lengths=length,
            key_value_seq_lengths=length,
            implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
        )
    return out[0, :, :, : config.v_dim]


@functools.partial(jax.jit, static_argnames=("config", "indexed", "expanded"))
def _project(
    config: V32Config, indexed: bool, weights: LatentWeights, norms: LatentNorms, x, positions, *, expanded=False
) -> V32Rows:
    """The rows of a layer; with `expanded`, `q` is `[T, heads, query_dim]`, not in the latent space."""
    spec, rope = config.spec, config.rope
    q_a, latent, k_rope, *index = split(linear(x, weights.in_proj), *input_widths(config, indexed))
    q_all = linear(rms_norm(q_a, norms.q_norm, LATENT_NORM_EPS), weights.q_b)
    width = spec.num_heads * config.query_dim
    q, index_q = split(q_all, width, q_all.shape[1] - width)
    q_nope, q_rope = split(q.reshape(-1, spec.num_heads, config.query_dim), config.nope_dim, rope.dim)
    angle = positions[:, None, None].astype(jnp.float32) * rope.inv_freq()

    def rotated(rows):
        """Attention rotates neighbours; the rotated values stand half by half, as transformers leaves them."""
        return rotate(rows[..., 0::2], rows[..., 1::2], angle, rope.magnitude)

    def index_rotated(rows):
        """The indexer rotates the first values: neighbours, or their two halves."""
        first, unrotated = split(rows, spec.rope_dim, spec.index_dim - spec.rope_dim)
        if config.index_interleaved:
            return jnp.concatenate([rotated(first), unrotated], axis=-1)
        halves = split(first, spec.rope_dim // 2, spec.rope_dim // 2)
        return jnp.concatenate([rotate(*halves, angle, rope.magnitude), unrotated], axis=-1)

    if not expanded:
        q_nope = jnp.einsum("thd,hdl->thl", q_nope, weights.k_up)
    q = jnp.concatenate([q_nope, rotated(q_rope)], axis=-1)
    latent = rms_norm(latent, norms.kv_norm, LATENT_NORM_EPS)
    kv = jnp.concatenate([latent, rotated(k_rope[:, None])[:, 0]], axis=-1)
    if not indexed:
        return V32Rows(q=q, kv=kv)
    index_k, index_weights = index
    index_k = layer_norm(index_k, *norms.index_norm, LATENT_NORM_EPS)
    return V32Rows(
        q=q,
        kv=kv,
        index_q=index_rotated(index_q.reshape(-1, spec.index_heads, spec.index_dim)),
        index_k=index_rotated(index_k[:, None])[:, 0],
        index_weights=index_weights.astype(jnp.float32) * (spec.index_dim * spec.index_heads) ** -0.5,
    )


@functools.partial(jax.jit, static_argnames="config")
def project_out(config: V32Config | Glm53Config, weights: LatentWeights, out: jax.Array) -> jax.Array:
    """The attention's output `[T, hidden]`, out of the latent space."""
    return _output(config, weights, jnp.einsum("thl,hvl->thv", out, weights.v_up)).astype(out.dtype)


def _output(config: V32Config | Glm53Config, weights: LatentWeights, values: jax.Array) -> jax.Array:
    """The attention's output `[T, hidden]` of the values of its heads `[T, heads, v_dim]`."""
    return summed(matmul(values.reshape(values.shape[0], -1), weights.o_proj), config.axis_name)


def join_token(config: V32Config, draft: DraftParams, token_rows: jax.Array, states: jax.Array) -> jax.Array:
    """The draft layer's rows, of the next token's embedding and of the rows before it."""
    token_rows = rms_norm(token_rows, draft.token_norm, config.norm_eps)
    rows = jnp.concatenate([token_rows, rms_norm(states, draft.states_norm, config.norm_eps)], axis=-1)
    return linear(rows, draft.projections[0])
