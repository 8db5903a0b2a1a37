"""A step's metadata and schedules on torch tensors.

Outputs are new, or the caller's buffers `out`: the result of an earlier call of the same sizes. The launches read
lengths, requests and slots from device memory alone, so a captured CUDA graph replays them on new values.
"""

from __future__ import annotations

from torch import Tensor

from jax_sparse_mla.indices.lookup import INT_MAX
from jax_sparse_mla.indices.topk.api import TopkTransform
from jax_sparse_mla.metadata.batch import ForwardBatch, RequestTables, row_constants
from jax_sparse_mla.metadata.rows import bucket, check_step
from jax_sparse_mla.metadata.selection import topk_transform_of
from jax_sparse_mla.metadata.triton import schedules
from jax_sparse_mla.metadata.triton import v4 as v4_kernels
from jax_sparse_mla.metadata.triton import v32 as v32_kernels
from jax_sparse_mla.metadata.triton import window as window_kernels
from jax_sparse_mla.metadata.v4 import V4Metadata, assemble_v4, has_v4_kernel
from jax_sparse_mla.metadata.v32 import V32Metadata
from jax_sparse_mla.models import ModelSpec
from sparse_mla_torch.launch.executor import allocate, executor
from sparse_mla_torch.operations.checks import TensorChecks


def flashmla_schedule(
    topk_length: Tensor,
    *,
    topk: int,
    extra_topk: int = 0,
    extra_topk_length: Tensor | None = None,
    num_sm_parts: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch's `jax_sparse_mla.flashmla_schedule`, of at least one row, its lengths given.

    `out` are int32 `[num_sm_parts, 8]` and `[batch + 1]`.
    """
    check = TensorChecks("flashmla_schedule", topk_length)
    (batch,) = check("topk_length", topk_length, ("batch",)).shape
    if min(batch, num_sm_parts) < 1 or min(topk, extra_topk) < 0 or (extra_topk > 0) != (extra_topk_length is not None):
        raise check.fail(
            "needs a row, num_sm_parts >= 1, topk >= 0, and extra_topk_length with extra_topk, got "
            f"{batch}, {num_sm_parts}, {topk} and {extra_topk}"
        )
    extra = topk_length if extra_topk_length is None else extra_topk_length
    check("extra_topk_length", extra, ("batch",))
    out = check.outs(out, (num_sm_parts, 8), (batch + 1,))
    return schedules.flashmla(
        *(executor(topk_length.device), topk_length, extra),
        topk=topk,
        extra_topk=extra_topk,
        num_sm_parts=num_sm_parts,
        out=out,
    )


def paged_mqa_schedule(context_lens: Tensor, *, num_sms: int, split_kv: int = 256, out: Tensor | None = None) -> Tensor:
    """Torch's `jax_sparse_mla.paged_mqa_schedule`, of at least one row; `out` int32 `[num_sms + 1, 2]`."""
    check = TensorChecks("paged_mqa_schedule", context_lens)
    if not len(check("context_lens", context_lens, (None,))):
        raise check.fail("context_lens must have at least one row")
    out = check.out(out, (num_sms + 1, 2))
    return schedules.paged_mqa(executor(context_lens.device), context_lens, num_sms=num_sms, split_kv=split_kv, out=out)


def build_v4_metadata(
    spec: ModelSpec, batch: ForwardBatch, tables: RequestTables, *, out: V4Metadata | None = None
) -> V4Metadata:
    """Torch's `jax_sparse_mla.build_v4_metadata`; `out` are buffers to write into.

    A model that the kernel does not serve and a batch that does not fit its mode raise ValueError.
    """
    check = TensorChecks("build_v4_metadata", batch.seq_lens)
    if not spec.windowed or not has_v4_kernel(spec):
        raise check.fail(
            "spec must have a window and V4's compress ratios (none, 4, or 4 and one more), "
            f"got {spec.name} ({spec.window}, {spec.compress_ratios})"
        )
    batch, tables = _checked_step(check, spec, batch, tables)
    check("tables.full_to_swa", tables.full_to_swa, (None,))
    requests, device, tokens = check.dims["B"], batch.seq_lens.device, bucket(batch, tables)
    constants = v4_kernels.v4_constants(spec, row_constants(batch.mode, batch.num_draft_tokens), requests, tokens)
    outputs = v4_kernels.v4_outputs(constants, requests, check.dims["T"])
    if out is None:
        out = assemble_v4(allocate(outputs, device))
    fields = {}
    for key, output in outputs.items():
        ratio, field = key if isinstance(key, tuple) else (None, key)
        fields[key] = getattr(out if ratio is None else out.compressed[ratio], field)
        name = field if ratio is None else f"compressed[{ratio}].{field}"
        check(f"out.{name}", fields[key], output.shape, (output.dtype,))
    v4_kernels.v4_metadata(executor(device), constants, batch, tables, tokens=tokens, out=fields)
    return out


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
    batch, tables = _checked_step(check, spec, batch, tables)
    (requests, rows), tokens, device = (check.dims[x] for x in "BT"), bucket(batch, tables), batch.seq_lens.device
    ragged = transform is TopkTransform.RAGGED
    if ragged and requests * tokens > INT_MAX:
        raise check.fail(f"{requests} requests of up to {tokens} tokens have more slots than int32 counts")
    expansion = row_constants(batch.mode, batch.num_draft_tokens)
    outputs = v32_kernels.v32_outputs(spec, expansion, ragged, requests, rows, tokens)
    if out is None:
        out = V32Metadata(topk_transform=transform, **allocate(outputs, device))
    if out.topk_transform is not transform:
        raise check.fail(f"out.topk_transform must be {transform}, got {out.topk_transform}")
    fields = {
        name: check(f"out.{name}", getattr(out, name), output.shape, (output.dtype,))
        for name, output in outputs.items()
    }
    v32_kernels.v32_metadata(executor(device), spec, expansion, batch, tables, tokens=tokens, out=fields)
    return out


def swa_slots(
    positions: Tensor, req_rows: Tensor, tables: RequestTables, *, window: int, out: Tensor | None = None
) -> Tensor:
    """Torch's `jax_sparse_mla.swa_slots`; `out` int32 `[T, window]`."""
    check = TensorChecks("swa_slots", positions)
    (rows,) = check("positions", positions, ("T",)).shape
    check("req_rows", req_rows, ("T",))
    out = check.out(out, (rows, window))
    _check_tables(check, tables)
    if rows:
        arrays = positions, req_rows, tables.req_to_token, tables.full_to_swa
        window_kernels.swa_slots(executor(positions.device), *arrays, window=window, out=out)
    return out


def swa_gather_plan(
    seq_lens: Tensor, extend_lens: Tensor, req_rows: Tensor, tables: RequestTables, *, window: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Torch's `jax_sparse_mla.swa_gather_plan`, of at least one request."""
    check = TensorChecks("swa_gather_plan", seq_lens)
    (requests,) = check("seq_lens", seq_lens, ("B",)).shape
    check("extend_lens", extend_lens, ("B",))
    check("req_rows", req_rows, ("B",))
    _check_tables(check, tables)
    if requests == 0:
        raise check.fail("a batch needs at least one request")
    arrays = seq_lens, extend_lens, req_rows, tables.req_to_token, tables.full_to_swa
    return window_kernels.swa_gather_plan(executor(seq_lens.device), *arrays, window=window, capacity=capacity)


def _check_tables(check: TensorChecks, tables: RequestTables) -> None:
    check("tables.req_to_token", tables.req_to_token, (None, None))
    check("tables.full_to_swa", tables.full_to_swa, (None,))


def _checked_step(
    check: TensorChecks, spec: ModelSpec, batch: ForwardBatch, tables: RequestTables
) -> tuple[ForwardBatch, RequestTables]:
    """JAX's checks of a step, which must have a request; without the fields that its mode does not read."""
    if len(batch.seq_lens) == 0:
        raise check.fail("a batch needs at least one request")
    return check_step(check, spec, batch, tables)
