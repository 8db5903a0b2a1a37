"""The attention of DeepSeek-V4: a window of tokens, and compressed entries, all or those that an indexer selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from sparse_mla_torch.transformers.rotary import normed, rotary_table, turn
from sparse_mla_torch.transformers.select import Columns, Seen, attend, blocks, leading, select

Rotary = tuple[Tensor, Tensor]  # cos and sin, [batch or 1, rows, rope / 2]
_STEP = 256  # rows of a step's keys come in multiples of it, so that steps share what is prepared for their sizes


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
        (batch, num_rows, _), seen = hidden_states.shape, attention_mask
        table = _table(seen, self.rope_layer_type, position_embeddings)
        q_residual = normed(self.q_a_norm, v4.DeepseekV4RMSNorm, self.q_a_proj(hidden_states))
        kv = _turned(normed(self.kv_norm, v4.DeepseekV4RMSNorm, self.kv_proj(hidden_states)), table)[:, None]
        layer = None if cache is None else cache.layers[self.layer_idx]
        if cache is not None:
            kv = cache.update(kv, kv, self.layer_idx)[0]
        kv, entries, keys = kv[:, 0], None, None
        num_tokens, compressor = kv.shape[1], self.compressor
        if compressor is not None:
            indexer = getattr(compressor, "indexer", None)
            entries = _compress(compressor, "compressor", hidden_states, layer, seen, overlap=indexer is not None)
            kv = _joined(kv, entries)
            if indexer is not None:
                keys = _compress(indexer, "indexer", hidden_states, layer, seen, overlap=True)
                keys = None if keys.shape[1] <= indexer.index_topk else keys  # all are selected
                index_table = _table(seen, indexer.rope_layer_type, position_embeddings)

        outputs = []
        for block in blocks(batch, num_rows, keys, self.config.index_n_heads):
            columns = self._window(seen, block, num_tokens, batch, num_rows)
            if keys is not None:
                q = _index_queries(indexer, q_residual[:, block], index_table[:, block, None])
                weights = _index_weights(indexer.scorer, hidden_states[:, block])
                lengths = self._lengths(seen, block, position_ids, columns.spans, keys.shape[1])
                columns = _with_selected(columns, q, weights, keys, lengths, indexer.index_topk, num_tokens, seen)
            elif entries is not None and entries.shape[1]:
                columns = self._with_all(columns, seen, block, position_ids, num_rows, num_tokens, entries.shape[1])
            q = self.q_b_norm(self.q_b_proj(q_residual[:, block]).unflatten(-1, (-1, self.head_dim)))
            q = _turned(q, table[:, block, None])
            out = attend(q, kv, columns, self.scaling, seen, self.sinks.float())
            out = _turned(out, table[:, block, None].transpose(-1, -2))  # back
            grouped = out.flatten(2).unflatten(-1, (self.config.o_groups, -1))
            outputs.append(self.o_b_proj(self.o_a_proj(grouped).flatten(2)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), None

    def _window(self, seen: Seen, block: slice, num_tokens: int, batch: int, num_rows: int) -> Columns:
        """The window of each row, newest token first, among the tokens that are kept."""

        def make() -> Columns:
            device = self.sinks.device
            position = torch.arange(block.start, block.stop, device=device) + seen.past
            token = position[:, None] - torch.arange(self.sliding_window, device=device)
            first = seen.past + num_rows - num_tokens  # the token of the first row of kv
            valid = (token >= first).expand(batch, -1, -1)
            if seen.tokens is not None:
                valid = valid & seen.tokens[:, token.clamp(min=0)]
            indices = torch.where(valid, token - first, -1).to(torch.int32)
            spans = torch.full(indices.shape[:2], self.sliding_window, dtype=torch.int32, device=device)
            return Columns(indices, spans)

        return seen.once(("window", block.start, block.stop, num_tokens), make)

    def _lengths(self, seen: Seen, block: slice, position_ids: Tensor, like: Tensor, count: int) -> Tensor:
        """int32 `[batch, rows]`, how many of `count` entries each row of a block sees."""
        ratio = self.compressor.compress_rate

        def make() -> Tensor:
            lengths = ((position_ids[:, block] + 1) // ratio).clamp(max=count)
            return lengths.to(torch.int32).expand_as(like).contiguous()

        return seen.once(("lengths", block.start, block.stop, ratio, count), make)

    def _with_all(
        self,
        window: Columns,
        seen: Seen,
        block: slice,
        position_ids: Tensor,
        num_rows: int,
        num_tokens: int,
        count: int,
    ) -> Columns:
        """The window's columns, and all entries that a row sees."""
        # In transformers a single query of a layer without an indexer sees all entries, whatever its position.
        sees_all = num_rows == 1 and self.layer_type != "compressed_sparse_attention"

        def make() -> Columns:
            lengths = self._lengths(seen, block, position_ids, window.spans, count)
            lengths = torch.full_like(lengths, count) if sees_all else lengths
            indices = leading(lengths, count, None)
            indices = torch.where(indices < 0, -1, indices + num_tokens)
            return Columns(torch.cat((window.indices, indices), 2), window.indices.shape[2] + lengths)

        return seen.once(("all", block.start, block.stop, self.layer_type, num_tokens, count), make)


@torch.no_grad()
def _with_selected(
    window: Columns,
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    lengths: Tensor,
    topk: int,
    num_tokens: int,
    seen: Seen,
) -> Columns:
    """The window's columns, and the entries that the indexer selects, which stand behind the tokens."""
    rows, width = lengths.numel(), window.indices.shape[2]
    first = seen.once(
        ("behind", rows, num_tokens),
        lambda: torch.full((rows,), num_tokens, dtype=torch.int32, device=keys.device),
    )
    spans = seen.once(("spans", topk, id(lengths)), lambda: width + lengths.clamp(max=topk))
    indices = select(q, weights, keys, lengths, topk, None, first)
    return Columns(torch.cat((window.indices, indices), 2), spans)


@torch.no_grad()
def _index_queries(indexer: nn.Module, q_residual: Tensor, table: Tensor) -> Tensor:
    return _turned(indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim)), table)


@torch.no_grad()
def _index_weights(scorer: nn.Module, hidden: Tensor) -> Tensor:
    """The heads' weights with both scales, float32."""
    return scorer.weights_proj(hidden).float() * (scorer.weights_scaling * scorer.softmax_scale)


def _table(seen: Seen, kind: str, position_embeddings: dict[str, Rotary]) -> Tensor:
    """float32: transformers turns float32 copies by rounded cosines."""
    return seen.once(("table", kind), lambda: rotary_table(*position_embeddings[kind]).float())


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """x with its last values turned; x itself, if no gradient is wanted."""
    rope = 2 * table.shape[-3]
    if torch.is_grad_enabled():
        return torch.cat((x[..., :-rope], turn(x[..., -rope:], table, halves=(False, False))), -1)
    turn(x[..., -rope:], table, halves=(False, False), out=x[..., -rope:])
    return x


def _joined(kv: Tensor, entries: Tensor) -> Tensor:
    """Tokens and the entries behind them, `[batch, rows or more, dim]`; rows behind both are not to be read."""
    if torch.is_grad_enabled():
        return torch.cat((kv, entries), 1)
    batch, rows, dim = len(kv), kv.shape[1] + entries.shape[1], kv.shape[2]
    made = kv.new_empty(batch, -(-rows // _STEP) * _STEP, dim)
    torch.cat((kv, entries), 1, out=made[:, :rows])
    return made


def _compress(part: nn.Module, name: str, hidden: Tensor, layer: Any, seen: Seen, *, overlap: bool) -> Tensor:
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
        entries = (kv * gate.softmax(2, dtype=torch.float32).to(kv.dtype)).sum(2)
        entries = normed(part.kv_norm, v4.DeepseekV4RMSNorm, entries)

        def make() -> Tensor:
            positions = (torch.arange(count, device=kv.device) * ratio + first)[None]
            return rotary_table(*part.rotary_emb(entries, position_ids=positions, layer_type=kind)).float()

        kind = part.rope_layer_type
        entries = _turned(entries, seen.once(("entries", kind, ratio, first, count), make))
    else:
        entries = kv.new_zeros(len(kv), 0, dim)
    return entries if layer is None else layer.update_compressor_states(name, entries)


def _windows_before(x: Tensor, before: Tensor | None, dim: int, empty: float) -> Tensor:
    """The first half of each window's predecessor; the first one's is of the call before, or `empty`."""
    first = x.new_full(x[:, 0, :, :dim].shape, empty) if before is None else before.to(x.dtype)
    return torch.cat((first[:, None], x[:, :-1, :, :dim]), 1)
