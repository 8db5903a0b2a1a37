"""The indexer's kernels on torch tensors, by the rules of `jax_sparse_mla.indexer.logits`, on torch's current stream.

Nothing is allocated that its caller passes, nothing synchronises or copies to the host: a CUDA graph captures all.
"""

from __future__ import annotations

import functools

import torch

from jax_sparse_mla.backend import first_able
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indexer import triton as kernels
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS, MAX_KERNEL_HEADS, Call
from jax_sparse_mla.launch import build
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import FLOATS, UINT8, check_tensor, output_or_new


def quantize_index_q(
    q: torch.Tensor, *, hadamard: bool = False, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises index queries, as `jax_sparse_mla.indexer.logits.quantize_index_q`.

    Args:
      q: bfloat16 or float32 `[rows, heads, 128]`.
      hadamard: q passes the Walsh-Hadamard transform first, as V4's do.
      out: `(values, scale)` to write into, float8_e4m3fn `[rows, heads, 128]` and float32 `[rows, heads]`; allocated
        by default.

    Returns:
      `out`.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, or a tensor that is not contiguous or on another device.
    """
    function = "quantize_index_q"
    shape = check_tensor(function, "q", q, (None, None, 128), q, FLOATS)
    values, scale = out or (None, None)
    values = output_or_new(function, "out[0]", values, shape, q, torch.float8_e4m3fn)
    scale = output_or_new(function, "out[1]", scale, shape[:2], q, torch.float32)
    if scale.numel():
        kernels.quantize_index_q(executor(q.device), q, hadamard=hadamard, out=(values, scale))
    return values, scale


def write_index_k(
    index_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, *, hadamard: bool = False
) -> torch.Tensor:
    """Writes index keys into the cache in place, as `jax_sparse_mla.write_index_k`.

    Args:
      index_cache: uint8 `[num_pages, page_size * 132]`.
      slots: int32 `[n]`. A negative or out-of-range slot skips its row.
      k: bfloat16 or float32 `[n, 128]`.
      hadamard: keys pass the Walsh-Hadamard transform first, as V4's do.

    Returns:
      The same cache.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, or a tensor that is not contiguous or on another device.
    """
    function = "write_index_k"
    _page_size(function, index_cache)
    (n,) = check_tensor(function, "slots", slots, (None,), index_cache)
    check_tensor(function, "k", k, (n, 128), index_cache, FLOATS)
    if n and index_cache.numel():
        kernels.write_index_k(executor(index_cache.device), index_cache, slots, k, hadamard=hadamard)
    return index_cache


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    format: IndexFormat = IndexFormat.FP8,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the top-k selects by, as `jax_sparse_mla.index_logits`.

    Args:
      q: float8_e4m3fn `[rows, heads, 128]`, at most 64 heads; bfloat16 over FP4 keys.
      weights: float32 `[rows, heads]`.
      index_cache: uint8 `[num_pages, page_size * 132]`; of FP4 keys `[num_pages, page_size * 68]`, at a multiple of 16
        bytes.
      page_table: int32 `[rows, P]`.
      lengths: int32 `[rows]`.
      format: of the keys.
      out: float32 `[rows, P * page_size]` to write into; allocated by default.

    Returns:
      `out`; −inf from `lengths[t]` on and where there is no page.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, more heads, or a tensor that is not contiguous or on another device.
    """
    function = "index_logits"
    rows, capacity = check_logits(function, q, weights, index_cache, page_table, lengths, format=format)
    out = output_or_new(function, "out", out, (rows, capacity), index_cache, torch.float32)
    if not index_cache.numel():
        return out.fill_(float("-inf"))
    if out.numel():
        launch_logits(q, weights, index_cache, page_table, lengths, out, rows_of_call=rows, fill=True, format=format)
    return out


def check_logits(
    function: str, q, weights, index_cache, page_table, lengths, *, format: IndexFormat, requests: int | None = None
) -> tuple[int, int]:
    """Checks what logits are made of; `requests` rows of the table, one per row by default. (rows, columns)."""
    page_size = _page_size(function, index_cache, format.key_bytes)
    # The kernel takes four bytes of an FP4 key that one thread has loaded side by side, which it does of aligned ones.
    if format.name == "FP4" and index_cache.data_ptr() % 16:
        raise ValueError(
            f"{function}: index_cache of FP4 keys must begin at a multiple of 16 bytes, got {index_cache.data_ptr():#x}"
        )
    dtype = torch.float8_e4m3fn if format.name == "FP8" else torch.bfloat16
    rows, heads, _ = check_tensor(function, "q", q, (None, None, 128), index_cache, (dtype,))
    if not 0 < heads <= MAX_KERNEL_HEADS:
        raise ValueError(f"{function}: q must have 1 to {MAX_KERNEL_HEADS} heads, got {heads}")
    check_tensor(function, "weights", weights, (rows, heads), index_cache, (torch.float32,))
    _, pages = check_tensor(
        function, "page_table", page_table, (rows if requests is None else requests, None), index_cache
    )
    check_tensor(function, "lengths", lengths, (rows,), index_cache)
    return rows, pages * page_size


def launch_logits(
    q, weights, index_cache, page_table, lengths, out, *, rows_of_call: int, fill: bool, format: IndexFormat
) -> None:
    """Writes logits; no size is zero. Arguments as those of `jax_sparse_mla.indexer.logits.logits_of`."""
    fp4 = format.name == "FP4"
    page_size = index_cache.shape[1] // format.key_bytes
    wide = (q, index_cache, out) if fp4 else (q, weights, index_cache, out)  # by 16 bytes, FP4's q by 8
    aligned = all(x.data_ptr() % 16 == 0 for x in wide)
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
    call = Call(info, *(kind if fp4 else ("float8_e4m3fn", "FP8")), rows, heads, page_size)
    return first_able(LOGITS_BACKENDS, call, "index_logits", "torch").binaries.get("index_logits")


def _page_size(function: str, index_cache: torch.Tensor, key_bytes: int = kernels.TOKEN_BYTES) -> int:
    _, page_bytes = check_tensor(function, "index_cache", index_cache, (None, None), index_cache, UINT8)
    if page_bytes == 0 or page_bytes % key_bytes:
        raise ValueError(
            f"{function}: index_cache must have pages of page_size * {key_bytes} bytes, page_size >= 1, "
            f"got {page_bytes}"
        )
    if index_cache.data_ptr() % 4:  # a page's last bytes are scales, read by words
        raise ValueError(
            f"{function}: index_cache must begin at a multiple of 4 bytes, got {index_cache.data_ptr():#x}"
        )
    return page_bytes // key_bytes
