"""The attention part of DeepSeek-V4.1-Flash as an engine runs it, as `benchmarks.stack` has V4-Flash's.

Layers share arrays by what they own: all layers without a compressor have a window alone, whatever they read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.stack import Stack
from jax_sparse_mla.indexer.logits import INDEX_DIM
from jax_sparse_mla.layers import (
    CompressorParams,
    IndexKeyParams,
    IndexRows,
    V4LayerCache,
    V4LayerParams,
    V4Rows,
    prepare_v4_step,
    v41_layer,
)
from jax_sparse_mla.models import ModelSpec, V41Layer, V41Spec, v41_layers

# The attention's part of the checkpoint's config.json, without the draft layers.
V41_FLASH = {
    "model_type": "deepseek_v41",
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "index_topk": 512,
    "index_n_heads": 32,
    "index_head_dim": INDEX_DIM,
}


def _pool(layer: V41Layer) -> int:
    """Whose arrays a layer shares: the ratio of a KV source, 0 of the others."""
    return layer.ratio if layer.is_kv_source else 0


@dataclasses.dataclass(frozen=True)
class V41Stack(Stack):
    """As `Stack`, with `layers` for `ratios`; dictionaries are by pool."""

    spec: V41Spec = dataclasses.field(default_factory=lambda: ModelSpec.from_hf_config(V41_FLASH))
    layers: tuple[V41Layer, ...] = v41_layers(V41_FLASH)

    @property
    def pools(self) -> dict[int, list[V41Layer]]:
        """The layers of each pool, in order."""
        pools: dict[int, list[V41Layer]] = {}
        for layer in self.layers:
            pools.setdefault(_pool(layer), []).append(layer)
        return pools

    def empty_caches(self) -> dict[int, V4LayerCache]:
        sizes = {"num_pages": 1 + self.batch * self.pages, "num_swa_pages": 1 + self.batch * self.window_pages}
        sizes |= {"max_requests": self.batch}
        return {
            pool: V4LayerCache.zeros(self.spec, pool, num_layers=len(layers), **sizes)
            for pool, layers in self.pools.items()
        }

    def params(self) -> dict[int, V4LayerParams]:
        rng, spec = np.random.default_rng(0), self.spec
        frequencies = 160000.0 ** -(np.arange(spec.rope_dim // 2) / (spec.rope_dim // 2))

        def layer(pool):
            source = {}
            if pool:
                wk = jnp.asarray(rng.standard_normal((INDEX_DIM, spec.qk_dim)) * spec.qk_dim**-0.5, jnp.bfloat16)
                source = {
                    "compressor": CompressorParams(
                        norm_weight=jnp.ones(spec.qk_dim), inv_freq=jnp.asarray(frequencies, jnp.float32)
                    ),
                    "index_keys": IndexKeyParams(wk=wk, norm_weight=jnp.ones(INDEX_DIM)),
                }
            return V4LayerParams(attn_sink=jnp.asarray(rng.standard_normal(spec.num_heads), jnp.float32), **source)

        return {pool: V4LayerParams.stack([layer(pool) for _ in layers]) for pool, layers in self.pools.items()}

    def rows(self, num_rows: int, seed: int = 0) -> dict[int, V4Rows]:
        """Those of a KV source have the index rows of all index sources of its ratio."""
        spec, keys = self.spec, iter(jax.random.split(jax.random.key(seed), 16))

        def normal(*dims, dtype=jnp.float32):
            return jax.random.normal(next(keys), (num_rows, *dims), dtype)

        q, kv = normal(spec.num_heads, spec.qk_dim, dtype=jnp.bfloat16), normal(spec.qk_dim, dtype=jnp.bfloat16)
        rows = {}
        for pool in self.pools:
            rows[pool] = V4Rows(q=q, kv=kv)
            if pool:
                index = IndexRows(
                    q=normal(spec.index_heads, spec.index_dim, dtype=jnp.bfloat16),
                    weights=normal(spec.index_heads) * (spec.index_dim * spec.index_heads) ** -0.5,
                )
                gated = {"compressed_kv": normal(spec.qk_dim), "compressed_score": normal(spec.qk_dim)}
                own = gated if spec.kind(pool).gated else {"compressed_kv": normal(spec.qk_dim, dtype=jnp.bfloat16)}
                rows[pool] = V4Rows(q=q, kv=kv, index=index, **own)
        return rows

    def run(self, caches, rows, params, batch, tables, *, gathered):
        step = prepare_v4_step(self.spec, batch, tables, gathered=gathered)
        caches, out, selected, sources = dict(caches), None, None, {}
        for layer in self.layers:
            pool = _pool(layer)
            number = [other.index for other in self.pools[pool]].index(layer.index)
            layer_rows = rows[pool]
            if layer.is_index_source and not pool:
                layer_rows = dataclasses.replace(layer_rows, index=rows[layer.ratio].index)
            if out is not None:
                layer_rows = _after(out, layer_rows)
            out, cache, selected = v41_layer(
                *(caches[pool].layer(number), layer_rows, params[pool].layer(number), batch, step.metadata),
                step.plans.get(layer.ratio),
                spec=self.spec,
                layer=layer,
                source=None if layer.is_kv_source else sources.get(layer.kv_source),
                selected=selected,
            )
            caches[pool] = cache
            if layer.is_kv_source:
                sources[layer.index] = cache
        return {pool: cache.whole() for pool, cache in caches.items()}, out


def _after(out: jax.Array, rows: V4Rows) -> V4Rows:
    """The rows, which now depend on the output of the layer below; what a compressor reads does so by its numbers."""
    rows = jax.lax.optimization_barrier(dataclasses.replace(rows, kv=rows.kv + out[:, 0]))
    if rows.compressed_kv is None:
        return rows
    return dataclasses.replace(rows, compressed_kv=rows.compressed_kv + out[:, 0].astype(rows.compressed_kv.dtype))
