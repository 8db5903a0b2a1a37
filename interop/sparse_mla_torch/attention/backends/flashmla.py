"""FlashMLA's own operators on torch tensors, with what must be put right before and after them.

They come from `sgl-flash-mla` or from `sglang-kernel`; `jax_sparse_mla.attention.backends.flashmla` lists their
traps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from jax_sparse_mla.attention.backends import flashmla
from jax_sparse_mla.attention.index_table import V_DIM
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.layout import KVLayout
from sparse_mla_torch.attention import route
from sparse_mla_torch.attention.call_cache import Results, Schedule
from sparse_mla_torch.attention.sanitise import Sanitiser, Table
from sparse_mla_torch.operations.checks import are_aligned

WRITES_INTO = False
PREFILL_APART = ()
_LN_2 = math.log(2)


def _chunk(q_len: int, padded: int, device: DeviceInfo) -> int:
    """Requests of one operator call: its accumulators, (requests + partitions) · q_len rows, are bounded.

    Partitions are of the device's multiprocessors; one thread block serves 64 heads of a query token.
    """
    rows, q_len = flashmla.MAX_ACCUMULATOR_BYTES // (padded * V_DIM * 4), max(q_len, 1)
    return rows // q_len - max(device.sm_count // (q_len * (padded // 64)), 1)


def decode_obstacle(options, layout, tables, tensors, device) -> str | None:
    """Why the decode operator cannot take these tensors; None if it can."""
    q_len, heads = tensors[0].shape[1:3]
    if not are_aligned(tensors) or any(table.page_bytes % 16 for table in tables):
        return "its kernels read 16 bytes at a time: tensors and pages must begin at multiples of 16 bytes"
    if layout == KVLayout.V32_FP8 and len(tables) > 1:
        return "its V3.2 kernel reads one cache"
    if any(table.rows_per_length not in (0, q_len) for table in tables):
        return "its lengths are a request's, not a query token's"
    if _chunk(q_len, flashmla.padded_heads(heads), device) < 1:
        return f"its accumulators for one request of {q_len} query tokens are too large"
    return None


def decode(options, q, layout, tables, has_sink) -> Callable[..., Results]:
    """As `decode.prepare`'s `run`, at one shape. The sanitiser runs first where the operator needs it."""
    batch, q_len, heads, _ = q.shape
    padded = flashmla.padded_heads(heads)
    chunk = _chunk(q_len, padded, route.device_info(q.device))
    takes_lengths = layout != KVLayout.V32_FP8  # what lies beyond them is −1 instead
    cleaned = [
        Table(
            *(table.topk, _multiple(table.topk, flashmla.DECODE_COLUMNS), table.num_slots, table.rows_per_length > 0),
            keeps_lengths=takes_lengths,
            stride=table.stride,
        )
        for table in tables
    ]
    sanitise = None
    fits = (padded == heads or not has_sink) and all(table.width == table.topk for table in cleaned)
    if not options.assume_valid_indices or not fits:
        sinks = heads if has_sink else 0
        sanitise = Sanitiser(batch * q_len, q_len, cleaned, sinks, padded, options.keeps_memory)
    at_once = functools.partial(_decode_at_once, _operator("sparse_decode_fwd"), options.softmax_scale, takes_lengths)
    if padded == heads and batch <= chunk:
        attend = at_once(sanitise)
    else:
        attend = _decode_in_pieces(at_once(None), sanitise, batch, heads, padded, chunk)
    # The operator copies queries in pieces of 16 bytes, 8 values.
    strides_fit = q.stride(3) == 1 and all(stride % 8 == 0 for stride in q.stride()[:3])
    if strides_fit and options.empty_lse > 0:
        return attend

    def run(q, *arguments):
        out, lse = attend(q if strides_fit else q.contiguous(), *arguments)
        if options.empty_lse < 0:
            lse = lse.masked_fill(torch.isposinf(lse), options.empty_lse)
        return out, lse

    return run


# What follows runs in every call. These are closures, which are called in less time than objects.


def _decode_at_once(operator: Callable, scale: float, takes_lengths: bool, sanitise: Sanitiser | None) -> Callable:
    """One call of the operator makes the results."""

    def run(q, *arguments):
        k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink, schedule, _ = arguments
        if sanitise is not None:
            indices, lengths, extra_indices, extra_lengths, attn_sink = sanitise.again(
                indices, lengths, extra_indices, extra_lengths, attn_sink
            ) or sanitise(indices, lengths, extra_indices, extra_lengths, attn_sink)
        elif not takes_lengths:
            lengths = None
        out, lse, schedule.tile_scheduler_metadata, schedule.num_splits = operator(
            q, k_cache, indices, lengths, attn_sink, schedule.tile_scheduler_metadata, schedule.num_splits,
            extra_k_cache, extra_indices, extra_lengths, V_DIM, scale,
        )  # fmt: skip
        return out, lse

    return run


def _decode_in_pieces(
    alone: Callable[..., Results], sanitise: Sanitiser | None, batch: int, heads: int, padded: int, chunk: int
) -> Callable[..., Results]:
    """Pads heads, and splits requests that are too many for one call of the operator; `alone` makes each call."""

    def run(q, *arguments):
        k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink, schedule, _ = arguments
        if sanitise is not None:
            indices, lengths, extra_indices, extra_lengths, attn_sink = sanitise(
                indices, lengths, extra_indices, extra_lengths, attn_sink
            )
        q = _pad_heads(q, padded)
        pieces = []
        for start in range(0, batch, chunk):
            piece = slice(start, start + chunk)
            rows = [x if x is None else x[piece] for x in (q, indices, lengths, extra_indices, extra_lengths)]
            tables = (k_cache, rows[1], rows[2], extra_k_cache, rows[3], rows[4])
            out, lse = alone(rows[0], *tables, attn_sink, schedule if chunk >= batch else Schedule(), None)
            pieces.append((out[:, :, :heads], lse[:, :heads]))
        return tuple(torch.cat(x) for x in zip(*pieces))

    return run


def prefill_obstacle(q, kv, indices, lengths, attn_sink) -> str | None:
    """Why the prefill operator cannot take these tensors; None if it can."""
    if q.data_ptr() % 16 or kv.data_ptr() % 16 or indices.data_ptr() % 32:
        return "its kernels read 16 bytes at a time, 32 of the indices: tensors must begin at multiples of that"
    return None


def prefill(options, q, table, has_sink) -> Callable[..., Results]:
    """As `prefill.prepare`'s `run`, at one shape. The operator checks every index, and the sanitiser does the rest."""
    rows, heads, _ = q.shape
    library, padded = flashmla.library(), flashmla.padded_heads(heads)
    has_lengths = table.rows_per_length > 0
    width = _multiple(table.topk, flashmla.PREFILL_COLUMNS)
    clips = has_lengths and not options.assume_valid_indices
    # SM100's kernel reads rows beyond the length, NaN included.
    rewrites = width != table.topk or (clips and route.device_info(q.device).compute_capability[0] == 10)
    sanitise = None
    if rewrites or clips:
        cleaned = Table(table.topk, width, table.num_slots, has_lengths, rewritten=rewrites)
        sanitise = Sanitiser(rows, 1, [cleaned], 0, padded, options.keeps_memory)
    asks_for_log2 = options.log2 and not library.log2_prefill
    wants_natural = library.log2_prefill and not options.log2
    attend = _prefill_at_once(_operator("sparse_prefill_fwd"), sanitise, options.softmax_scale, rewrites, asks_for_log2)
    if padded != heads or wants_natural:
        attend = _prefill_padded(attend, heads, padded, wants_natural)
    if options.empty_lse > 0:
        return attend

    def run(*tensors):
        out, max_logits, lse = attend(*tensors)
        return out, max_logits, lse.masked_fill(torch.isposinf(lse), options.empty_lse)

    return run


def _prefill_at_once(
    operator: Callable, sanitise: Sanitiser | None, scale: float, rewrites: bool, asks_for_log2: bool
) -> Callable[..., Results]:
    """The results are the operator's own."""
    log2 = (True,) if asks_for_log2 else ()

    def run(q, kv, indices, lengths, attn_sink, into=None):
        if sanitise is not None:
            safe = sanitise.again(indices, lengths, None, None, None) or sanitise(indices, lengths, None, None, None)
            lengths = safe[1]
            if rewrites:
                indices = safe[0]
        return tuple(operator(q, kv, indices, scale, V_DIM, attn_sink, lengths, *log2))

    return run


def _prefill_padded(at_once: Callable[..., Results], heads: int, padded: int, wants_natural: bool) -> Callable:
    """Pads heads, and turns results in base 2 into natural units where these are wanted."""

    def run(q, kv, indices, lengths, attn_sink, into=None):
        q = _pad_heads(q, padded)
        attn_sink = attn_sink if attn_sink is None else _pad_heads(attn_sink[:, None], padded)[:, 0]
        results = at_once(q, kv, indices, lengths, attn_sink)
        out, max_logits, lse = (x[:, :heads].contiguous() for x in results)
        if wants_natural:
            max_logits.mul_(_LN_2)
            lse.mul_(_LN_2)
        return out, max_logits, lse

    return run


def _multiple(topk: int, columns: int) -> int:
    """The columns of a table that the operator takes."""
    return -(-topk // columns) * columns


def _operator(name: str) -> Callable:
    """FlashMLA's operator: the function that torch's `OpOverload` would only call."""
    operator = getattr(getattr(torch.ops, flashmla.library().namespace), name).default
    return getattr(operator, "_op", operator)


def _pad_heads(x: torch.Tensor, padded: int) -> torch.Tensor:
    """`[..., heads, values]` with zeros behind the heads."""
    if x.shape[-2] == padded:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, padded - x.shape[-2]))
