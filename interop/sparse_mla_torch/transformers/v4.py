"""The attention of DeepSeek-V4: a window of tokens, and compressed entries, all or those that an indexer selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from sparse_mla_torch.transformers.select import Columns, Seen, attend, blocks, select

Rotary = tuple[Tensor, Tensor]  # cos and sin, [batch or 1, rows, rope / 2]


class SparseV4Attention(v4.DeepseekV4Attention):
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, Rotary],
        position_ids: Tensor,
        attention_mask: Seen,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        batch, num_rows, _ = hidden_states.shape
        rotary = position_embeddings[self.rope_layer_type]
        q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
        kv = v4.apply_rotary_pos_emb(self.kv_norm(self.kv_proj(hidden_states))[:, None], *rotary)
        layer = None if cache is None else cache.layers[self.layer_idx]
        if cache is not None:
            kv = cache.update(kv, kv, self.layer_idx)[0]
        kv = kv[:, 0]
        num_tokens, keys = kv.shape[1], None
        selects = self.layer_type == "compressed_sparse_attention"
        if self.compressor is not None:
            entries = _compress(self.compressor, "compressor", hidden_states, layer, overlap=selects)
            kv = torch.cat((kv, entries), 1)
        if selects:
            keys = _compress(self.compressor.indexer, "indexer", hidden_states, layer, overlap=True)

        outputs = []
        for block in blocks(batch, num_rows, keys, self.config.index_n_heads):
            turn = tuple(x[:, block] for x in rotary)
            columns = self._window(attention_mask, block, num_tokens, batch, num_rows)
            if self.compressor is not None:
                # In transformers a single query of a layer without an indexer sees all entries, whatever its position.
                length = (position_ids[:, block] + 1) // self.compressor.compress_rate
                if not selects and num_rows == 1:
                    length = torch.full_like(length, kv.shape[1])
                parts = length.expand(batch, -1), hidden_states[:, block], q_residual[:, block]
                extra = self._entries(kv.shape[1] - num_tokens, keys, *parts, position_ids[:, block])
                indices = torch.where(extra.indices < 0, -1, extra.indices + num_tokens)
                spans = columns.indices.shape[2] + extra.spans
                columns = Columns(torch.cat((columns.indices, indices), 2), spans)
            q = self.q_b_norm(self.q_b_proj(q_residual[:, block]).unflatten(-1, (-1, self.head_dim)))
            q = v4.apply_rotary_pos_emb(q, *turn, unsqueeze_dim=2)
            out = attend(q, kv, columns, self.scaling, self.sinks.float())
            out = v4.apply_rotary_pos_emb(out, turn[0], -turn[1], unsqueeze_dim=2)
            grouped = out.flatten(2).unflatten(-1, (self.config.o_groups, -1))
            outputs.append(self.o_b_proj(self.o_a_proj(grouped).flatten(2)))
        return torch.cat(outputs, 1), None

    def _window(self, seen: Seen, block: slice, num_tokens: int, batch: int, num_rows: int) -> Columns:
        """The window of each row, newest token first, among the tokens that are kept."""
        device = self.sinks.device
        position = torch.arange(block.start, block.stop, device=device) + seen.past
        token = position[:, None] - torch.arange(self.sliding_window, device=device)
        first = seen.past + num_rows - num_tokens  # the token of the first row of kv
        valid = (token >= first).expand(batch, -1, -1)
        if seen.tokens is not None:
            valid = valid & seen.tokens[:, token.clamp(min=0)]
        indices = torch.where(valid, token - first, -1).to(torch.int32)
        return Columns(indices, torch.full(indices.shape[:2], self.sliding_window, dtype=torch.int32, device=device))

    def _entries(
        self,
        count: int,
        keys: Tensor | None,
        lengths: Tensor,
        hidden: Tensor,
        q_residual: Tensor,
        position_ids: Tensor,
    ) -> Columns:
        """The compressed entries of each row: of its first `lengths`, all, or those that the indexer selects."""
        if keys is None:
            entry = torch.arange(count, device=lengths.device, dtype=torch.int32)
            indices = torch.where(entry < lengths[..., None], entry, -1)
            return Columns(indices, lengths.clamp(max=count).to(torch.int32))
        indexer = self.compressor.indexer
        with torch.no_grad():
            q = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim))
            rotary = indexer.rotary_emb(hidden, position_ids=position_ids, layer_type=indexer.rope_layer_type)
            q = v4.apply_rotary_pos_emb(q, *rotary, unsqueeze_dim=2)
            scorer = indexer.scorer
            weights = scorer.weights_proj(hidden).float() * (scorer.weights_scaling * scorer.softmax_scale)
        return select(q, weights, keys, lengths, indexer.index_topk, None)


def _compress(part: nn.Module, name: str, hidden: Tensor, layer: Any, *, overlap: bool) -> Tensor:
    """All entries so far, `[batch, entries, dim]`: one for every `compress_rate` tokens, which the cache counts.

    part: a compressor or the indexer. With `overlap` an entry is of two windows: the first half of the features of the
    window before it, and the second half of its own.
    """
    ratio, dim, first = part.compress_rate, part.head_dim, 0
    kv, gate = part.kv_proj(hidden), part.gate_proj(hidden)
    if layer is None:
        whole = kv.shape[1] // ratio * ratio
        kv, gate = kv[:, :whole], gate[:, :whole]
    else:
        kv, gate, first = layer.store_compression_weights(name, kv, gate)
    count = kv.shape[1] // ratio
    if count:
        kv, gate = kv.unflatten(1, (count, ratio)), gate.unflatten(1, (count, ratio)) + part.position_bias
        if overlap:
            before = (None, None) if layer is None else layer.update_overlap_state(name, kv, gate, dim)
            kv, gate = (
                torch.cat((_windows_before(x, b, dim, empty), x[..., dim:]), 2)
                for x, b, empty in zip((kv, gate), before, (0.0, -torch.inf))
            )
        entries = part.kv_norm((kv * gate.softmax(2, dtype=torch.float32).to(kv.dtype)).sum(2))
        positions = (torch.arange(count, device=kv.device) * ratio + first)[None]
        rotary = part.rotary_emb(entries, position_ids=positions, layer_type=part.rope_layer_type)
        entries = v4.apply_rotary_pos_emb(entries[:, None], *rotary)[:, 0]
    else:
        entries = kv.new_zeros(len(kv), 0, dim)
    return entries if layer is None else layer.update_compressor_states(name, entries)


def _windows_before(x: Tensor, before: Tensor | None, dim: int, empty: float) -> Tensor:
    """The first half of each window's predecessor; the first one's is of the call before, or `empty`."""
    first = x.new_full(x[:, 0, :, :dim].shape, empty) if before is None else before.to(x.dtype)
    return torch.cat((first[:, None], x[:, :-1, :, :dim]), 1)
