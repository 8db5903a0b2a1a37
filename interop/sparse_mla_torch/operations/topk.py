"""Top-k and its transforms on torch tensors."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.indices.topk import triton as kernels
from jax_sparse_mla.indices.topk.api import check_topk
from jax_sparse_mla.indices.topk.route import TOPK_BACKENDS
from jax_sparse_mla.launch import build
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks


class TopkScratch(NamedTuple):
    """Memory of the Triton kernels for rows longer than a tile; reused from call to call, whatever it holds.

    The CUDA kernel, which serves where it can be built, needs none.
    """

    thresholds: Tensor  # float32, one per row
    progress: Tensor  # int32, one per program that shares a row
    candidates: Tensor  # as the logits, one per row and candidate
    candidate_positions: Tensor  # int32, likewise
    num_candidates: Tensor  # int32, one per row

    @classmethod
    def allocate(
        cls, rows: int, columns: int, topk: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> TopkScratch:
        """For logits `[<= rows, columns]` of the dtype."""
        sizes = _scratch_sizes(rows, columns, topk)
        dtypes = (torch.float32, torch.int32, dtype, torch.int32, torch.int32)
        return cls(*(torch.empty(size, dtype=t, device=device) for size, t in zip(sizes, dtypes, strict=True)))


def _scratch_sizes(rows: int, columns: int, topk: int) -> tuple[int, ...]:
    if not rows or not columns or not (plan := kernels.plan_topk(rows, columns, topk)).filtered:
        return 0, 0, 0, 0, 0
    shared_rows = min(rows, kernels.SPLIT_BELOW_ROWS - 1)
    programs = shared_rows * kernels.plan_topk(shared_rows, columns, topk).chunks
    return rows, programs, rows * plan.tile, rows * plan.tile, rows


def topk_positions(
    logits: Tensor,
    lengths: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: TopkScratch | None = None,
) -> Tensor:
    """Torch's `jax_sparse_mla.topk_positions`; a scratch that is too small raises ValueError."""
    check = TensorChecks("topk_positions", logits)
    return _topk(check, logits, lengths, topk, row_starts, kernels.Transform(), out, scratch)


def topk_transform(
    logits: Tensor,
    lengths: Tensor,
    topk: int,
    *,
    method: TopkTransform,
    page_table: Tensor | None = None,
    page_size: int = 1,
    row_to_request: Tensor | None = None,
    topk_indices_offset: Tensor | None = None,
    row_starts: Tensor | None = None,
    out: Tensor | None = None,
    scratch: TopkScratch | None = None,
) -> Tensor:
    """Torch's `jax_sparse_mla.topk_transform`; `out` and `scratch` as in `topk_positions`."""
    check = TensorChecks("topk_transform", logits)
    if method is TopkTransform.RAGGED:
        check("topk_indices_offset", topk_indices_offset, (logits.shape[0],))
        mapping = kernels.Transform(offsets=topk_indices_offset)
    elif method is TopkTransform.PAGED:
        if page_size < 1:
            raise check.fail(f"page_size must be >= 1, got {page_size}")
        check("page_table", page_table, (None if row_to_request is not None else logits.shape[0], None))
        check.optional("row_to_request", row_to_request, (logits.shape[0],))
        mapping = kernels.Transform(page_table, page_size, row_to_request)
    else:
        raise TypeError(f"topk_transform: method must be a TopkTransform, got {method!r}")
    return _topk(check, logits, lengths, topk, row_starts, mapping, out, scratch)


def _topk(
    check: TensorChecks,
    logits: Tensor,
    lengths: Tensor,
    topk: int,
    row_starts: Tensor | None,
    mapping: kernels.Transform,
    out: Tensor | None,
    scratch: TopkScratch | None,
) -> Tensor:
    check_topk(check, logits, lengths, topk, row_starts)
    rows, columns = logits.shape
    out = check.out(out, (rows, topk))
    if not rows:
        return out
    page_table, page_size, row_to_request, offsets = mapping
    if module := _cuda_module(logits.device):
        import tvm_ffi

        with tvm_ffi.use_torch_stream():
            module.topk(logits, lengths, row_starts, page_table, row_to_request, offsets, page_size, out)
        return out
    if columns and kernels.plan_topk(rows, columns, topk).filtered:
        scratch = scratch or TopkScratch.allocate(rows, columns, topk, logits.device, logits.dtype)
        fits = all(x.numel() >= size for x, size in zip(scratch, _scratch_sizes(rows, columns, topk), strict=True))
        if not fits or scratch.candidates.dtype != logits.dtype or any(x.device != logits.device for x in scratch):
            raise check.fail(f"scratch is not for {logits.dtype} [{rows}, {columns}] and topk {topk}")
    return kernels.topk(
        *(executor(logits.device), logits, lengths),
        topk=topk,
        row_starts=row_starts,
        transform=mapping,
        out=out,
        scratch=scratch or (None,) * 5,
    )


@functools.cache
def _cuda_module(device: torch.device):
    if device.type != "cuda":
        return None
    engine, info = TOPK_BACKENDS["cuda"], DeviceInfo("cuda", torch.cuda.get_device_capability(device))
    return None if engine.missing("topk", "torch", info) else build.module(*engine.binary("topk", info))
