"""MaxText's DeepSeek-V4 serves requests from this library's paged FP8 caches.

Embedding, projections, hyper-connections, experts and head are MaxText's, with its own weights; rows, caches,
compressors, indexer, selection and attention are a `v4_layer` each. A step's tokens, of any requests, are one sequence
to MaxText, whose other parts work on each token by itself.

    serve(config, model, requests)     # requests of examples/jax_server.py, whose server this is
"""

import dataclasses
import importlib.util
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxtext.layers.attention_compressed import CompressedAttention

import jax_sparse_mla as mla
from jax_sparse_mla import layers

# --- the adapter: one step -------------------------------------------------------------------------


def spec_of(cfg, kv_layout=mla.KVLayout.V4_FP8):
    """The attention constants of a MaxText config. Its queries come scaled."""
    sizes = {"num_heads": cfg.num_query_heads, "index_heads": cfg.indexer_n_heads, "index_topk": cfg.indexer_topk}
    constants = {"name": cfg.model_name, "softmax_scale": 1.0, "window": cfg.sliding_window_size, **sizes}
    return dataclasses.replace(mla.DEEPSEEK_V4_FLASH, kv_layout=kv_layout, **constants)


def logits(model, spec, caches, tokens, batch, tables):
    """float32 `[T, vocabulary]` of the step's tokens `[T]`, and the layers' caches after it."""
    shared = layers.prepare_v4_step(spec, batch, tables)
    positions = jnp.maximum(shared.metadata.positions, 0)
    for layer, cache in zip(_attention(model, caches), caches):
        layer.paged = nnx.Cache(cache)  # as its own caches, MaxText carries it through its rematerialisation

    def attend(layer, *, inputs_q, inputs_positions, **_):
        """`CompressedAttention.__call__`; its queries and keys come from the same input."""
        q, latent = layer.compressed_query_projection(inputs_q, inputs_positions, None)
        kv, _ = layer.compressed_kv_projection(inputs_q, inputs_positions, None)
        rows, params = _rows_and_params(layer, inputs_q, latent, inputs_positions)
        rows = layers.V4Rows(q=q[0].astype(jnp.bfloat16), kv=kv[0, :, 0].astype(jnp.bfloat16), **rows)
        params = layers.V4LayerParams(attn_sink=layer.sinks.get_value().astype(jnp.float32), **params)
        ratio = layer.compress_ratio
        out, cache, _ = layers.v4_layer(
            layer.paged.get_value(), rows, params, batch, shared.metadata, shared.plans.get(ratio),
            spec=spec, ratio=ratio,
        )  # fmt: skip
        layer.paged.set_value(cache)
        out = layer._apply_rotary_embedding_v4(out[None].astype(q.dtype), inputs_positions, reverse=True)
        out = layer.o_a_proj(out.reshape(*out.shape[:2], layer.config.o_groups, -1))
        return layer.o_b_proj(out.reshape(*out.shape[:2], -1)), None

    with mock.patch.object(CompressedAttention, "__call__", attend):
        scores = model(tokens[None], positions[None], None, enable_dropout=False)[0]
    return scores.astype(jnp.float32), [layer.paged.get_value() for layer in _attention(model, caches)]


def _attention(model, caches):
    return [getattr(model.decoder, f"layers_{i}").self_attention for i in range(len(caches))]


def _rows_and_params(layer, inputs, latent, positions):
    """Of a layer that compresses: what its compressor and, for ratio 4, its indexer project, and their parameters."""
    if not layer.compress_ratio:
        return {}, {}
    compressor = layer.csa_compressor if layer.compress_ratio == 4 else layer.hca_compressor
    rows = {"compressed_kv": compressor.kv_proj(inputs)[0], "compressed_score": compressor.gate_proj(inputs)[0]}
    params = {"compressor": _compressor_params(compressor)}
    if layer.compress_ratio == 4:
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


# --- a server around it ----------------------------------------------------------------------------


def load_server():
    """examples/jax_server.py as a module."""
    spec = importlib.util.spec_from_file_location("jax_server", Path(__file__).parents[1] / "jax_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(cfg, model, requests, *, kv_layout=mla.KVLayout.V4_FP8, **sizes):
    """Serves `jax_server.Request`s, greedily; call it where MaxText's functions are traced.

    Args:
      cfg: MaxText's config. model: its model.
      kv_layout: of the caches.
      sizes: max_batch, max_len, chunk, decode_buckets of `jax_server.Config`.

    Returns:
      The number of compiled programs.
    """
    server = load_server()
    graph, weights = nnx.split(model)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def forward(config, weights, state, batch, step):
        caches, tables, last_tokens = state
        tables = server.extend_tables(config, tables, batch, step)
        tokens = jnp.where(step["tokens"] < 0, last_tokens[step["row"]], step["tokens"])
        scores, caches = logits(nnx.merge(graph, weights), config.spec, caches, tokens, batch, tables)
        made = jnp.argmax(scores[step["last_row"]], -1).astype(jnp.int32)
        return (caches, tables, last_tokens.at[batch.req_pool_indices].set(made, mode="drop")), made

    config = server.Config(spec=spec_of(cfg, kv_layout), ratios=tuple(cfg.compress_ratios), **sizes)
    server.Server(config, forward, weights).serve(requests)
    return forward._cache_size()


def compare(dense, weights, requests, length):
    """What was made for each request beside dense attention's logits at the same places.

    Args:
      dense, weights: `small.forward` of the model.
      requests: after `serve`.
      length: of the padded sequences, so that dense attention compiles once.

    Returns:
      How many tokens have dense attention's largest logit, how many there are, by how much the logit of one falls short
      of the largest at most, and by how much the mean logit does.
    """
    same = count = 0
    short, spread = 0.0, []
    for request in requests:
        words = np.zeros((1, length), np.int32)
        read = len(request.prompt)
        words[0, : read + len(request.output)] = request.prompt + request.output
        data = {"inputs": words, "inputs_position": np.arange(length)[None], "inputs_segmentation": np.ones_like(words)}
        scores = np.asarray(dense(weights, data))[0, read - 1 : read - 1 + len(request.output)]
        made = np.take_along_axis(scores, np.asarray(request.output)[:, None], 1)[:, 0]
        same, count = same + int(np.sum(made == scores.max(1))), count + len(made)
        short, spread = max(short, float(np.max(scores.max(1) - made))), [*spread, *(scores.max(1) - scores.mean(1))]
    return same, count, short, float(np.mean(spread))
