"""FlashMLA's own operators on torch tensors: what they cannot take, and what must be put right before and after them.

They come from `sgl-flash-mla` or from `sglang-kernel`; `jax_sparse_mla.attention.flashmla` lists their traps.
"""

from __future__ import annotations

import math

import torch

from jax_sparse_mla.attention import flashmla
from jax_sparse_mla.attention.route import DeviceInfo
from jax_sparse_mla.kernels_triton.plan import Scope
from jax_sparse_mla.kv_cache.layout import KVLayout
from sparse_mla_torch.attention.prepared import Schedule
from sparse_mla_torch.kernels.sanitise import Sanitiser, Table

V_DIM = 512
_LN_2 = math.log(2)


def _parts(q_len: int, padded: int, device: DeviceInfo) -> int:
    """Partitions of the device's multiprocessors; one thread block for 64 heads of a query token."""
    return max(device.sm_count // (q_len * (padded // 64)), 1)


def _chunk(q_len: int, padded: int, device: DeviceInfo) -> int:
    """Requests of one operator call: its accumulators, (requests + partitions) · q_len rows, are bounded."""
    rows = flashmla.MAX_ACCUMULATOR_BYTES // (padded * V_DIM * 4)
    return rows // max(q_len, 1) - _parts(max(q_len, 1), padded, device)


def decode_obstacle(
    layout: KVLayout, q_len: int, heads: int, scopes: list[Scope], aligned: bool, device: DeviceInfo
) -> str | None:
    """Why the decode operator cannot take a call, beyond what its device and heads say; None if it can."""
    if not aligned or any(scope.page_bytes % 16 for scope in scopes):
        return "its kernels read 16 bytes at a time: tensors and pages must begin at multiples of 16 bytes"
    if layout == KVLayout.V32_FP8 and len(scopes) > 1:
        return "its V3.2 kernel reads one cache"
    if any(scope.rows_per_length not in (0, q_len) for scope in scopes):
        return "its lengths are a request's, not a query token's"
    if any(scope.topk == 0 or scope.num_slots == 0 for scope in scopes):
        return "its kernels need a page and an index column"
    if _chunk(q_len, flashmla.padded_heads(heads), device) < 1:
        return f"its accumulators for one request of {q_len} query tokens are too large"
    return None


class Decode:
    """The operator's call at one shape, with the sanitiser before it; q contiguous within 16-byte pieces.

    Args:
      layout: of the caches.
      batch, q_len, heads: of q.
      scopes: one or two.
      softmax_scale: what q·k is multiplied by.
      has_sink: whether the call has an attention sink.
      assume_valid_indices: leaves out the sanitiser where the operator can take the tables as they are.
      keeps_memory: see `decode.Options`.
    """

    def __init__(
        self,
        layout: KVLayout,
        batch: int,
        q_len: int,
        heads: int,
        scopes: list[Scope],
        softmax_scale: float,
        has_sink: bool,
        assume_valid_indices: bool,
        keeps_memory: bool,
        device: DeviceInfo,
    ):
        self._heads, self._padded = heads, flashmla.padded_heads(heads)
        self._scale, self._batch = softmax_scale, batch
        self._chunk = _chunk(q_len, self._padded, device)
        self._takes_lengths = layout != KVLayout.V32_FP8  # what lies beyond them is −1 instead
        self._operator = getattr(torch.ops, flashmla.library().namespace).sparse_decode_fwd.default
        tables = [
            Table(
                scope.topk,
                -(-scope.topk // flashmla.DECODE_COLUMNS) * flashmla.DECODE_COLUMNS,
                scope.num_slots,
                scope.rows_per_length > 0,
                keeps_lengths=self._takes_lengths,
            )
            for scope in scopes
        ]
        # One call, whose results are those of the operator.
        self._exact = self._padded == heads and batch <= self._chunk
        self._sanitise = None
        fits = self._padded == heads or not has_sink
        if not assume_valid_indices or not fits or any(table.width != table.topk for table in tables):
            sinks = heads if has_sink else 0
            self._sanitise = Sanitiser(batch * q_len, q_len, tables, sinks, self._padded, keeps_memory)

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor | None,
        extra_k_cache: torch.Tensor | None,
        extra_indices: torch.Tensor | None,
        extra_lengths: torch.Tensor | None,
        attn_sink: torch.Tensor | None,
        schedule: Schedule,
        into: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out `[batch, q_len, heads, 512]`, lse `[batch, heads, q_len]`; the operator writes into nothing given."""
        if self._sanitise is not None:
            given = (indices, lengths, extra_indices, extra_lengths, attn_sink)
            safe = self._sanitise.again(*given) or self._sanitise(*given)
            indices, lengths, extra_indices, extra_lengths, attn_sink = safe
        elif not self._takes_lengths:
            lengths = None
        if self._exact:
            out, lse, schedule.tile_scheduler_metadata, schedule.num_splits = self._operator(
                q,
                k_cache,
                indices,
                lengths,
                attn_sink,
                schedule.tile_scheduler_metadata,
                schedule.num_splits,
                extra_k_cache,
                extra_indices,
                extra_lengths,
                V_DIM,
                self._scale,
            )
            return out, lse
        if self._padded != self._heads:
            q = _pad_heads(q, self._padded)
        pieces = []
        for start in range(0, self._batch, self._chunk):
            some = slice(start, start + self._chunk)
            rows = [x if x is None else x[some] for x in (q, indices, lengths, extra_indices, extra_lengths)]
            own = schedule if self._chunk >= self._batch else Schedule()
            out, lse, own.tile_scheduler_metadata, own.num_splits = self._operator(
                *(rows[0], k_cache, rows[1], rows[2], attn_sink, own.tile_scheduler_metadata, own.num_splits),
                *(extra_k_cache, rows[3], rows[4], V_DIM, self._scale),
            )
            pieces.append((out[:, :, : self._heads], lse[:, : self._heads]))
        return tuple(torch.cat(x) for x in zip(*pieces))


class Prefill:
    """The operator's call at one shape. It checks every index; columns are padded and lengths clipped before it.

    Args:
      rows, heads: of q.
      scope: of the workspace.
      softmax_scale: what q·k is multiplied by.
      has_sink: whether the call has an attention sink.
      assume_valid_indices: takes the lengths as they are.
      log2: max_logits and lse in base 2.
      keeps_memory: see `decode.Options`.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        scope: Scope,
        softmax_scale: float,
        has_sink: bool,
        assume_valid_indices: bool,
        log2: bool,
        keeps_memory: bool,
        device: DeviceInfo,
    ):
        library = flashmla.library()
        self._operator = getattr(torch.ops, library.namespace).sparse_prefill_fwd.default
        self._options = () if library.log2_prefill else (log2,)
        self._wants_natural = library.log2_prefill and not log2
        self._heads, self._padded = heads, flashmla.padded_heads(heads)
        self._exact = self._padded == heads and not self._wants_natural  # the results are those of the operator
        self._scale = softmax_scale
        has_lengths = scope.rows_per_length > 0
        width = -(-scope.topk // flashmla.PREFILL_COLUMNS) * flashmla.PREFILL_COLUMNS
        clips = has_lengths and not assume_valid_indices
        # SM100's kernel reads rows beyond the length, NaN included.
        self._rewrites = width != scope.topk or (clips and device.compute_capability[0] == 10)
        self._sanitise = None
        if self._rewrites or clips:
            table = Table(scope.topk, width, scope.num_slots, has_lengths, rewritten=self._rewrites)
            self._sanitise = Sanitiser(rows, 1, [table], 0, self._padded, keeps_memory)

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor | None,
        attn_sink: torch.Tensor | None,
        into: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """kv `[kv_len, 1, dim]`, indices `[rows, 1, topk]`; max_logits and lse in base 2 if `log2`."""
        if self._sanitise is not None:
            given = (indices, lengths, None, None, None)
            safe = self._sanitise.again(*given) or self._sanitise(*given)
            lengths = safe[1]
            if self._rewrites:
                indices = safe[0]
        if self._exact:
            return tuple(self._operator(q, kv, indices, self._scale, V_DIM, attn_sink, lengths, *self._options))
        if self._padded != self._heads:
            q = _pad_heads(q, self._padded)
            attn_sink = attn_sink if attn_sink is None else _pad_heads(attn_sink[:, None], self._padded)[:, 0]
        results = self._operator(q, kv, indices, self._scale, V_DIM, attn_sink, lengths, *self._options)
        out, max_logits, lse = (x[:, : self._heads].contiguous() for x in results)
        if self._wants_natural:
            max_logits.mul_(_LN_2)
            lse.mul_(_LN_2)
        return out, max_logits, lse


def _pad_heads(x: torch.Tensor, padded: int) -> torch.Tensor:
    """`[..., heads, values]` with zeros behind the heads."""
    return torch.nn.functional.pad(x, (0, 0, 0, padded - x.shape[-2]))


def prefill_obstacle(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> str | None:
    """Why the prefill operator cannot take a call, beyond what its device and heads say; None if it can."""
    topk, kv_len = indices.shape[-1], kv.shape[0]
    if q.data_ptr() % 16 or kv.data_ptr() % 16 or indices.data_ptr() % 32:
        return "its kernels read 16 bytes at a time, 32 of the indices: tensors must begin at multiples of that"
    if topk == 0 or kv_len == 0:
        return "its kernel needs a row of kv and an index column"
    return None
