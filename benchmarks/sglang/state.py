"""The state of SGLang's step: the caches, tables, rows and parameters of `benchmarks.stack`, as its pools hold it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.stack import Stack, random_index_pages, random_pages
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.layers import CompressorParams, V4LayerParams
from jax_sparse_mla.models import INDEXED_RATIO

C4_RING, C128_RING = 8, 128  # tokens of a compressor's state: for each page of the window's cache, for each request
EPS = 1e-6


@dataclasses.dataclass
class Compressor:
    """A compressor's parameters, state and input.

    Attributes:
      ape: float32 `[8, head_dim]` of ratio 4, the group before first, and `[128, head_dim]` of ratio 128.
      norm_weight: float32 `[head_dim]`.
      state: float32 `[tokens / ratio, ratio, 2 · coff · head_dim]`, kv before score; coff is 2 for ratio 4 and else 1.
      rows: float32 `[B, 2 · coff · head_dim]`, kv before score.
    """

    ape: torch.Tensor
    norm_weight: torch.Tensor
    state: torch.Tensor
    rows: torch.Tensor


@dataclasses.dataclass
class Layer:
    """A layer's caches and parameters.

    Attributes:
      swa, compressed: uint8 `[pages, page_bytes]`; a page has 256 tokens, and 64 or 2 entries.
      index_k: uint8 `[pages, 64 · 132]`.
      sink: float32 `[heads]`.
    """

    ratio: int
    swa: torch.Tensor
    sink: torch.Tensor
    compressed: torch.Tensor | None = None
    compressor: Compressor | None = None
    index_k: torch.Tensor | None = None
    index_compressor: Compressor | None = None


class State:
    """All that a decode step reads and writes, on the GPU.

    Attributes:
      layers: of the stack.
      lens: int64 `[B]`, tokens of each request; a step begins with one more.
      requests: int64 `[B]`.
      req_to_token: int32 `[B, max_len]`; slots, the same as int64, is what the step takes its own slots from, as an
        engine's scheduler hands them over.
      full_to_swa: int64 `[pool + 1]`.
      q: bfloat16 `[B, heads, 512]`. kv: bfloat16 `[B, 512]`. kv_weight: bfloat16 `[512]`.
      index_q: bfloat16 `[B, 64, 128]`. index_weights: bfloat16 `[B, 64]`, to be multiplied by `index_scale`.
      freqs: complex64 `[max_len, 32]`, the rope of each position, from inv_freq float32 `[32]`.
      params: our parameters of each layer.
    """

    def __init__(self, stack: Stack, num_rows: int | None = None):
        """`num_rows` is how many rows the inputs have, by default one for each request."""
        self.stack, self.device = stack, "cuda"
        tables, rows = stack.tables(), stack.rows(num_rows or stack.batch)
        self.req_to_token = self._tensor(tables.req_to_token)
        self.slots, self.full_to_swa = self.req_to_token.long(), self._tensor(tables.full_to_swa).long()
        self.requests = torch.arange(stack.batch, device=self.device)
        self.lens = torch.zeros(stack.batch, dtype=torch.int64, device=self.device)
        first = rows[stack.ratios[0]]
        self.q, self.kv = self._tensor(first.q), self._tensor(first.kv)
        self.kv_weight = torch.ones(stack.spec.qk_dim, dtype=torch.bfloat16, device=self.device)
        self.index_scale = (stack.spec.index_dim * stack.spec.index_heads) ** -0.5
        if INDEXED_RATIO in rows:
            index = rows[INDEXED_RATIO].index
            self.index_q = self._tensor(index.q)
            self.index_weights = self._tensor(index.weights / self.index_scale).bfloat16()
        self._rows, self.params = rows, layer_params(stack)
        self.inv_freq = next(p.compressor.inv_freq for p in self.params if p.compressor is not None)
        self.freqs = self._tensor(rope_table(self.inv_freq, stack.max_len))
        self.layers = self._layers()

    def _tensor(self, array) -> torch.Tensor:
        if array.dtype == jnp.bfloat16:
            return torch.from_numpy(np.array(array.astype(jnp.float32))).to(self.device).bfloat16()
        return torch.from_numpy(np.array(array)).to(self.device)

    def _layers(self) -> list[Layer]:
        stack, spec = self.stack, self.stack.spec
        pages, swa_pages = 1 + stack.batch * stack.pages, 1 + stack.batch * stack.window_pages
        sources = {r: random_pages(spec.kv_layout, spec.page_size // max(r, 1)) for r in {0, *stack.ratios}}
        index_pages = random_index_pages(spec.page_size // INDEXED_RATIO, IndexFormat.FP8)
        layers = []
        for i, ratio in enumerate(stack.ratios):
            number, params = stack.ratios[:i].count(ratio), self.params[i]
            swa = self._repeated(sources[0], number, swa_pages)
            layer = Layer(ratio, swa=swa, sink=self._tensor(params.attn_sink))
            if ratio:
                layer.compressed = self._repeated(sources[ratio], number, pages)
                rows = self._rows[ratio].compressed_kv, self._rows[ratio].compressed_score
                layer.compressor = self._compressor(ratio, params.compressor, *rows)
            if ratio == INDEXED_RATIO:
                layer.index_k = self._repeated(index_pages, number, pages)
                rows = self._rows[ratio].index.kv, self._rows[ratio].index.score
                layer.index_compressor = self._compressor(ratio, params.index_compressor, *rows)
            layers.append(layer)
        return layers

    def _repeated(self, source: jax.Array, layer: int, pages: int) -> torch.Tensor:
        """uint8 `[pages, page_bytes]`, a layer's share of the same few pages over and over, as in `stack.fill`."""
        source = self._tensor(source)
        return source[torch.arange(layer * pages, (layer + 1) * pages, device=self.device) % len(source)]

    def _compressor(self, ratio: int, params: CompressorParams, kv, score) -> Compressor:
        tokens = C4_RING * (1 + self.stack.batch * self.stack.window_pages)
        if ratio != INDEXED_RATIO:
            tokens = C128_RING * self.stack.batch
        rows = torch.cat([self._tensor(kv), self._tensor(score)], 1)
        # [ratio, A | B] becomes A's rows and then B's: SGLang's own order of a window.
        ape = self._tensor(params.ape).view(ratio, -1, len(params.norm_weight)).transpose(0, 1).flatten(0, 1)
        return Compressor(
            ape=ape.contiguous(),
            norm_weight=self._tensor(params.norm_weight),
            state=torch.zeros(tokens // ratio, ratio, rows.shape[1], device=self.device),
            rows=rows,
        )


def rope_table(inv_freq, positions: int) -> np.ndarray:
    """complex64 `[positions, rope_dim / 2]`; the angle is a float32 product, as in the compressor's rope."""
    angle = np.arange(positions, dtype=np.float32)[:, None] * np.asarray(inv_freq)
    return (np.cos(angle) + 1j * np.sin(angle)).astype(np.complex64)


def layer_params(stack: Stack) -> list[V4LayerParams]:
    """Each layer's parameters, in arrays of their own."""
    of_ratio = stack.params()
    numbers = [stack.ratios[:i].count(ratio) for i, ratio in enumerate(stack.ratios)]
    return [of_ratio[ratio].layer(number).alone() for ratio, number in zip(stack.ratios, numbers)]
