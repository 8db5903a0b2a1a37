"""A step's metadata and schedules on torch tensors, by the rules of `jax_sparse_mla.metadata`, on the current stream.

Outputs are the caller's: allocate them once with the functions here, then write them every step; the launches read
lengths, requests and slots from device memory alone, so a captured CUDA graph replays them on new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from jax_sparse_mla.kernels.triton.metadata import schedules
from jax_sparse_mla.kernels.triton.metadata import v4 as kernels
from jax_sparse_mla.kernels.triton.metadata import window as window_kernels
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables, row_constants
from jax_sparse_mla.metadata.schedules import FlashmlaCall
from jax_sparse_mla.metadata.v4 import V4Metadata, assemble_v4, has_v4_kernel
from jax_sparse_mla.models import INDEXED_RATIO, ModelSpec
from sparse_mla_torch.kernels.checks import check_output, check_tensor
from sparse_mla_torch.kernels.launch import allocate, executor


class Schedules(NamedTuple):
    """Schedules of one step; all int32.

    Attributes:
      flashmla: `(tile_scheduler_metadata [num_sm_parts, 8], num_splits [batch + 1])` of each call.
      indexer: `[num_sms + 1, 2]`, or None.
    """

    flashmla: list[tuple[torch.Tensor, torch.Tensor]]
    indexer: torch.Tensor | None

    @staticmethod
    def allocate(calls: int, batch: int, num_sm_parts: int, num_sms: int | None, device) -> Schedules:
        """Buffers for so many calls, and for the indexer's schedule if `num_sms` is given."""

        def empty(*shape):
            return torch.empty(shape, dtype=torch.int32, device=device)

        pairs = [(empty(num_sm_parts, 8), empty(batch + 1)) for _ in range(calls)]
        return Schedules(pairs, None if num_sms is None else empty(num_sms + 1, 2))


def step_schedules(
    calls: Sequence[FlashmlaCall],
    context_lens: torch.Tensor | None = None,
    *,
    num_sm_parts: int,
    num_sms: int | None = None,
    split_kv: int = 256,
    out: Schedules | None = None,
) -> Schedules:
    """FlashMLA's schedules and the indexer's, in one launch: as `flashmla_schedule` and `paged_mqa_schedule`.

    Args:
      calls: one to three, of torch tensors; the main lengths of all must be given.
      context_lens: int32 `[rows]`, keys of each row of the index logits, with `num_sms`.
      num_sm_parts, num_sms, split_kv: as `jax_sparse_mla.flashmla_schedule` and `.paged_mqa_schedule`.
      out: buffers to write into; allocated by default.

    Raises:
      TypeError: a tensor that is not int32.
      ValueError: a tensor of another shape, not contiguous or on another device, or sizes out of range.
    """
    function, count, indexer = "step_schedules", len(calls), None
    if not 1 <= count <= schedules.MAX_SCHEDULES:
        raise ValueError(f"{function}: calls must be one to {schedules.MAX_SCHEDULES}, got {count}")
    if (context_lens is None) != (num_sms is None) or min(num_sm_parts, split_kv, num_sms or 1) < 1:
        raise ValueError(
            f"{function}: needs num_sm_parts >= 1, split_kv >= 1, and num_sms >= 1 with context_lens, "
            f"got {num_sm_parts}, {split_kv} and {num_sms}"
        )
    like = calls[0].topk_length
    batch, lengths = like.shape[0], []
    for i, call in enumerate(calls):
        if call.topk < 0 or call.extra_topk < 0 or (call.extra_topk > 0) != (call.extra_topk_length is not None):
            raise ValueError(f"{function}: calls[{i}] needs topk >= 0, and extra_topk_length with extra_topk")
        extra = call.topk_length if call.extra_topk_length is None else call.extra_topk_length
        check_tensor(function, f"calls[{i}].topk_length", call.topk_length, (batch,), like)
        check_tensor(function, f"calls[{i}].extra_topk_length", extra, (batch,), like)
        lengths += [call.topk_length, extra]
    contexts = lengths[0]
    if context_lens is not None:
        contexts = context_lens
        indexer = schedules.paged_mqa_constants(_rows_of(function, contexts, like), num_sms, split_kv)
    out = out or Schedules.allocate(count, batch, num_sm_parts, num_sms, like.device)
    for i, (tiles, splits) in enumerate(out.flashmla):
        check_tensor(function, f"out.flashmla[{i}][0]", tiles, (num_sm_parts, 8), like)
        check_tensor(function, f"out.flashmla[{i}][1]", splits, (batch + 1,), like)
    if len(out.flashmla) != count or (out.indexer is None) != (indexer is None):
        raise ValueError(f"{function}: out was allocated for other schedules")
    if indexer:
        check_tensor(function, "out.indexer", out.indexer, (num_sms + 1, 2), like)
    if batch:
        absent = schedules.MAX_SCHEDULES - count
        schedules.schedules_kernel[(count + bool(indexer),)](
            *lengths,
            *[None] * (2 * absent),
            contexts,
            batch,
            contexts.numel(),
            *[x for pair in out.flashmla for x in pair],
            *[None] * (2 * absent),
            out.indexer,
            **schedules.schedules_constants(
                [(call.topk, call.extra_topk) for call in calls], batch, num_sm_parts, indexer
            ),
        )
    return out


def paged_mqa_schedule(
    context_lens: torch.Tensor, *, num_sms: int, split_kv: int = 256, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `jax_sparse_mla.paged_mqa_schedule`, of at least one row; `out` int32 `[num_sms + 1, 2]`."""
    function = "paged_mqa_schedule"
    _rows_of(function, context_lens, context_lens)
    if out is None:
        out = context_lens.new_empty((num_sms + 1, 2))
    check_tensor(function, "out", out, (num_sms + 1, 2), context_lens)
    schedules.paged_mqa(executor(context_lens.device), context_lens, num_sms=num_sms, split_kv=split_kv, out=out)
    return out


def allocate_v4_metadata(
    spec: ModelSpec,
    mode: ForwardMode,
    num_requests: int,
    num_rows: int,
    *,
    max_seq_len: int,
    device,
    num_draft_tokens: int | None = None,
) -> V4Metadata:
    """Buffers for `build_v4_metadata`, of torch tensors; `max_seq_len` no more than the request table's width."""
    constants = kernels.v4_constants(spec, row_constants(mode, num_draft_tokens), num_requests, max_seq_len)
    return assemble_v4(allocate(kernels.v4_outputs(constants, num_requests, num_rows), device))


def build_v4_metadata(
    spec: ModelSpec, batch: ForwardBatch, tables: RequestTables, *, out: V4Metadata | None = None
) -> V4Metadata:
    """As `jax_sparse_mla.build_v4_metadata`, of a batch and tables of torch tensors, int32 and contiguous.

    Args:
      out: buffers to write into; allocated by default.

    Raises:
      TypeError: a tensor that is not int32.
      ValueError: a model that the kernel does not serve, a batch that does not fit its mode, a tensor of another shape,
        not contiguous or on another device.
    """
    function, mode = "build_v4_metadata", batch.mode
    if spec.window is None or not has_v4_kernel(spec):
        raise ValueError(
            f"{function}: spec must have a window and compress ratios 0, {INDEXED_RATIO} and one more at most, "
            f"got {spec.name} ({spec.window}, {spec.compress_ratios})"
        )
    requests, rows, drafts = check_step(function, batch, tables)
    like = batch.seq_lens
    check_tensor(function, "tables.full_to_swa", tables.full_to_swa, (None,), like)

    tokens = min(batch.max_seq_len, tables.req_to_token.shape[1])
    constants = kernels.v4_constants(spec, row_constants(mode, drafts), requests, tokens)
    outputs = kernels.v4_outputs(constants, requests, rows)
    if out is None:
        out = assemble_v4(allocate(outputs, like.device))
    fields = {}
    for name, output in outputs.items():
        ratio, field = name if isinstance(name, tuple) else (None, name)
        fields[name] = getattr(out if ratio is None else out.compressed[ratio], field)
        said = field if ratio is None else f"compressed[{ratio}].{field}"
        check_output(function, f"out.{said}", fields[name], output, like)
    by_request = batch.req_pool_indices, like, batch.extend_lens if mode is ForwardMode.EXTEND else None
    arrays = (*by_request, batch.out_cache_loc, tables.req_to_token, tables.full_to_swa)
    kernels.v4_metadata(executor(like.device), constants, *arrays, tokens=tokens, out=fields)
    return out


def swa_slots(
    positions: torch.Tensor,
    req_rows: torch.Tensor,
    tables: RequestTables,
    *,
    window: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `jax_sparse_mla.swa_slots`, int32 and contiguous; `out` int32 `[T, window]`, allocated by default."""
    function, rows = "swa_slots", positions.shape[0]
    if out is None:
        out = torch.empty((rows, window), dtype=torch.int32, device=positions.device)
    for name, x in (("positions", positions), ("req_rows", req_rows)):
        check_tensor(function, name, x, (rows,), positions)
    check_tensor(function, "out", out, (rows, window), positions)
    _check_tables(function, tables, positions)
    if rows:
        arrays = positions, req_rows, tables.req_to_token, tables.full_to_swa
        window_kernels.swa_slots(executor(positions.device), *arrays, window=window, out=out)
    return out


def swa_gather_plan(
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_rows: torch.Tensor,
    tables: RequestTables,
    *,
    window: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.swa_gather_plan`; all tensors int32 and contiguous, at least one request."""
    function, requests = "swa_gather_plan", seq_lens.shape[0]
    for name, x in (("seq_lens", seq_lens), ("extend_lens", extend_lens), ("req_rows", req_rows)):
        check_tensor(function, name, x, (requests,), seq_lens)
    _check_tables(function, tables, seq_lens)
    if requests == 0:
        raise ValueError(f"{function}: a batch needs at least one request")
    execute, slots = executor(seq_lens.device), seq_lens.new_empty(0)
    first_pos, gather_lens, offsets = window_kernels.gather_lens(execute, seq_lens, extend_lens, window=window)
    if capacity:
        arrays = first_pos, offsets, req_rows, tables.req_to_token, tables.full_to_swa
        slots = window_kernels.gather_slots(execute, *arrays, capacity=capacity)
    return slots, first_pos, gather_lens, offsets


def _rows_of(function: str, context_lens: torch.Tensor, like: torch.Tensor) -> int:
    (rows,) = check_tensor(function, "context_lens", context_lens, (None,), like)
    if rows == 0:
        raise ValueError(f"{function}: context_lens must have at least one row")
    return rows


def _check_tables(function: str, tables: RequestTables, like: torch.Tensor) -> None:
    check_tensor(function, "tables.req_to_token", tables.req_to_token, (None, None), like)
    check_tensor(function, "tables.full_to_swa", tables.full_to_swa, (None,), like)


def check_step(function: str, batch: ForwardBatch, tables: RequestTables) -> tuple[int, int, int | None]:
    """Refuses a batch that does not fit its mode and tensors that a kernel cannot read.

    Returns:
      Requests, query rows, and query rows of each request where the mode has as many for all.
    """
    mode, like = batch.mode, batch.seq_lens
    (requests,), (rows,) = like.shape, batch.out_cache_loc.shape
    if requests == 0:
        raise ValueError(f"{function}: a batch needs at least one request")
    fixed_rows = mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
    if fixed_rows and not batch.num_draft_tokens:
        raise ValueError(f"{function}: batch.num_draft_tokens must be given in {mode.name}")
    drafts = batch.num_draft_tokens if fixed_rows else None
    if (fixed_rows or mode is ForwardMode.DECODE) and rows != requests * (drafts or 1):
        raise ValueError(
            f"{function}: batch.out_cache_loc must have {requests} * {drafts or 1} entries in {mode.name}, got {rows}"
            + ("; cut a step of a multi-step draft out of it first" if mode is ForwardMode.DECODE else "")
        )
    for name in ("seq_lens", "req_pool_indices", *(["extend_lens"] if mode is ForwardMode.EXTEND else [])):
        check_tensor(function, f"batch.{name}", getattr(batch, name), (requests,), like)
    check_tensor(function, "batch.out_cache_loc", batch.out_cache_loc, (rows,), like)
    check_tensor(function, "tables.req_to_token", tables.req_to_token, (None, None), like)
    return requests, rows, drafts
