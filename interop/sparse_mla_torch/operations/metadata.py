"""A step's metadata and schedules on torch tensors, by the rules of `jax_sparse_mla.metadata`, on the current stream.

Outputs are the caller's: allocate them once with the functions here, then write them every step; the launches read
lengths, requests and slots from device memory alone, so a captured CUDA graph replays them on new values.
"""

from __future__ import annotations

import torch

from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables, row_constants
from jax_sparse_mla.metadata.triton import schedules
from jax_sparse_mla.metadata.triton import v4 as kernels
from jax_sparse_mla.metadata.triton import window as window_kernels
from jax_sparse_mla.metadata.v4 import V4Metadata, assemble_v4, has_v4_kernel
from jax_sparse_mla.models import ModelSpec
from sparse_mla_torch.launch.executor import allocate, executor
from sparse_mla_torch.operations.checks import check_output, check_tensor, output_or_new


def flashmla_schedule(
    topk_length: torch.Tensor,
    *,
    topk: int,
    extra_topk: int = 0,
    extra_topk_length: torch.Tensor | None = None,
    num_sm_parts: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.flashmla_schedule`, of at least one row, its lengths given.

    Args:
      out: int32 `[num_sm_parts, 8]` and `[batch + 1]` to write into; allocated by default.

    Raises:
      TypeError: a tensor that is not int32.
      ValueError: a tensor of another shape, not contiguous or on another device, or sizes out of range.
    """
    function, like = "flashmla_schedule", topk_length
    (batch,) = check_tensor(function, "topk_length", topk_length, (None,), like)
    if min(batch, num_sm_parts) < 1 or min(topk, extra_topk) < 0 or (extra_topk > 0) != (extra_topk_length is not None):
        raise ValueError(
            f"{function}: needs a row, num_sm_parts >= 1, topk >= 0, and extra_topk_length with extra_topk, got "
            f"{batch}, {num_sm_parts}, {topk} and {extra_topk}"
        )
    extra = topk_length if extra_topk_length is None else extra_topk_length
    check_tensor(function, "extra_topk_length", extra, (batch,), like)
    if out is not None:
        check_tensor(function, "out[0]", out[0], (num_sm_parts, 8), like)
        check_tensor(function, "out[1]", out[1], (batch + 1,), like)
    static = {"topk": topk, "extra_topk": extra_topk, "num_sm_parts": num_sm_parts}
    return schedules.flashmla(executor(like.device), topk_length, extra, **static, out=out)


def paged_mqa_schedule(
    context_lens: torch.Tensor, *, num_sms: int, split_kv: int = 256, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `jax_sparse_mla.paged_mqa_schedule`, of at least one row; `out` int32 `[num_sms + 1, 2]`."""
    function = "paged_mqa_schedule"
    (rows,) = check_tensor(function, "context_lens", context_lens, (None,), context_lens)
    if rows == 0:
        raise ValueError(f"{function}: context_lens must have at least one row")
    out = output_or_new(function, "out", out, (num_sms + 1, 2), context_lens)
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
    if not spec.windowed or not has_v4_kernel(spec):
        raise ValueError(
            f"{function}: spec must have a window, at most one compress ratio whose layers select and beside it one "
            f"more, got {spec.name} ({spec.window}, {spec.compress_ratios})"
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
    for name, x in (("positions", positions), ("req_rows", req_rows)):
        check_tensor(function, name, x, (rows,), positions)
    out = output_or_new(function, "out", out, (rows, window), positions)
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
    arrays = seq_lens, extend_lens, req_rows, tables.req_to_token, tables.full_to_swa
    return window_kernels.swa_gather_plan(executor(seq_lens.device), *arrays, window=window, capacity=capacity)


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
