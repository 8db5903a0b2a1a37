"""A stand-in for `serving.model.Model`: DeepSeek-V4's attention with random projections around it, small enough for
tests of the engine. What it generates hangs on what it attends to."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.layers import prepare_v4_step, v4_layer
from jax_sparse_mla.rope import rope_interleaved
from jax_sparse_mla.serving.model import ForwardOutput

HIDDEN = 64
SPEC = dataclasses.replace(mla.DEEPSEEK_V4_FLASH, num_heads=2, index_heads=2, index_topk=64)


@dataclasses.dataclass(frozen=True)
class ToyModel:
    spec: mla.ModelSpec = SPEC
    ratios: tuple[int, ...] = (0, 4)
    vocab_size: int = 256
    eos_token_ids: tuple[int, ...] = ()
    config: None = None

    @property
    def num_layers(self):
        return len(self.ratios)

    def init_params(self, seed, dtype=jnp.bfloat16):
        spec, keys = self.spec, iter(jax.random.split(jax.random.key(seed), 16 * len(self.ratios)))
        inv_freq = 10000.0 ** -(jnp.arange(32) / 32)

        def normal(*shape, dtype=dtype):
            return jax.random.normal(next(keys), shape, dtype) * shape[0] ** -0.5

        project = partial(normal, HIDDEN)

        def compressor(dim, ratio):
            width = dim * (2 if ratio == 4 else 1)
            ape = normal(ratio, width, dtype=jnp.float32)
            params = layers.CompressorParams(ape=ape, norm_weight=jnp.ones(dim), inv_freq=inv_freq)
            return params, project(width), project(width)

        def layer(ratio):
            rows = layers.V4Rows(q=4 * project(spec.num_heads, spec.qk_dim), kv=project(spec.qk_dim))
            params = layers.V4LayerParams(attn_sink=jnp.zeros(spec.num_heads))
            if ratio:
                main, kv, score = compressor(spec.qk_dim, ratio)
                rows = dataclasses.replace(rows, compressed_kv=kv, compressed_score=score)
                params = dataclasses.replace(params, compressor=main)
            if ratio == 4:
                index, kv, score = compressor(spec.index_dim, ratio)
                q, weights = project(spec.index_heads, spec.index_dim), project(spec.index_heads)
                rows = dataclasses.replace(rows, index=layers.IndexRows(q=q, weights=weights, kv=kv, score=score))
                params = dataclasses.replace(params, index_compressor=index)
            return rows, normal(spec.num_heads, spec.v_dim, HIDDEN), params

        return normal(self.vocab_size, HIDDEN), inv_freq, [layer(ratio) for ratio in self.ratios]

    def new_caches(self, *, bf16=False, max_draft_tokens=0, **sizes):
        sizes |= {"bf16": bf16, "max_draft_tokens": max_draft_tokens}
        return [layers.V4LayerCache.zeros(self.spec, ratio, **sizes) for ratio in self.ratios]

    def new_draft(self, params, **sizes):
        return None

    def forward(self, params, caches, inputs, *, layers=None):
        embedding, inv_freq, weights = params
        shared = prepare_v4_step(self.spec, inputs.batch, inputs.tables, gathered=inputs.gathered)
        rope = partial(rope_interleaved, positions=inputs.positions[:, None], inv_freq=inv_freq)
        hidden, caches, traced = embedding[inputs.tokens], list(caches), []
        for i, (ratio, (projections, output, layer_params)) in list(enumerate(zip(self.ratios, weights)))[:layers]:
            norm = jax.lax.rsqrt(jnp.mean(hidden.astype(jnp.float32) ** 2, -1, keepdims=True)).astype(hidden.dtype)
            rows = jax.tree.map(lambda weight, x=hidden * norm: jnp.tensordot(x, weight, 1), projections)
            if (index := rows.index) is not None:
                scale = (self.spec.index_heads * self.spec.index_dim) ** -0.5
                index = dataclasses.replace(index, q=rope(index.q), weights=index.weights.astype(jnp.float32) * scale)
            rows = dataclasses.replace(rows, q=rope(rows.q), kv=rope(rows.kv[:, None])[:, 0], index=index)
            attended, caches[i], selected = v4_layer(
                caches[i], rows, layer_params, inputs.batch, shared.metadata, shared.plans.get(ratio),
                spec=self.spec, ratio=ratio, backend=inputs.backend, batch_invariant=inputs.batch_invariant,
            )  # fmt: skip
            traced.append((hidden, selected))
            hidden = hidden + jnp.tensordot(rope(attended, inverse=True), output, 2)
        trace = traced if inputs.trace else []
        return ForwardOutput(hidden=hidden, caches=caches, overflow=shared.overflow, trace=trace)

    def logits(self, params, hidden):
        return (hidden @ params[0].T).astype(jnp.float32)
