"""The KV cache kernels on torch tensors: the bytes of `jax_sparse_mla.kv_cache`, in place on torch's buffers.

A cache is a `PagedKV` whose `data` is a torch tensor, uint8 `[num_pages, page_bytes]`, or the view of one layer among
several; its pages may stand further apart or closer, without the layout's padding. Every function launches on the
current stream, allocates nothing that its caller passes, and neither synchronises nor copies to the host, so it can be
captured in a CUDA graph. JAX's backend is not touched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache import triton as kernels
from jax_sparse_mla.kv_cache.layout import KERNEL_LAYOUTS
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import FLOAT32, FLOATS, UINT8, check_strided, check_tensor


def write_kv(cache: PagedKV, slots: torch.Tensor, kv: torch.Tensor) -> PagedKV:
    """Writes K rows into the cache in place, as `jax_sparse_mla.write_kv`.

    Args:
      cache: the cache, of torch's memory.
      slots: int32 `[n]`. A negative or out-of-range slot skips its row.
      kv: bfloat16 or float32 `[n, qk_dim]`.

    Returns:
      The same cache.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, a tensor that is not contiguous or on another device, or a writer whose scales are no
        powers of two, which the kernel does not make.
    """
    data, scale, static = _check_pages("write_kv", cache)
    if cache.layout.least_exponent is None:
        raise ValueError(f"write_kv: cache.layout is {cache.layout}, which jax_sparse_mla.write_kv alone writes")
    n = check_tensor("write_kv", "slots", slots, (None,), data)[0]
    check_tensor("write_kv", "kv", kv, (n, cache.layout.qk_dim), data, FLOATS)
    if n and cache.num_pages:
        kernels.write_kv(executor(data.device), data, slots, kv, scale, **static)
    return cache


def gather_kv(
    cache: PagedKV, slots: torch.Tensor, *, out: torch.Tensor | None = None, out_start: int = 0
) -> torch.Tensor:
    """Gathers K rows as bfloat16, as `jax_sparse_mla.gather_kv`; an invalid slot gives a row of zeros.

    Args:
      cache: the cache, of torch's memory.
      slots: int32 `[n]`.
      out: bfloat16 `[>= out_start + n, qk_dim]`, a workspace: its rows `out_start ... out_start + n - 1` are
        written, the others left alone. Allocated by default.
      out_start: the row of `out` that the first slot goes to.

    Returns:
      `out`.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, rows that do not fit `out`, or a tensor that is not contiguous or on another device.
    """
    data, scale, static = _check_pages("gather_kv", cache)
    n = check_tensor("gather_kv", "slots", slots, (None,), data)[0]
    if out is None:
        out = torch.empty((out_start + n, cache.layout.qk_dim), dtype=torch.bfloat16, device=data.device)
    check_tensor("gather_kv", "out", out, (None, cache.layout.qk_dim), data, (torch.bfloat16,))
    if not 0 <= out_start <= out.shape[0] - n:
        raise ValueError(f"gather_kv: out has {out.shape[0]} rows, too few for {n} from out_start={out_start} on")
    if n:
        more = {"rows": out.shape[0], "start": out_start, "out": out}
        kernels.gather_kv(executor(data.device), data, slots, scale, **static, **more)
    return out


@dataclasses.dataclass
class SplitScratch:
    """What `split_pages` needs beside its result: reuse it for every cache of the same number of pages.

    Attributes:
      seen: int32 `[num_pages + 1]`: which pages were seen, and how many.
      pages: int32 `[capacity]`.
    """

    seen: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def allocate(cls, num_pages: int, num_slots: int, device: torch.device | str) -> SplitScratch:
        """For caches of `num_pages` pages and up to `num_slots` slots a call."""
        capacity = max(min(num_pages, num_slots), 1)
        return cls(
            seen=torch.empty(num_pages + 1, dtype=torch.int32, device=device),
            pages=torch.empty(capacity, dtype=torch.int32, device=device),
        )


def split_pages(cache: PagedKV, out: PagedKV, slots: torch.Tensor, *, scratch: SplitScratch | None = None) -> PagedKV:
    """Copies the pages that `slots` touch into a cache of a smaller page size, as `jax_sparse_mla.split_pages`.

    Args:
      cache: the cache, of torch's memory.
      out: where to copy to: same layout, a page size that divides the cache's, as many slots. Its other pages and
        its padding keep their bytes.
      slots: int32, any shape. Negative and out-of-range slots touch nothing.
      scratch: allocated by default.

    Returns:
      `out`.

    Raises:
      TypeError: a wrong dtype.
      ValueError: another geometry, pages that are not dense, or a tensor on another device.
    """
    data, _, static = _check_pages("split_pages", cache)
    out_data, _, out_static = _check_pages("split_pages", out, "out", like=data)
    if out.layout != cache.layout or cache.page_size % out.page_size or out.num_slots != cache.num_slots:
        raise ValueError(
            f"split_pages: out must have layout {cache.layout}, a page size that divides {cache.page_size} and "
            f"{cache.num_slots} slots, got {out.layout}, page size {out.page_size} and {out.num_slots} slots"
        )
    check_tensor("split_pages", "slots", slots, (None,) * slots.ndim, data)
    n, num_pages = slots.numel(), cache.num_pages
    if not n or not num_pages:
        return out
    scratch = scratch or SplitScratch.allocate(num_pages, n, data.device)
    if scratch.seen.numel() != num_pages + 1 or scratch.pages.numel() < min(n, num_pages):
        raise ValueError(f"split_pages: scratch is not for {num_pages} pages and {n} slots")
    kernels.split_pages(
        executor(data.device),
        out_data,
        data,
        slots,
        **static,
        out_page_size=out.page_size,
        out_page_bytes=out_static["page_bytes"],
        scratch=(scratch.seen, scratch.pages),
    )
    return out


def _check_pages(
    function: str, cache: PagedKV, name: str = "cache", like: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """The cache's data and scale, and what the kernels know of it; page_bytes from one page's start to the next's."""
    if cache.layout.read_as not in KERNEL_LAYOUTS:
        names = ", ".join(layout.name for layout in KERNEL_LAYOUTS)
        raise ValueError(f"{function}: {name}.layout must be one of {names}, got {cache.layout}")
    cache.check_view(ArgumentChecks(function), name, cache.data.shape[0])
    data, tokens = cache.pages, cache.page_size * cache.layout.bytes_per_token
    check_strided(function, f"{name}.data", data, (None, None), data if like is None else like, UINT8)
    stride = data.stride(0) if data.shape[0] > 1 else cache.layout.page_bytes(cache.page_size)
    dense = data.stride(1) == 1 and tokens <= data.shape[1] <= stride
    if not dense or stride % 8 or data.data_ptr() % 8:
        raise ValueError(
            f"{function}: {name}.data must be {tokens} bytes or more a page, with pages at multiples of 8 bytes, got "
            f"shape {list(data.shape)}, strides {list(data.stride())}"
        )
    scale = cache.tensor_scale
    if cache.layout.has_tensor_scale:
        check_tensor(function, f"{name}.scale", scale, (1,), data, FLOAT32)
    return data, scale, {"layout": cache.layout, "page_size": cache.page_size, "page_bytes": stride}
