"""A V3.2 step's metadata on torch tensors, by the rules of `jax_sparse_mla.metadata`, on the current stream.

As in `sparse_mla_torch.operations.metadata`, outputs are the caller's and a captured CUDA graph replays the launches.
"""

from __future__ import annotations

from jax_sparse_mla.indices.lookup import INT_MAX
from jax_sparse_mla.indices.topk.api import TopkTransform
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables, row_constants
from jax_sparse_mla.metadata.selection import topk_transform_of
from jax_sparse_mla.metadata.triton import v32 as kernels
from jax_sparse_mla.metadata.v32 import V32Metadata
from jax_sparse_mla.models import ModelSpec
from sparse_mla_torch.launch.executor import allocate, executor
from sparse_mla_torch.operations.checks import check_output
from sparse_mla_torch.operations.metadata import check_step


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
    rows, ragged = row_constants(mode, None), transform is TopkTransform.RAGGED
    outputs = kernels.v32_outputs(spec, rows, ragged, num_requests, num_rows, max_seq_len)
    return V32Metadata(**allocate(outputs, device), topk_transform=transform)


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
      ValueError: a model with a window or with index pools, a batch that does not fit its mode, an unknown
        `prefill_backend`, buffers of another top-k transform, a tensor of another shape, not contiguous or on another
        device.
    """
    function, mode = "build_v32_metadata", batch.mode
    if spec.windowed:
        raise ValueError(f"{function}: spec must be a model without a sliding window, got {spec.name}")
    if (pool := spec.kind().pool) > 1:
        raise ValueError(
            f"{function}: spec must be a model whose tokens have an index key each, got {spec.name} with pools of "
            f"{pool}; jax_sparse_mla.build_v32_metadata serves it"
        )
    transform = topk_transform_of(function, mode, fp8_kv_cache, prefill_backend)
    requests, rows, drafts = check_step(function, batch, tables)
    tokens = min(batch.max_seq_len, tables.req_to_token.shape[1])
    ragged, expansion = transform is TopkTransform.RAGGED, row_constants(mode, drafts)
    if ragged and requests * tokens > INT_MAX:
        raise ValueError(f"{function}: {requests} requests of up to {tokens} tokens have more slots than int32 counts")
    if out is None:
        device = batch.seq_lens.device
        out = allocate_v32_metadata(spec, mode, transform, requests, rows, max_seq_len=tokens, device=device)
    if out.topk_transform is not transform:
        raise ValueError(f"{function}: out.topk_transform must be {transform}, got {out.topk_transform}")
    fields = {}
    for name, output in kernels.v32_outputs(spec, expansion, ragged, requests, rows, tokens).items():
        fields[name] = getattr(out, name)
        check_output(function, f"out.{name}", fields[name], output, batch.seq_lens)
    extend_lens = batch.extend_lens if mode is ForwardMode.EXTEND else None
    by_request = batch.req_pool_indices, batch.seq_lens, extend_lens
    arrays = (*by_request, batch.out_cache_loc, tables.req_to_token)
    kernels.v32_metadata(executor(batch.seq_lens.device), spec, expansion, *arrays, tokens=tokens, out=fields)
    return out
