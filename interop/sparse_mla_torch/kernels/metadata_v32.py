"""A V3.2 step's metadata on torch tensors, by the rules of `jax_sparse_mla.metadata`, on the current stream.

As in `sparse_mla_torch.kernels.metadata`, outputs are the caller's and a captured CUDA graph replays the launches.
"""

from __future__ import annotations

import torch
import triton

from jax_sparse_mla._checks import ArgumentChecks
from jax_sparse_mla.indices.lookup import INT_MAX
from jax_sparse_mla.indices.topk.api import TopkTransform
from jax_sparse_mla.kernels.triton.metadata import v32 as kernels
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.metadata.selection import topk_transform_of
from jax_sparse_mla.metadata.v32 import V32Metadata
from jax_sparse_mla.models import ModelSpec
from sparse_mla_torch.kernels.checks import check_tensor
from sparse_mla_torch.kernels.metadata import check_step


def allocate_v32_metadata(
    spec: ModelSpec,
    mode: ForwardMode,
    transform: TopkTransform,
    num_requests: int,
    num_rows: int,
    *,
    max_seq_len: int,
    device,
) -> V32Metadata:
    """Buffers for `build_v32_metadata`, of torch tensors; `max_seq_len` no more than the request table's width."""
    shapes = kernels.v32_shapes(spec, mode, transform, num_requests, num_rows, max_seq_len)
    fields = {name: torch.empty(shape, dtype=_dtype(name), device=device) for name, shape in shapes.items()}
    return kernels.v32_metadata(fields, transform)


def build_v32_metadata(
    spec: ModelSpec,
    batch: ForwardBatch,
    tables: RequestTables,
    *,
    fp8_kv_cache: bool,
    prefill_backend: str,
    out: V32Metadata | None = None,
) -> V32Metadata:
    """As `jax_sparse_mla.build_v32_metadata`, of a batch and tables of torch tensors, int32 and contiguous.

    Args:
      out: buffers to write into; allocated by default.

    Raises:
      TypeError: a tensor that is not int32.
      ValueError: a model with a window, a batch that does not fit its mode, an unknown `prefill_backend`, buffers of
        another top-k transform, a tensor of another shape, not contiguous or on another device.
    """
    function, mode = "build_v32_metadata", batch.mode
    if spec.window is not None:
        raise ValueError(f"{function}: spec must be a model without a sliding window, got {spec.name}")
    transform = topk_transform_of(ArgumentChecks(function), mode, fp8_kv_cache, prefill_backend)
    requests, rows, drafts = check_step(function, batch, tables)
    tokens = min(batch.max_seq_len, tables.req_to_token.shape[1])
    shapes = kernels.v32_shapes(spec, mode, transform, requests, rows, tokens)
    ragged = transform is TopkTransform.RAGGED
    if ragged and requests * tokens > INT_MAX:
        raise ValueError(f"{function}: {requests} requests of up to {tokens} tokens have more slots than int32 counts")
    if out is None:
        out = allocate_v32_metadata(
            spec, mode, transform, requests, rows, max_seq_len=tokens, device=batch.seq_lens.device
        )
    if out.topk_transform is not transform:
        raise ValueError(f"{function}: out.topk_transform must be {transform}, got {out.topk_transform}")
    for name, shape in shapes.items():
        check_tensor(function, f"out.{name}", getattr(out, name), shape, batch.seq_lens, (_dtype(name),))

    extend_lens = starts = batch.seq_lens  # not read
    if mode is ForwardMode.EXTEND:
        extend_lens, starts = batch.extend_lens, torch.empty_like(out.cu_seqlens_q)
    kernels.request_starts_kernel[(1,)](
        batch.seq_lens,
        extend_lens,
        requests,
        out.cache_seqlens,
        out.cu_seqlens_k,
        starts,
        **kernels.mode_constants(mode, drafts, requests),
    )
    constants = kernels.v32_constants(spec, mode, drafts, requests, tokens)
    kernels.v32_metadata_kernel[kernels.v32_grid(constants, requests, rows)](
        batch.req_pool_indices,
        batch.seq_lens,
        extend_lens,
        starts,
        out.cache_seqlens,
        out.cu_seqlens_k,
        batch.out_cache_loc,
        tables.req_to_token,
        requests,
        rows,
        tokens,
        *tables.req_to_token.shape,
        out.seqlens_expanded,
        out.topk_lengths,
        out.positions,
        out.out_cache_loc,
        out.row_to_request,
        out.index_row_starts,
        out.index_row_ends,
        out.topk_indices_offset,
        out.cu_seqlens_q,
        out.page_table,
        out.overflow,
        **constants,
    )
    if ragged and tokens:
        kernels.kv_slots_kernel[(triton.cdiv(requests * tokens, kernels.SLOTS_OPTIONS["COLUMNS"]),)](
            batch.req_pool_indices,
            out.cu_seqlens_k,
            tables.req_to_token,
            requests,
            *tables.req_to_token.shape,
            requests * tokens,
            out.kv_slots,
            SEARCH_STEPS=requests.bit_length(),
            **kernels.SLOTS_OPTIONS,
        )
    return out


def _dtype(name: str) -> torch.dtype:
    return torch.bool if name == "overflow" else torch.int32
