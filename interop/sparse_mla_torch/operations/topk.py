"""Top-k and its transforms on torch tensors."""

from __future__ import annotations

import functools

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


def topk_positions(
    logits: Tensor,
    lengths: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Torch's `jax_sparse_mla.topk_positions`."""
    check = TensorChecks("topk_positions", logits)
    return _topk(check, logits, lengths, topk, row_starts, kernels.Transform(), out)


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
) -> Tensor:
    """Torch's `jax_sparse_mla.topk_transform`."""
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
    return _topk(check, logits, lengths, topk, row_starts, mapping, out)


def _topk(
    check: TensorChecks,
    logits: Tensor,
    lengths: Tensor,
    topk: int,
    row_starts: Tensor | None,
    mapping: kernels.Transform,
    out: Tensor | None,
) -> Tensor:
    check_topk(check, logits, lengths, topk, row_starts)
    out = check.out(out, (logits.shape[0], topk))
    if not len(logits):
        return out
    page_table, page_size, row_to_request, offsets = mapping
    if module := _cuda_module(logits.device):
        import tvm_ffi

        with tvm_ffi.use_torch_stream():
            module.topk(logits, lengths, row_starts, page_table, row_to_request, offsets, page_size, out)
        return out
    return kernels.topk(
        *(executor(logits.device), logits, lengths),
        topk=topk,
        row_starts=row_starts,
        transform=mapping,
        out=out,
    )


@functools.cache
def _cuda_module(device: torch.device):
    if device.type != "cuda":
        return None
    engine, info = TOPK_BACKENDS["cuda"], DeviceInfo("cuda", torch.cuda.get_device_capability(device))
    return None if engine.missing("topk", "torch", info) else build.module(*engine.binary("topk", info))
