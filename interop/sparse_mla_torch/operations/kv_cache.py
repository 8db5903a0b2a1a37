"""The KV cache's kernels on torch tensors: the bytes of `jax_sparse_mla.kv_cache`, in place on torch's buffers.

A cache is a `PagedKV` whose `data` is a torch tensor, uint8 `[num_pages, page_bytes]`, or the view of one layer among
several; its pages may stand further apart or closer, without the layout's padding. Pages that are not dense raise
ValueError. JAX's backend is not touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, UINT8, ArgumentChecks
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache import triton as kernels
from jax_sparse_mla.kv_cache.layout import KERNEL_LAYOUTS, Pages
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks


def write_kv(cache: PagedKV, slots: Tensor, kv: Tensor) -> PagedKV:
    """Torch's `jax_sparse_mla.write_kv`, in place; returns the same cache.

    A writer whose scales are no powers of two, which the kernel does not make, raises ValueError.
    """
    check, data, pages = _checked("write_kv", cache)
    if cache.layout.least_exponent is None:
        raise check.fail(f"cache.layout is {cache.layout}, which jax_sparse_mla.write_kv alone writes")
    (n,) = check("slots", slots, ("n",)).shape
    check("kv", kv, ("n", cache.layout.qk_dim), FLOATS)
    if n and cache.num_pages:
        kernels.write_kv(executor(data.device), data, cache.tensor_scale, slots, kv, pages=pages)
    return cache


def gather_kv(cache: PagedKV, slots: Tensor, *, out: Tensor | None = None, out_start: int = 0) -> Tensor:
    """Torch's `jax_sparse_mla.gather_kv`.

    `out` is a workspace, bfloat16 `[>= out_start + n, qk_dim]`: its rows from `out_start` on are written, the others
    left alone. Rows that do not fit it raise ValueError.
    """
    check, data, pages = _checked("gather_kv", cache)
    (n,) = check("slots", slots, ("n",)).shape
    if out is None:
        out = torch.empty((out_start + n, cache.layout.qk_dim), dtype=torch.bfloat16, device=data.device)
    check("out", out, (None, cache.layout.qk_dim), ("bfloat16",))
    if not 0 <= out_start <= out.shape[0] - n:
        raise check.fail(f"out has {out.shape[0]} rows, too few for {n} from out_start={out_start} on")
    if n:
        kernels.gather_kv(
            *(executor(data.device), data, cache.tensor_scale, slots),
            pages=pages,
            rows=out.shape[0],
            start=out_start,
            out=out,
        )
    return out


def split_pages(cache: PagedKV, out: PagedKV, slots: Tensor) -> PagedKV:
    """Torch's `jax_sparse_mla.split_pages`, into `out`, which it returns.

    `out` has the same layout, a page size that divides the cache's and as many slots (else ValueError); its other pages
    and its padding keep their bytes. `slots` have any shape.
    """
    check, data, pages = _checked("split_pages", cache)
    _, out_data, out_pages = _checked("split_pages", out, "out", like=data)
    if out.layout != cache.layout or cache.page_size % out.page_size or out.num_slots != cache.num_slots:
        raise check.fail(
            f"out must have layout {cache.layout}, a page size that divides {cache.page_size} and "
            f"{cache.num_slots} slots, got {out.layout}, page size {out.page_size} and {out.num_slots} slots"
        )
    check("slots", slots, (None,) * slots.ndim)
    if not slots.numel() or not cache.num_pages:
        return out
    kernels.split_pages(executor(slots.device), out_data, data, slots, pages=pages, out_pages=out_pages)
    return out


def _checked(
    function: str, cache: PagedKV, name: str = "cache", like: Tensor | None = None
) -> tuple[TensorChecks, Tensor, Pages]:
    """The checks of a call on the cache's device (or `like`'s), the layer's share of its data, and its pages there."""
    if cache.layout.read_as not in KERNEL_LAYOUTS:
        names = ", ".join(layout.name for layout in KERNEL_LAYOUTS)
        raise ValueError(f"{function}: {name}.layout must be one of {names}, got {cache.layout}")
    cache.check_view(ArgumentChecks(function), name, cache.data.shape[0])
    data, tokens = cache.pages, cache.page_size * cache.layout.bytes_per_token
    check = TensorChecks(function, data if like is None else like)
    check.strided(f"{name}.data", data, (None, None), UINT8)
    stride = data.stride(0) if data.shape[0] > 1 else cache.layout.page_bytes(cache.page_size)
    dense = data.stride(1) == 1 and tokens <= data.shape[1] <= stride
    if not dense or stride % 8 or data.data_ptr() % 8:
        raise check.fail(
            f"{name}.data must be {tokens} bytes or more a page, with pages at multiples of 8 bytes, got "
            f"shape {list(data.shape)}, strides {list(data.stride())}"
        )
    if cache.layout.has_tensor_scale:
        check(f"{name}.scale", cache.tensor_scale, (1,), FLOAT32)
    return check, data, Pages(cache.layout, cache.page_size, 0, data.shape[0], stride)
