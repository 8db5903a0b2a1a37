"""The attention of DeepSeek-V3.2 and GLM-5: an indexer's entries, attended to in the latent space."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from sparse_mla_torch.transformers.select import Columns, Seen, attend, blocks, select

Rotary = tuple[Tensor, Tensor]  # cos and sin, [batch or 1, rows, rope]


class _Sparse:
    """The forward of an attention module; GLM-5's takes and returns a selection that layers share."""

    def _attend(
        self, hidden: Tensor, rotary: Rotary, seen: Seen, cache: Cache | None, shared: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The output `[batch, rows, hidden]`, and the entries that each block of rows attended to."""
        batch, num_rows, _ = hidden.shape
        sizes = self.kv_lora_rank, self.qk_rope_head_dim
        q_residual = self.q_a_layernorm(self.q_a_proj(hidden))
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split(sizes, -1)
        latent, k_rope = self.kv_a_layernorm(latent)[:, None], _turn(k_rope[:, None], rotary, 1)
        index_keys = None if self.indexer is None else _index_keys(self.indexer, hidden, rotary, self.turn_index)
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx)
            if index_keys is not None:
                index_keys = cache.update_indexer(index_keys, self.layer_idx)
        kv = torch.cat((latent, k_rope), -1)[:, 0]
        to_latent, from_latent = self._absorbed()

        outputs, selected = [], []
        for block in blocks(batch, num_rows, index_keys, self.config.index_n_heads):
            turn = tuple(x[:, block] for x in rotary)
            ends = torch.arange(block.start + 1, block.stop + 1, device=hidden.device, dtype=torch.int32) + seen.past
            ends = ends.expand(batch, -1)
            if index_keys is None:
                entries = shared[:, block]
                columns = Columns(entries, ends.clamp(max=entries.shape[2]))
            else:
                parts = hidden[:, block], q_residual[:, block]
                q_index, weights = _index_queries(self.indexer, *parts, turn, self.turn_index)
                columns = select(q_index, weights, index_keys, ends, self.indexer.index_topk, seen.tokens)
            q = self.q_b_proj(q_residual[:, block]).unflatten(-1, (-1, self.qk_head_dim))
            q_nope, q_rope = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
            q = torch.cat((torch.einsum("brhd,hdc->brhc", q_nope, to_latent), _turn(q_rope, turn, 2)), -1)
            out = attend(q, kv, columns, self.scaling)
            out = torch.einsum("brhc,hdc->brhd", out, from_latent)
            outputs.append(self.o_proj(out.flatten(2)))
            selected.append(columns.indices)
        return torch.cat(outputs, 1), selected

    def _absorbed(self) -> tuple[Tensor, Tensor]:
        """The parts of `kv_b_proj` for keys and for values, `[heads, dim, latent]`."""
        weight = self.kv_b_proj.weight
        if type(self.kv_b_proj) is not nn.Linear:  # quantised, or with an adapter: what it makes of unit vectors
            like = self.kv_a_layernorm.weight
            weight = self.kv_b_proj(torch.eye(self.kv_lora_rank, dtype=like.dtype, device=like.device)).T
        weight = weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        return weight.split((self.qk_nope_head_dim, self.v_head_dim), 1)


class SparseV32Attention(_Sparse, v32.DeepseekV32Attention):
    turn_index = staticmethod(v32.apply_rotary_pos_emb)

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
    turn_index = staticmethod(glm.apply_rotary_pos_emb_interleave)

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
        return out, None, prev_topk_indices if self.indexer is None else torch.cat(selected, 1)


def _turn(x: Tensor, rotary: Rotary, head_axis: int) -> Tensor:
    return v32.apply_rotary_pos_emb_interleave(x, x, *rotary, unsqueeze_dim=head_axis)[0]


def _turn_index(x: Tensor, rope: int, rotary: Rotary, turn: Any) -> Tensor:
    """Index queries or keys `[batch, rows, heads, dim]`, whose first values turn."""
    return torch.cat((turn(x[..., :rope], x[..., :rope], *rotary, unsqueeze_dim=2)[0], x[..., rope:]), -1)


@torch.no_grad()
def _index_keys(indexer: nn.Module, hidden: Tensor, rotary: Rotary, turn: Any) -> Tensor:
    keys = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    return _turn_index(keys, indexer.qk_rope_head_dim, rotary, turn)[:, :, 0]


@torch.no_grad()
def _index_queries(
    indexer: nn.Module, hidden: Tensor, q_residual: Tensor, rotary: Rotary, turn: Any
) -> tuple[Tensor, Tensor]:
    """The queries, and their heads' weights with both scales."""
    q = indexer.wq_b(q_residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return _turn_index(q, indexer.qk_rope_head_dim, rotary, turn), weights
