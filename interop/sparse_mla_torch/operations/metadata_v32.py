"""A V3.2 step's metadata on torch tensors; outputs are the caller's, as in `sparse_mla_torch.operations.metadata`."""

from __future__ import annotations

from jax_sparse_mla.indices.lookup import INT_MAX
from jax_sparse_mla.indices.topk.api import TopkTransform
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables, row_constants
from jax_sparse_mla.metadata.rows import bucket
from jax_sparse_mla.metadata.selection import topk_transform_of
from jax_sparse_mla.metadata.triton import v32 as kernels
from jax_sparse_mla.metadata.v32 import V32Metadata
from jax_sparse_mla.models import ModelSpec
from sparse_mla_torch.launch.executor import allocate, executor
from sparse_mla_torch.operations.checks import TensorChecks
from sparse_mla_torch.operations.metadata import checked_step


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
    return V32Metadata(topk_transform=transform, **allocate(outputs, device))


def build_v32_metadata(
    spec: ModelSpec,
    batch: ForwardBatch,
    tables: RequestTables,
    *,
    fp8_kv_cache: bool,
    prefill_backend: str,
    out: V32Metadata | None = None,
) -> V32Metadata:
    """Torch's `jax_sparse_mla.build_v32_metadata`; `out` are buffers to write into, of the same top-k transform.

    A model with a window or with index pools, a batch that does not fit its mode and an unknown `prefill_backend` raise
    ValueError.
    """
    check = TensorChecks("build_v32_metadata", batch.seq_lens)
    if spec.windowed:
        raise check.fail(f"spec must be a model without a sliding window, got {spec.name}")
    if (pool := spec.kind().pool) > 1:
        raise check.fail(
            f"spec must be a model whose tokens have an index key each, got {spec.name} with pools of "
            f"{pool}; jax_sparse_mla.build_v32_metadata serves it"
        )
    transform = topk_transform_of(check.function, batch.mode, fp8_kv_cache, prefill_backend)
    batch, tables = checked_step(check, spec, batch, tables)
    (requests, rows), tokens, device = (check.dims[x] for x in "BT"), bucket(batch, tables), batch.seq_lens.device
    ragged = transform is TopkTransform.RAGGED
    if ragged and requests * tokens > INT_MAX:
        raise check.fail(f"{requests} requests of up to {tokens} tokens have more slots than int32 counts")
    if out is None:
        out = allocate_v32_metadata(spec, batch.mode, transform, requests, rows, max_seq_len=tokens, device=device)
    if out.topk_transform is not transform:
        raise check.fail(f"out.topk_transform must be {transform}, got {out.topk_transform}")
    fields, expansion = {}, row_constants(batch.mode, batch.num_draft_tokens)
    for name, output in kernels.v32_outputs(spec, expansion, ragged, requests, rows, tokens).items():
        fields[name] = check(f"out.{name}", getattr(out, name), output.shape, (output.dtype,))
    arrays = batch.req_pool_indices, batch.seq_lens, batch.extend_lens, batch.out_cache_loc, tables.req_to_token
    kernels.v32_metadata(executor(device), spec, expansion, *arrays, tokens=tokens, out=fields)
    return out
