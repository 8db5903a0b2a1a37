"""GLM-5.3-Flash (`glm5_next`): three of four layers have linear attention, `serving.kda`.

The others are V3.2's without rope, with an index key for each pool of tokens. Residual streams and hyper-connections
are V4's; the last streams are averaged.

Linear attention carries a state for each request that is that of its last token. So this model neither drafts nor
verifies: a rejected token could not be taken back. Its draft layer is not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.layers import V32LayerCache, V32Rows, v32_layer
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving import deepseek_v32, kda
from jax_sparse_mla.serving.config import Glm53Config
from jax_sparse_mla.serving.decoder import CacheSizes, PreparedStep, StepInputs
from jax_sparse_mla.serving.deepseek_v32 import LatentWeights
from jax_sparse_mla.serving.kda import KDAParams, KDARows, KDAState
from jax_sparse_mla.serving.layers import layer_norm, linear, rms_norm, split
from jax_sparse_mla.serving.params import LatentNorms, LayerParams
from jax_sparse_mla.serving.quantised import Weight, join_rows
from jax_sparse_mla.serving.tensors import Tensors

INDEX_NORM_EPS = 1e-6


@pytree_dataclass
class LinearWeights:
    """A linear attention layer's large weights: in_proj in the order of `_input_widths`, decay_b and gate_b
    `[heads * dim, dim]` from the ranks of the decay and of the output's gate, o_proj `[hidden, heads * dim]`."""

    in_proj: Weight
    decay_b: Weight
    gate_b: Weight
    o_proj: Weight


def _input_widths(config: Glm53Config) -> list[int]:
    """Rows of linear attention's `in_proj`: queries, keys and values together, the ranks of decay and gate, β."""
    sizes = config.kda
    return [3 * sizes.heads * sizes.head_dim, sizes.head_dim, sizes.head_dim, sizes.heads]


def read_attention(
    config: Glm53Config, is_linear: bool, attn: Tensors
) -> tuple[LatentWeights | LinearWeights, None, LatentNorms | KDAParams]:
    """The parameters of a layer's attention."""
    if not is_linear:
        weights, norms, _ = deepseek_v32.read_attention(config, True, attn)
        return weights, None, norms
    sizes, hidden = config.kda, config.hidden_size
    width, dim = sizes.heads * sizes.head_dim, sizes.head_dim
    in_proj = [attn.stored(f"{name}_proj.weight", (width, hidden)) for name in "qkv"]
    in_proj += [attn.stored(f"{name}_a_proj.weight", (dim, hidden)) for name in ("forget_gate.f", "g")]
    weights = LinearWeights(
        in_proj=join_rows([*in_proj, attn.stored("b_proj.weight", (sizes.heads, hidden))]),
        decay_b=attn.stored("forget_gate.f_b_proj.weight", (width, dim)),
        gate_b=attn.stored("g_b_proj.weight", (width, dim)),
        o_proj=attn.stored("o_proj.weight", (hidden, width)),
    )
    params = KDAParams(
        conv=attn.float32("conv1d.weight", (3 * width, 1, sizes.kernel))[:, 0],
        dt_bias=attn.float32("forget_gate.dt_bias", (width,)),
        a_log=attn.float32("forget_gate.A_log", (sizes.heads,)),
        o_norm=attn.float32("o_norm.weight", (dim,)),
    )
    return weights, None, params


def new_cache(config: Glm53Config, layers: Sequence[int], sizes: CacheSizes) -> V32LayerCache | KDAState:
    """Empty caches or states of layers of one kind. There is no window."""
    if config.linear[layers[0]]:
        return KDAState.zeros(config.kda, sizes.max_requests, num_layers=len(layers))
    return V32LayerCache.zeros(
        config.spec, num_pages=sizes.num_pages, bf16=sizes.bf16, num_layers=len(layers), max_requests=sizes.max_requests
    )


def prepare(config: Glm53Config, pools: Iterable[Any], inputs: StepInputs) -> PreparedStep:
    """The step with what its layers share; a batch of drafts is refused."""
    step = deepseek_v32.prepare(config, pools, inputs)
    return dataclasses.replace(step, kda=kda.prepare(inputs.batch, step.shared))


def attend(
    config: Glm53Config,
    layer: LayerParams,
    cache: V32LayerCache | KDAState,
    x: jax.Array,
    step: PreparedStep,
    selected: jax.Array | None,
) -> tuple[jax.Array, V32LayerCache | KDAState, jax.Array | None]:
    """A layer's attention from its input to its output `[T, hidden]`; its cache or state, and what it selected."""
    weights, params, inputs = layer.weights.attention, layer.attention, step.inputs
    if isinstance(params, KDAParams):
        rows, gate = _project_linear(config, weights, x)
        chunked = inputs.batch.mode is not ForwardMode.DECODE
        out, cache = kda.kda_layer(cache, rows, params, step.kda, config=config.kda, chunked=chunked)
        out = kda.gated_norm(out, gate, params.o_norm, config.norm_eps)
        return linear(out.reshape(out.shape[0], -1), weights.o_proj), cache, None
    out, cache, selected = v32_layer(
        cache,
        _project_sparse(config, weights, params, x),
        inputs.batch,
        step.shared,
        spec=config.spec,
        index_ape=params.index_ape,
        index_scores=step.index_scores,
        selected=selected,
        backend=inputs.backend,
        batch_invariant=inputs.batch_invariant,
    )
    return deepseek_v32.project_out(config, weights, out.astype(x.dtype)), cache, selected


def _project_linear(config: Glm53Config, weights: LinearWeights, x: jax.Array) -> tuple[KDARows, jax.Array]:
    """The rows, and the output's gate `[T, heads, dim]`."""
    qkv, decay, gate, beta = split(linear(x, weights.in_proj), *_input_widths(config))
    gate = linear(gate, weights.gate_b).reshape(-1, config.kda.heads, config.kda.head_dim)
    return KDARows(qkv=qkv, decay=linear(decay, weights.decay_b), beta=beta), gate


def _project_sparse(config: Glm53Config, weights: LatentWeights, norms: LatentNorms, x: jax.Array) -> V32Rows:
    spec = config.spec
    projected = split(linear(x, weights.in_proj), *deepseek_v32.input_widths(config, True))
    q_a, latent, index_k, index_score, index_weights = projected
    q_all = linear(rms_norm(q_a, norms.q_norm, config.norm_eps), weights.q_b)
    width = spec.num_heads * config.nope_dim
    q, index_q = split(q_all, width, q_all.shape[1] - width)
    return V32Rows(
        q=jnp.einsum("thd,hdl->thl", q.reshape(-1, spec.num_heads, config.nope_dim), weights.k_up),
        kv=rms_norm(latent, norms.kv_norm, config.norm_eps),
        index_q=index_q.reshape(-1, spec.index_heads, spec.index_dim),
        index_k=layer_norm(index_k, *norms.index_norm, INDEX_NORM_EPS),
        index_weights=index_weights.astype(jnp.float32) * (spec.index_dim * spec.index_heads) ** -0.5,
        index_score=index_score,
    )
