"""The attention part of DeepSeek-V4-Flash as an engine runs it: all layers in one jitted step, caches donated.

What is outside the attention (projections, experts) is left out: every layer gets the same projected rows, with one
head of the previous layer's output added to its keys (and one value of it to its compressors' position biases, where
functions of their own write what these make). So no layer can run or write before the one below it has read, as in a
model, and an optimization barrier keeps XLA from sharing work between them. The layers of a ratio share their arrays:
a write that did not depend on the last read would copy them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla import DEEPSEEK_V4_FLASH, ForwardBatch, ForwardMode, ModelSpec, PagedKV, RequestTables, write_kv
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import INDEX_DIM, IndexKeys, write_index_k
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.launch.dispatch import use_triton
from jax_sparse_mla.layers import (
    CompressorParams,
    IndexRows,
    V4LayerCache,
    V4LayerParams,
    V4Rows,
    prepare_v4_step,
    v4_layer,
)
from jax_sparse_mla.layers.write import MAX_ROWS
from jax_sparse_mla.models import INDEXED_RATIO

# `compress_ratios` of the checkpoint's config.json, without the entry of its draft layer: 43 layers, 21 of ratio 4.
V4_FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)
RANDOM_PAGES = 64  # of which all pages are copies


@dataclasses.dataclass(frozen=True)
class Stack:
    """The choice of a step's shapes.

    Attributes:
      ratios: the compress ratio of each layer.
      batch: requests.
      max_len: tokens that each request may grow to; also the bucket of the page tables.
      window_pages: pages of the sliding-window cache that each request has; older tokens have none.
    """

    spec: ModelSpec = DEEPSEEK_V4_FLASH
    ratios: Sequence[int] = V4_FLASH_RATIOS
    batch: int = 1
    max_len: int = 8192
    window_pages: int = 3

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return -(-self.max_len // self.spec.page_size)

    def tables(self, seed: int = 0) -> RequestTables:
        """Every request at its full length, in shuffled pages; page 0 is left to what padding rows write."""
        spec, rng = self.spec, np.random.default_rng(seed)
        page = 1 + rng.permutation(self.batch * self.pages).reshape(self.batch, self.pages)
        # The window's pages are a ring: page i of a request lies where page i − window_pages did.
        ring = np.arange(self.pages) % self.window_pages + np.arange(self.batch)[:, None] * self.window_pages
        swa_page = np.zeros(1 + page.size, np.int64)
        swa_page[page] = 1 + ring
        offset = np.arange(spec.page_size)
        slots = (page[:, :, None] * spec.page_size + offset).reshape(self.batch, -1)
        swa = (swa_page[:, None] * spec.page_size + offset).reshape(-1)
        return RequestTables(
            req_to_token=jnp.asarray(slots[:, : self.max_len], jnp.int32),
            full_to_swa=jnp.asarray(np.append(swa, -1), jnp.int32),
        )

    def empty_caches(self) -> dict[int, V4LayerCache]:
        """By ratio, the caches of all its layers."""
        return {
            ratio: V4LayerCache.zeros(
                self.spec,
                ratio,
                num_pages=1 + self.batch * self.pages,
                num_swa_pages=1 + self.batch * self.window_pages,
                max_requests=self.batch,
                num_layers=self.ratios.count(ratio),
            )
            for ratio in dict.fromkeys(self.ratios)
        }

    def params(self) -> dict[int, V4LayerParams]:
        """By ratio, random parameters of all its layers."""
        rng, spec = np.random.default_rng(0), self.spec

        def compressor(ratio, head_dim):
            width = head_dim * (2 if ratio == INDEXED_RATIO else 1)
            return CompressorParams(
                ape=jnp.asarray(rng.standard_normal((ratio, width)), jnp.float32),
                norm_weight=jnp.ones(head_dim),
                inv_freq=jnp.asarray(160000.0 ** -(np.arange(spec.rope_dim // 2) / (spec.rope_dim // 2)), jnp.float32),
            )

        def layer(ratio):
            return V4LayerParams(
                attn_sink=jnp.asarray(rng.standard_normal(spec.num_heads), jnp.float32),
                compressor=compressor(ratio, spec.qk_dim) if ratio else None,
                index_compressor=compressor(ratio, spec.index_dim) if ratio == INDEXED_RATIO else None,
            )

        layers = [(ratio, layer(ratio)) for ratio in self.ratios]
        return {
            ratio: V4LayerParams.stack([params for of, params in layers if of == ratio])
            for ratio in dict.fromkeys(self.ratios)
        }

    def rows(self, num_rows: int, seed: int = 0) -> dict[int, V4Rows]:
        """By ratio, the random projected rows of a step; queries and keys are the same arrays in all."""
        spec, keys = self.spec, iter(jax.random.split(jax.random.key(seed), 16))

        def normal(*dims, dtype=jnp.float32):
            return jax.random.normal(next(keys), (num_rows, *dims), dtype)

        def compressor_input(ratio, head_dim):
            return (normal(head_dim * (2 if ratio == INDEXED_RATIO else 1)) for _ in range(2))

        q, kv = normal(spec.num_heads, spec.qk_dim, dtype=jnp.bfloat16), normal(spec.qk_dim, dtype=jnp.bfloat16)
        rows = {}
        for ratio in dict.fromkeys(self.ratios):
            rows[ratio] = V4Rows(q=q, kv=kv)
            if ratio:
                main_kv, main_score = compressor_input(ratio, spec.qk_dim)
                rows[ratio] = dataclasses.replace(rows[ratio], compressed_kv=main_kv, compressed_score=main_score)
            if ratio == INDEXED_RATIO:
                index_kv, index_score = compressor_input(ratio, spec.index_dim)
                index = IndexRows(
                    q=normal(spec.index_heads, spec.index_dim, dtype=jnp.bfloat16),
                    weights=normal(spec.index_heads) * (spec.index_dim * spec.index_heads) ** -0.5,
                    kv=index_kv,
                    score=index_score,
                )
                rows[ratio] = dataclasses.replace(rows[ratio], index=index)
        return rows

    def run(self, caches, rows, params, batch: ForwardBatch, tables: RequestTables, *, gathered: bool):
        """`(caches, out)` after all layers of a step."""
        return _layers(self, caches, rows, params, batch, tables, gathered=gathered)

    def empty_out(self, num_rows: int) -> jax.Array:
        """The array that a step's output is written over; see `decode`."""
        return jnp.zeros((num_rows, self.spec.num_heads, self.spec.v_dim), jnp.bfloat16)

    def decode(self):
        """`(state, rows, params, tables) -> state`, state `(caches, seq_lens [batch], out)`, donated.

        The output is donated too: a CUDA graph holds the addresses that it was recorded with, and XLA rewrites its
        nodes whenever a step's buffers are elsewhere.
        """
        return jax.jit(functools.partial(decode_step, self), donate_argnums=0, keep_unused=True)

    def prefill(self):
        """`(state, rows, params, tables, end) -> state`, state `(caches, tokens done [], out)`, donated.

        The next chunk of request 0, as many tokens as there are rows, or what is left before its `end`.
        """
        return jax.jit(functools.partial(_prefill, self), donate_argnums=0, keep_unused=True)


def fill(caches):
    """Caches as after a prefill, without one: pages of quantised random rows, the same few over and over.

    Takes the caches of a stack or of an engine, which are donated; states that requests carry stay as they are.
    """

    def filled(part):
        if isinstance(part, PagedKV):
            return dataclasses.replace(part, data=repeated(random_pages(part.layout, part.page_size), part.data))
        if isinstance(part, IndexKeys):
            source = random_index_pages(part.page_size, part.format)
            return dataclasses.replace(part, data=repeated(source, part.data))
        return filled(IndexKeys(part)).data if part.dtype == jnp.uint8 else part

    return jax.tree.map(filled, caches, is_leaf=lambda part: isinstance(part, (PagedKV, IndexKeys)))


# Their shapes hang on no cache's size, so few programs make the pages of all cases.
@functools.partial(jax.jit, static_argnums=(0, 1))
def random_pages(layout: KVLayout, page_size: int) -> jax.Array:
    """uint8 `[RANDOM_PAGES, page_bytes]` of random rows."""
    empty = PagedKV.zeros(layout, RANDOM_PAGES, page_size)
    rows = jax.random.normal(jax.random.key(1), (empty.num_slots, layout.qk_dim), jnp.bfloat16)
    return write_kv(empty, jnp.arange(empty.num_slots, dtype=jnp.int32), rows).data


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_index_pages(page_size: int, format: IndexFormat) -> jax.Array:
    """uint8 `[RANDOM_PAGES, page_bytes]` of random index keys."""
    empty = IndexKeys.zeros(RANDOM_PAGES, page_size, format=format)
    keys = jax.random.normal(jax.random.key(2), (RANDOM_PAGES * page_size, INDEX_DIM), jnp.bfloat16)
    return write_index_k(empty, jnp.arange(len(keys), dtype=jnp.int32), keys).data


def repeated(source: jax.Array, pages: jax.Array) -> jax.Array:
    """The pages of `source` over and over, in the memory of `pages` and where that lies."""
    # One device's arrays stay uncommitted, as a step's other arguments are.
    return _repeated(pages.sharding if len(pages.sharding.device_set) > 1 else None)(source, pages)


@functools.cache
def _repeated(sharding: jax.sharding.Sharding | None):
    def repeat(source, pages):
        return source[jnp.arange(len(pages), dtype=jnp.int32) % len(source)]

    return jax.jit(repeat, donate_argnums=1, out_shardings=sharding)


def _layers(stack: Stack, caches, rows, params, batch, tables, *, gathered):
    step = prepare_v4_step(stack.spec, batch, tables, gathered=gathered)
    caches, out = dict(caches), None
    for i, ratio in enumerate(stack.ratios):
        number = stack.ratios[:i].count(ratio)  # among the layers of its ratio
        cache, layer_rows, layer_params = caches[ratio].layer(number), rows[ratio], params[ratio].layer(number)
        if out is not None:
            one_kernel = use_triton() and not gathered and layer_rows.kv.shape[0] <= MAX_ROWS
            layer_rows, layer_params = _after(out, layer_rows, layer_params, keys_alone=one_kernel)
        arguments = cache, layer_rows, layer_params, batch, step.metadata, step.plans.get(ratio)
        out, caches[ratio], _ = v4_layer(*arguments, spec=stack.spec, ratio=ratio)
    return {ratio: cache.whole() for ratio, cache in caches.items()}, out


def _after(out: jax.Array, rows: V4Rows, params: V4LayerParams, *, keys_alone: bool) -> tuple[V4Rows, V4LayerParams]:
    """The rows and parameters, which now depend on the output of the layer below.

    Where one kernel writes all that a layer stores, its keys alone are enough.
    """
    rows = jax.lax.optimization_barrier(dataclasses.replace(rows, kv=rows.kv + out[:, 0]))
    if params.compressor is None or keys_alone:
        return rows, params
    params, value = params.alone(), out[0, 0, 0].astype(jnp.float32)

    def depending(of: CompressorParams | None) -> CompressorParams | None:
        return None if of is None else dataclasses.replace(of, ape=of.ape + value)

    index_compressor = depending(params.index_compressor)
    return rows, dataclasses.replace(params, compressor=depending(params.compressor), index_compressor=index_compressor)


def decode_step(stack: Stack, state, rows, params, tables):
    caches, seq_lens, _ = state
    # An engine hands these in. Of a plain iota XLA would make one for each layer of a sharded step, a launch each.
    requests = jax.lax.optimization_barrier(jnp.arange(stack.batch, dtype=jnp.int32))
    batch = ForwardBatch(
        mode=ForwardMode.DECODE,
        max_seq_len=stack.max_len,
        req_pool_indices=requests,
        seq_lens=seq_lens + 1,
        out_cache_loc=tables.req_to_token[requests, seq_lens],
    )
    caches, out = decode_layers(stack, caches, rows, params, batch, tables)
    return caches, batch.seq_lens, out


def decode_layers(stack: Stack, caches, rows, params, batch: ForwardBatch, tables):
    """`(caches, out)` after all layers of any decode step over the stack's tables."""
    return stack.run(caches, rows, params, batch, tables, gathered=False)


def _prefill(stack: Stack, state, rows, params, tables, end):
    caches, done, _ = state
    num_rows = next(iter(rows.values())).q.shape[0]
    count = jnp.minimum(num_rows, end - done)
    slots = jax.lax.dynamic_slice(jnp.pad(tables.req_to_token[0], (0, num_rows)), (done,), (num_rows,))
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        max_seq_len=stack.max_len,
        req_pool_indices=jnp.zeros(1, jnp.int32),
        seq_lens=(done + count)[None],
        out_cache_loc=slots,
        extend_lens=count[None],
    )
    caches, out = stack.run(caches, rows, params, batch, tables, gathered=True)
    return caches, done + count, out
