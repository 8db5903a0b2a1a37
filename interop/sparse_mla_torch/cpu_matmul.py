"""Products of bfloat16 tensors on CPUs for which torch has no kernel of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

_PRODUCTS = {"addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "__matmul__", "mm", "grouped_mm", "_grouped_mm"}


@contextlib.contextmanager
def quick_products() -> Iterator[None]:
    """Within it, and as a decorator, this thread's products of bfloat16 tensors on a CPU are not slow.

    On x86 CPUs without AVX-512 torch multiplies bfloat16 matrices one number at a time: transformers needs minutes for
    a prompt of 2,734 tokens. There the operands are converted to float32 and the product to bfloat16. That is what
    torch's other kernels compute, which add in float32 too. On other machines nothing changes.
    """
    if _has_kernels():
        yield
        return
    with _Float32Products():
        yield


@functools.cache
def _has_kernels() -> bool:
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or supported()


class _Float32Products(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        is_product = getattr(func, "__name__", "") in _PRODUCTS and "out" not in kwargs
        if not is_product or not any(map(_is_slow, _pytree.tree_leaves(args))):
            return func(*args, **kwargs)
        args, kwargs = _pytree.tree_map(_wide, (args, kwargs))
        return func(*args, **kwargs).to(torch.bfloat16)


def _is_slow(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def _wide(x: Any) -> Any:
    return x.float() if _is_slow(x) else x
