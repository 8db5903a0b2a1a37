"""MaxText's DeepSeek-V4 as a model of `jax_sparse_mla.serving.engine.Engine`, which serves it from paged FP8 caches.

Embedding, projections, hyper-connections, experts and head are MaxText's, with its own weights; rows, caches,
compressors, indexer, selection and attention are a `v4_layer` each. A step's tokens, of any requests, are one sequence
to MaxText, whose other parts work on each token by itself.

    Engine(*served(config, model), EngineOptions()).run(requests)    # where MaxText's functions are traced
"""

import dataclasses
from unittest import mock

import jax.numpy as jnp
from flax import nnx
from maxtext.layers.attention_compressed import CompressedAttention

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.serving.model import ForwardOutput


def served(cfg, model, eos_token_ids=()):
    """The engine's model and parameters of MaxText's config and model."""
    sizes = {"num_heads": cfg.num_query_heads, "index_heads": cfg.indexer_n_heads, "index_topk": cfg.indexer_topk}
    constants = {"name": cfg.model_name, "softmax_scale": 1.0, "window": cfg.sliding_window_size, **sizes}
    spec = dataclasses.replace(mla.DEEPSEEK_V4_FLASH, **constants)  # softmax_scale: MaxText scales the queries
    graph, params = nnx.split(model)
    return MaxTextModel(spec, tuple(cfg.compress_ratios), cfg.vocab_size, tuple(eos_token_ids), graph), params


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: a graph is large
class MaxTextModel:
    """What the engine needs of a model, in the place of `jax_sparse_mla.serving.Model`, which has the signatures."""

    spec: mla.ModelSpec
    ratios: tuple[int, ...]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    graph: nnx.GraphDef

    @property
    def num_layers(self):
        return len(self.ratios)

    def new_caches(self, **sizes):
        return [layers.V4LayerCache.zeros(self.spec, ratio, **sizes) for ratio in self.ratios]

    def forward(self, params, caches, inputs, *, layers=None):
        """Its hidden rows are before the final norm.

        Raises:
          ValueError: for some of the layers, as speculative decoding asks for them, and for a trace.
        """
        if layers is not None or inputs.trace:
            raise ValueError("MaxText's decoder runs all its layers and traces none: no speculative_steps, no trace")
        model = nnx.merge(self.graph, params)
        modules = [getattr(model.decoder, f"layers_{i}").self_attention for i in range(self.num_layers)]
        for module, cache in zip(modules, caches):
            module.paged = nnx.Cache(cache)  # as its own caches, MaxText carries it through its rematerialisation
        attend, overflow = _attention(self.spec, inputs)
        with mock.patch.object(CompressedAttention, "__call__", attend):
            # Its first result are logits of all rows, which the compiler drops.
            tokens, positions = inputs.tokens[None], inputs.positions[None]
            hidden = model.decoder(model.token_embedder, tokens, positions, deterministic=True)[1]
        caches = [module.paged.get_value() for module in modules]
        return ForwardOutput(hidden=hidden[0], caches=caches, overflow=overflow)

    def logits(self, params, hidden):
        model = nnx.merge(self.graph, params)
        scores = model.decoder.apply_output_head(model.token_embedder, hidden[None], True, "train")
        return scores[0].astype(jnp.float32)


def _attention(spec, inputs):
    """A step's `CompressedAttention.__call__`, and whether the step overflows."""
    shared = layers.prepare_v4_step(spec, inputs.batch, inputs.tables, gathered=inputs.gathered)

    def attend(module, *, inputs_q, inputs_positions, **_):
        """Its queries and keys come from the same input."""
        q, latent = module.compressed_query_projection(inputs_q, inputs_positions, None)
        kv, _ = module.compressed_kv_projection(inputs_q, inputs_positions, None)
        rows, params = _rows_and_params(module, inputs_q, latent, inputs_positions)
        rows = layers.V4Rows(q=q[0].astype(jnp.bfloat16), kv=kv[0, :, 0].astype(jnp.bfloat16), **rows)
        params = layers.V4LayerParams(attn_sink=module.sinks.get_value().astype(jnp.float32), **params)
        ratio = module.compress_ratio
        out, cache, _ = layers.v4_layer(
            module.paged.get_value(), rows, params, inputs.batch, shared.metadata, shared.plans.get(ratio),
            spec=spec, ratio=ratio, backend=inputs.backend,
        )  # fmt: skip
        module.paged.set_value(cache)
        out = module._apply_rotary_embedding_v4(out[None].astype(q.dtype), inputs_positions, reverse=True)
        out = module.o_a_proj(out.reshape(*out.shape[:2], module.config.o_groups, -1))
        return module.o_b_proj(out.reshape(*out.shape[:2], -1)), None

    return attend, shared.overflow


def _rows_and_params(module, inputs, latent, positions):
    """Of a layer that compresses: what its compressor and, for ratio 4, its indexer project, and their parameters."""
    if not module.compress_ratio:
        return {}, {}
    compressor = module.csa_compressor if module.compress_ratio == 4 else module.hca_compressor
    rows = {"compressed_kv": compressor.kv_proj(inputs)[0], "compressed_score": compressor.gate_proj(inputs)[0]}
    params = {"compressor": _compressor_params(compressor)}
    if module.compress_ratio == 4:
        indexer = compressor.indexer
        q = indexer.q_proj(latent).reshape(1, -1, indexer.index_n_heads, indexer.index_head_dim)
        q = indexer.rotary_emb(q, positions, unsqueeze_dim=-2)[0].astype(jnp.bfloat16)
        scale = indexer.weights_scaling * indexer.softmax_scale
        weights = indexer.weights_proj(inputs)[0].astype(jnp.float32) * scale
        kv, score = indexer.kv_proj(inputs)[0], indexer.gate_proj(inputs)[0]
        rows["index"] = layers.IndexRows(q=q, weights=weights, kv=kv, score=score)
        params["index_compressor"] = _compressor_params(indexer)
    return rows, params


def _compressor_params(module):
    return layers.CompressorParams(
        ape=module.position_bias.get_value().astype(jnp.float32),
        norm_weight=module.kv_norm.scale.get_value().astype(jnp.float32),
        inv_freq=module.rotary_emb.inv_freq,
        norm_eps=module.config.normalization_layer_epsilon,
    )
