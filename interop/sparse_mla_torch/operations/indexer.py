"""The indexer on torch tensors: its keys, its logits, and the selection of entries in bounded memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jax_sparse_mla.argument_checks import BF16, FLOAT32, FLOATS, UINT8
from jax_sparse_mla.backend import first_able
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indexer import triton as kernels
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS, MAX_KERNEL_HEADS, Call
from jax_sparse_mla.indexer.select import SCRATCH_BYTES, rows_at_once
from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.launch import build
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks, are_aligned
from sparse_mla_torch.operations.topk import topk_transform


def quantize_index_q(
    q: Tensor, *, hadamard: bool = False, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Torch's `jax_sparse_mla.indexer.logits.quantize_index_q`.

    With `hadamard` q passes the Walsh-Hadamard transform first, as V4's do. `out` are `(values, scale)`, float8_e4m3fn
    `[rows, heads, 128]` and float32 `[rows, heads]`.
    """
    check = TensorChecks("quantize_index_q", q)
    shape = check("q", q, (None, None, 128), FLOATS).shape
    values, scale = check.outs(out, shape, shape[:2], dtypes=("float8_e4m3fn", "float32"))
    if scale.numel():
        kernels.quantize_index_q(executor(q.device), q, hadamard=hadamard, out=(values, scale))
    return values, scale


def write_index_k(index_cache: Tensor, slots: Tensor, k: Tensor, *, hadamard: bool = False) -> Tensor:
    """Torch's `jax_sparse_mla.write_index_k`, in place; returns the same cache. `hadamard` as in `quantize_index_q`."""
    check = TensorChecks("write_index_k", index_cache)
    _check_cache(check, index_cache)
    (n,) = check("slots", slots, ("n",)).shape
    check("k", k, ("n", 128), FLOATS)
    if n and index_cache.numel():
        kernels.write_index_k(executor(index_cache.device), index_cache, slots, k, hadamard=hadamard)
    return index_cache


def index_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    format: IndexFormat = IndexFormat.FP8,
    out: Tensor | None = None,
) -> Tensor:
    """Torch's `jax_sparse_mla.index_logits`: float32 `[rows, P * page_size]`, new or `out`.

    q: float8_e4m3fn `[rows, heads, 128]`, at most 64 heads; bfloat16 over keys of the format FP4, whose cache is uint8
    `[num_pages, page_size * 68]`, at a multiple of 16 bytes.
    """
    check = TensorChecks("index_logits", index_cache)
    rows, capacity = _check_logits(check, q, weights, index_cache, page_table, lengths, format=format)
    out = check.out(out, (rows, capacity), "float32")
    if not index_cache.numel():
        return out.fill_(float("-inf"))
    if out.numel():
        launch_logits(q, weights, index_cache, page_table, lengths, out, rows_of_call=rows, fill=True, format=format)
    return out


def index_topk(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    topk: int,
    *,
    method: TopkTransform,
    kv_page_table: Tensor | None = None,
    page_size: int = 1,
    row_to_request: Tensor | None = None,
    topk_indices_offset: Tensor | None = None,
    batch_invariant: bool = False,
    format: IndexFormat = IndexFormat.FP8,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Torch's `jax_sparse_mla.index_topk`, padded with −1; q and index_cache as in `index_logits`.

    Args:
      batch_invariant: a row's logits do not depend on how many rows there are: at most 128 are computed together.
      scratch: float32, for the logits of at least one row; more of it takes more rows at a time. By default 256 MiB are
        allocated, or what all rows need.
    """
    check = TensorChecks("index_topk", index_cache)
    rows, capacity = _check_logits(
        *(check, q, weights, index_cache, page_table, lengths),
        format=format,
        requests="rows" if row_to_request is None else "requests",
    )
    check.optional("row_to_request", row_to_request, ("rows",))
    if not isinstance(method, TopkTransform):
        raise TypeError(f"index_topk: method must be a TopkTransform, got {method!r}")
    paged = method is TopkTransform.PAGED
    if (kv_page_table if paged else topk_indices_offset) is None:
        raise check.fail(f"{'kv_page_table' if paged else 'topk_indices_offset'} is missing, and {method} needs it")
    out = check.out(out, (rows, topk))
    if not rows or not page_table.shape[0]:
        return out.fill_(-1)
    if scratch is None:
        elements = min(rows, rows_at_once(capacity, SCRATCH_BYTES, batch_invariant)) * capacity
        scratch = torch.empty(elements, dtype=torch.float32, device=q.device)
    fits = scratch.dtype == torch.float32 and scratch.numel() >= capacity and scratch.device == q.device
    if not fits or not scratch.is_contiguous():
        raise check.fail(f"scratch must be contiguous float32 with at least {capacity} elements on {q.device}")
    chunk = min(rows, rows_at_once(capacity, 4 * scratch.numel(), batch_invariant)) if capacity else rows

    if row_to_request is not None:
        # A row of no request has no keys.
        known = (row_to_request >= 0) & (row_to_request < page_table.shape[0])
        lengths, request = lengths * known, row_to_request.clamp(0, page_table.shape[0] - 1)
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        count = part.stop - first
        pages = page_table[part] if row_to_request is None else page_table[request[part]]
        logits = scratch.view(-1)[: count * capacity].view(count, capacity)
        if not index_cache.numel():
            logits.fill_(float("-inf"))
        elif capacity:
            launch_logits(
                *(q[part], weights[part], index_cache, pages, lengths[part], logits),
                rows_of_call=count if batch_invariant else rows,
                fill=False,
                format=format,
            )
        topk_transform(
            *(logits, lengths[part], topk),
            method=method,
            page_table=kv_page_table[part] if paged and row_to_request is None else kv_page_table,
            page_size=page_size,
            row_to_request=row_to_request[part] if paged and row_to_request is not None else None,
            topk_indices_offset=None if paged else topk_indices_offset[part],
            out=out[part],
        )
    return out


def _check_logits(
    check: TensorChecks, q, weights, index_cache, page_table, lengths, *, format: IndexFormat, requests: str = "rows"
) -> tuple[int, int]:
    """Checks the arguments of logits, and returns their rows and columns.

    `requests` names the rows of the page table, one per row of q by default.
    """
    page_size = _check_cache(check, index_cache, format.key_bytes)
    # The kernel takes four bytes of an FP4 key that one thread has loaded side by side, which it does of aligned ones.
    if format.name == "FP4" and index_cache.data_ptr() % 16:
        raise check.fail(
            f"index_cache of FP4 keys must begin at a multiple of 16 bytes, got {index_cache.data_ptr():#x}"
        )
    rows, heads, _ = check("q", q, ("rows", "heads", 128), ("float8_e4m3fn",) if format.name == "FP8" else BF16).shape
    if not 0 < heads <= MAX_KERNEL_HEADS:
        raise check.fail(f"q must have 1 to {MAX_KERNEL_HEADS} heads, got {heads}")
    check("weights", weights, ("rows", "heads"), FLOAT32)
    _, pages = check("page_table", page_table, (requests, None)).shape
    check("lengths", lengths, ("rows",))
    return rows, pages * page_size


def launch_logits(
    q, weights, index_cache, page_table, lengths, out, *, rows_of_call: int, fill: bool, format: IndexFormat
) -> None:
    """Writes logits; no size is zero. Arguments as those of `jax_sparse_mla.indexer.logits.logits_of`."""
    fp4 = format.name == "FP4"
    page_size = index_cache.shape[1] // format.key_bytes
    aligned = are_aligned((q, index_cache, out) if fp4 else (q, weights, index_cache, out))  # FP4's q by 8
    if q.is_cuda and aligned and (binary := _cuda_kernel(q.device, fp4, rows_of_call, q.shape[1], page_size)):
        import tvm_ffi

        module, pages = build.module(*binary), (index_cache.shape[0], 0)
        function, q = (module.index_logits_fp4, q) if fp4 else (module.index_logits, q.view(torch.uint8))
        with tvm_ffi.use_torch_stream():
            function(q, weights, index_cache, page_table, lengths, *pages, fill, out)
    else:
        arrays = q, weights, index_cache, page_table, lengths
        kernels.index_logits(executor(q.device), *arrays, fp4=fp4, fill=fill, out=out)


@functools.lru_cache(maxsize=1024)
def _cuda_kernel(device: torch.device, fp4: bool, rows: int, heads: int, page_size: int) -> tuple[str, str] | None:
    """The kernel and architecture of the CUDA binary that serves logits of these sizes; None: Triton's kernels do."""
    info, kind = DeviceInfo("cuda", torch.cuda.get_device_capability(device)), ("bfloat16", "FP4")
    call = Call(info, *(kind if fp4 else ("float8_e4m3fn", "FP8")), rows, heads, page_size, page_size)
    return first_able(LOGITS_BACKENDS, call, "index_logits", "torch").binary("index_logits", info)


def _check_cache(check: TensorChecks, index_cache: Tensor, key_bytes: int = kernels.TOKEN_BYTES) -> int:
    """The page size of a cache of index keys."""
    _, page_bytes = check("index_cache", index_cache, (None, None), UINT8).shape
    if page_bytes == 0 or page_bytes % key_bytes:
        raise check.fail(
            f"index_cache must have pages of page_size * {key_bytes} bytes, page_size >= 1, got {page_bytes}"
        )
    if index_cache.data_ptr() % 4:  # a page's last bytes are scales, read by words
        raise check.fail(f"index_cache must begin at a multiple of 4 bytes, got {index_cache.data_ptr():#x}")
    return page_bytes // key_bytes
