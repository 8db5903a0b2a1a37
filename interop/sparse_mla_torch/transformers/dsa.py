"""The attention of DeepSeek-V3.2 and GLM-5: an indexer's entries, attended to in the latent space."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from sparse_mla_torch.transformers import kept
from sparse_mla_torch.transformers.rotary import normed, rotary_table, turn
from sparse_mla_torch.transformers.select import Columns, Seen, attend, blocks, leading, select

Rotary = tuple[Tensor, Tensor]  # cos and sin, [batch or 1, rows, rope]
_TURN = (False, True)  # of queries and latents: pairs side by side, the result in halves


class _Sparse:
    """The forward of an attention module; GLM-5's takes and returns a selection that layers share.

    Without gradients results are written to where they are wanted, caches included, which takes few launches; with
    gradients they are concatenated.
    """

    def _attend(
        self, hidden: Tensor, rotary: Rotary, seen: Seen, cache: Cache | None, shared: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The output `[batch, rows, hidden]`, and the entries that each block of rows attended to."""
        batch, num_rows, _ = hidden.shape
        pairs = self.qk_rope_head_dim // 2
        table = seen.once("table", lambda: rotary_table(*(x[..., :pairs] for x in rotary)))
        q_residual = normed(self.q_a_layernorm, self.plain_norm, self.q_a_proj(hidden))
        kv = self._latents(self.kv_a_proj_with_mqa(hidden), table, cache)
        keys = None if self.indexer is None else self._index_keys(hidden, table, cache)
        to_latent, from_latent = self._absorbed()

        outputs, selected = [], []
        for block in blocks(batch, num_rows, keys, self.config.index_n_heads):
            of_block = table[:, block]
            if keys is None:
                columns = _shared(shared[:, block], self._ends(seen, block, batch, hidden), seen, block)
            else:
                columns = self._select(hidden, q_residual, keys, of_block, seen, block)
            q = self.q_b_proj(q_residual[:, block]).unflatten(-1, (-1, self.qk_head_dim))
            out = attend(self._queries(q, to_latent, of_block), kv, columns, self.scaling, seen)
            into = None if torch.is_grad_enabled() else out.new_empty(*out.shape[:3], self.v_head_dim)
            outputs.append(self.o_proj(_by_heads(out, from_latent.transpose(1, 2), out=into).flatten(2)))
            selected.append(columns.indices)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), selected

    def _latents(self, projected: Tensor, table: Tensor, cache: Cache | None) -> Tensor:
        """Latents and turned keys of all tokens: `[batch, tokens or more, 576]`; rows behind them are not read."""
        num_rows, rank = projected.shape[1], self.kv_lora_rank
        latent, rope = projected[..., :rank], projected[..., rank:]
        layer = kept.layer_of(cache, self.layer_idx)
        if torch.is_grad_enabled() or (cache is not None and layer is None):
            latent = normed(self.kv_a_layernorm, self.plain_norm, latent)[:, None]
            rope = turn(rope, table, halves=_TURN)[:, None]
            if cache is not None:
                latent, rope = cache.update(latent, rope, self.layer_idx)
            return torch.cat((latent, rope), -1)[:, 0]
        past = layer.get_seq_length() if layer is not None else 0
        parts = (layer.keys, layer.values) if past else ()
        kv = kept.room(layer, "latents", parts, projected.shape, projected)
        new = kv[:, past : past + num_rows]
        normed(self.kv_a_layernorm, self.plain_norm, latent, out=new[..., :rank])
        turn(rope, table, halves=_TURN, out=new[..., rank:])
        if layer is not None:
            rows = kv[:, None, : past + num_rows]
            parts = rows[..., :rank], rows[..., rank:]
            if not layer.is_initialized:
                layer.lazy_initialization(*parts)
            layer.keys, layer.values = parts
            kept.keep(layer, "latents", kv, parts)
        return kv

    @torch.no_grad()
    def _index_keys(self, hidden: Tensor, table: Tensor, cache: Cache | None) -> Tensor:
        """The index keys of all tokens, `[batch, tokens or more, dim]`."""
        indexer, num_rows = self.indexer, hidden.shape[1]
        new, rope = indexer.k_norm(indexer.wk(hidden)), indexer.qk_rope_head_dim
        layer = kept.layer_of(cache, self.layer_idx)
        if cache is not None and (layer is None or not hasattr(layer, "update_indexer")):
            turn(new[..., :rope], table, halves=self.turn_index, out=new[..., :rope])
            return cache.update_indexer(new, self.layer_idx)
        parts = (layer.indexer_keys,) if layer is not None and layer.is_indexer_initialized else ()
        past = parts[0].shape[1] if parts else 0
        keys = kept.room(layer, "index keys", parts, new.shape, new)
        rows = keys[:, past : past + num_rows]
        rows[..., rope:] = new[..., rope:]
        turn(new[..., :rope], table, halves=self.turn_index, out=rows[..., :rope])
        if layer is not None:
            if not layer.is_indexer_initialized:
                layer.lazy_initialization_indexer(new)
            layer.indexer_keys = keys[:, : past + num_rows]
            kept.keep(layer, "index keys", keys, (layer.indexer_keys,))
        return keys

    def _ends(self, seen: Seen, block: slice, batch: int, like: Tensor) -> Tensor:
        """int32 `[batch, rows]`, how many tokens each row of a block sees."""
        start, stop = block.start + 1 + seen.past, block.stop + 1 + seen.past
        arange = functools.partial(torch.arange, start, stop, device=like.device, dtype=torch.int32)
        return seen.once(("ends", start, stop), lambda: arange().repeat(batch, 1))

    @torch.no_grad()
    def _select(
        self, hidden: Tensor, q_residual: Tensor, keys: Tensor, table: Tensor, seen: Seen, block: slice
    ) -> Columns:
        indexer, count = self.indexer, seen.past + hidden.shape[1]
        ends = self._ends(seen, block, len(hidden), hidden)
        if count <= indexer.index_topk:
            key = "all", block.start, block.stop
            return seen.once(key, lambda: Columns(leading(ends, count, seen.tokens), ends))
        hidden, q_residual = hidden[:, block], q_residual[:, block]
        q = indexer.wq_b(q_residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        rope = q[..., : indexer.qk_rope_head_dim]
        turn(rope, table[:, :, None], halves=self.turn_index, out=rope)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        indices = select(q, weights, keys, ends, indexer.index_topk, seen.tokens, None)
        return _shared(indices, ends, seen, block)

    def _queries(self, q: Tensor, to_latent: Tensor, table: Tensor) -> Tensor:
        """Queries in the latent space, `[batch, rows, heads, 576]`."""
        nope, rope = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        table = table[:, :, None]
        if torch.is_grad_enabled():
            return torch.cat((_by_heads(nope, to_latent), turn(rope, table, halves=_TURN)), -1)
        made = q.new_empty(*q.shape[:3], self.kv_lora_rank + self.qk_rope_head_dim)
        _by_heads(nope, to_latent, out=made[..., : self.kv_lora_rank])
        turn(rope, table, halves=_TURN, out=made[..., self.kv_lora_rank :])
        return made

    def _absorbed(self) -> tuple[Tensor, Tensor]:
        """The parts of `kv_b_proj` for keys and for values, `[heads, dim, latent]`."""
        weight = self.kv_b_proj.weight
        if type(self.kv_b_proj) is not nn.Linear:  # quantised, or with an adapter: what it makes of unit vectors
            like = self.kv_a_layernorm.weight
            weight = self.kv_b_proj(torch.eye(self.kv_lora_rank, dtype=like.dtype, device=like.device)).T
        weight = weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        return weight.split((self.qk_nope_head_dim, self.v_head_dim), 1)


class SparseV32Attention(_Sparse, v32.DeepseekV32Attention):
    turn_index = (True, True)
    plain_norm = v32.DeepseekV32RMSNorm

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary,
        attention_mask: Seen,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return self._attend(hidden_states, position_embeddings, attention_mask, cache, None)[0], None


class SparseGlmAttention(_Sparse, glm.GlmMoeDsaAttention):
    turn_index = (False, True)
    plain_norm = glm.GlmMoeDsaRMSNorm

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary,
        attention_mask: Seen,
        cache: Cache | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor]:
        if self.indexer is None and prev_topk_indices is None:
            raise ValueError("a layer that shares the selection has no layer with an indexer before it")
        shared = (hidden_states, position_embeddings, attention_mask, cache, prev_topk_indices)
        out, selected = self._attend(*shared)
        if self.indexer is None:
            return out, None, prev_topk_indices
        return out, None, selected[0] if len(selected) == 1 else torch.cat(selected, 1)


def _shared(indices: Tensor, ends: Tensor, seen: Seen, block: slice) -> Columns:
    """Selected entries, of which those that a row does not see stand last."""
    width = indices.shape[2]
    spans = seen.once(("spans", block.start, block.stop, width), lambda: ends.clamp(max=width))
    return Columns(indices, spans)


def _by_heads(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x `[batch, rows, heads, n]` times each head's weight `[heads, n, m]`: `[batch, rows, heads, m]`."""
    into = None if out is None else out.flatten(0, 1).transpose(0, 1)
    product = torch.bmm(x.flatten(0, 1).transpose(0, 1), weight, out=into)
    return out if out is not None else product.transpose(0, 1).unflatten(0, x.shape[:2])
