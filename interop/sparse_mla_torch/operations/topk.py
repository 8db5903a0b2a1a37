"""Top-k and its transforms on torch tensors, by the rules of `jax_sparse_mla.indices`, on the current stream.

With `out=` and `scratch=` nothing is allocated and nothing waits for the host, so a CUDA graph captures the call.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.indices.topk import triton as kernels
from jax_sparse_mla.indices.topk.kernels import topk_binary
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import FLOATS, check_tensor, output_or_new


@dataclasses.dataclass
class TopkScratch:
    """What the Triton kernels need for rows longer than a tile; reused from call to call, whatever it holds.

    The CUDA kernel, which serves where it can be built, needs nothing.

    Attributes:
      thresholds, num_candidates: float32 and int32, one per row.
      progress: int32, one per program that shares a row.
      candidates, candidate_positions: as the logits and int32, one per row and candidate.
    """

    thresholds: torch.Tensor
    progress: torch.Tensor
    candidates: torch.Tensor
    candidate_positions: torch.Tensor
    num_candidates: torch.Tensor

    @classmethod
    def allocate(
        cls, rows: int, columns: int, topk: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> TopkScratch:
        """For logits `[<= rows, columns]` of the dtype."""
        sizes = _scratch_sizes(rows, columns, topk)
        dtypes = (torch.float32, torch.int32, dtype, torch.int32, torch.int32)
        return cls(*(torch.empty(size, dtype=t, device=device) for size, t in zip(sizes, dtypes, strict=True)))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def _scratch_sizes(rows, columns, topk):
    if not rows or not columns or not (plan := kernels.plan_topk(rows, columns, topk)).filtered:
        return 0, 0, 0, 0, 0
    shared_rows = min(rows, kernels.SPLIT_BELOW_ROWS - 1)
    programs = shared_rows * kernels.plan_topk(shared_rows, columns, topk).chunks
    return rows, programs, rows * plan.tile, rows * plan.tile, rows


def topk_positions(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    scratch: TopkScratch | None = None,
) -> torch.Tensor:
    """As `jax_sparse_mla.topk_positions`; tensors contiguous.

    Args:
      out: int32 `[rows, topk]` to write into; allocated by default.
      scratch: for at least these rows, columns and topk; allocated by default.

    Raises:
      TypeError: a tensor of another dtype.
      ValueError: a tensor of another shape, not contiguous, or on another device; a scratch that is too small.
    """
    return _topk("topk_positions", logits, lengths, topk, row_starts, kernels.Transform(), out, scratch)


def topk_transform(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    *,
    method: TopkTransform,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    row_to_request: torch.Tensor | None = None,
    topk_indices_offset: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scratch: TopkScratch | None = None,
) -> torch.Tensor:
    """As `jax_sparse_mla.topk_transform`; tensors contiguous.

    Args:
      out, scratch: as those of `topk_positions`.

    Raises:
      TypeError, ValueError: as `topk_positions`, or an argument missing that the method needs.
    """
    function = "topk_transform"
    if method is TopkTransform.RAGGED:
        check_tensor(function, "topk_indices_offset", topk_indices_offset, (logits.shape[0],), logits)
        transform = kernels.Transform(offsets=topk_indices_offset)
        return _topk(function, logits, lengths, topk, row_starts, transform, out, scratch)
    if method is not TopkTransform.PAGED:
        raise TypeError(f"{function}: method must be a TopkTransform, got {method!r}")
    if page_size < 1:
        raise ValueError(f"{function}: page_size must be >= 1, got {page_size}")
    requests = None if row_to_request is not None else logits.shape[0]
    check_tensor(function, "page_table", page_table, (requests, None), logits)
    if row_to_request is not None:
        check_tensor(function, "row_to_request", row_to_request, (logits.shape[0],), logits)
    transform = kernels.Transform(page_table, page_size, row_to_request)
    return _topk(function, logits, lengths, topk, row_starts, transform, out, scratch)


def _topk(function, logits, lengths, topk, row_starts, transform, out, scratch):
    if topk < 1:
        raise ValueError(f"{function}: topk must be >= 1, got {topk}")
    check_tensor(function, "logits", logits, (None, None), logits, FLOATS)
    rows, columns = logits.shape
    check_tensor(function, "lengths", lengths, (rows,), logits)
    if row_starts is not None:
        check_tensor(function, "row_starts", row_starts, (rows,), logits)
    out = output_or_new(function, "out", out, (rows, topk), logits)
    if not rows:
        return out
    if module := _cuda_module(logits.device):
        import tvm_ffi

        page_table, page_size, row_to_request, offsets = transform
        with tvm_ffi.use_torch_stream():
            module.topk(logits, lengths, row_starts, page_table, row_to_request, offsets, page_size, out)
        return out
    if columns and kernels.plan_topk(rows, columns, topk).filtered:
        scratch = _checked_scratch(function, scratch, logits, topk)
    else:
        scratch = (None,) * 5
    return kernels.topk(
        executor(logits.device),
        logits,
        lengths,
        topk=topk,
        row_starts=row_starts,
        transform=transform,
        out=out,
        scratch=scratch,
    )


@functools.cache
def _cuda_module(device: torch.device):
    return topk_binary(torch.cuda.get_device_capability(device))() if device.type == "cuda" else None


def _checked_scratch(function, scratch, logits, topk):
    rows, columns = logits.shape
    if scratch is None:
        scratch = TopkScratch.allocate(rows, columns, topk, logits.device, logits.dtype)
    tensors = scratch.tensors()
    fits = all(x.numel() >= size for x, size in zip(tensors, _scratch_sizes(rows, columns, topk), strict=True))
    if not fits or scratch.candidates.dtype != logits.dtype or any(x.device != logits.device for x in tensors):
        raise ValueError(f"{function}: scratch is not for {logits.dtype} [{rows}, {columns}] and topk {topk}")
    return tensors
