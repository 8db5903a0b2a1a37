"""Argument checks of torch tensors, by the rules of `jax_sparse_mla.argument_checks`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from jax_sparse_mla.argument_checks import INT32, Checks, Shape

_NAMES = {x: str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}


class TensorChecks(Checks):
    """Checks the tensors of one call, which lie on the device of `like`.

    >>> check = TensorChecks("swa_slots", positions)
    >>> positions = check("positions", positions, ("T",))
    """

    def __init__(self, function: str, like: Any):
        super().__init__(function)
        self.device = getattr(like, "device", None)  # the check of `like` itself says that it is no tensor

    def __call__(self, name: str, x: Any, shape: Shape, dtypes: Sequence[str] = INT32) -> Tensor:
        """Returns `x`, a contiguous tensor; raises TypeError for no tensor or another dtype, else ValueError."""
        self.strided(name, x, shape, dtypes)
        if not x.is_contiguous():
            raise self.fail(f"{name} must be contiguous, got strides {list(x.stride())}")
        return x

    def strided(self, name: str, x: Any, shape: Shape, dtypes: Sequence[str] = INT32) -> Tensor:
        """As `__call__`, of a tensor with any strides."""
        if not isinstance(x, Tensor) or _NAMES[x.dtype] not in dtypes:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            wanted = f"{' or '.join(dtypes)} {self.expected(shape)}"
            raise TypeError(f"{self.function}: {name} must be a torch.Tensor, {wanted}, got {got}")
        if x.shape != shape:
            self.bind(name, x.shape, shape)
        if x.device != self.device:
            raise self.fail(f"{name} must be on {self.device}, got {x.device}")
        return x

    def out(self, x: Tensor | None, shape: tuple[int, ...], dtype: str = "int32", name: str = "out") -> Tensor:
        """The tensor that a caller gives to be written, checked; a new one where there is none."""
        if x is None:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        return self(name, x, shape, (dtype,))

    def outs(
        self, out: tuple[Tensor, Tensor] | None, *shapes: tuple, dtypes: Sequence[str] = INT32 * 2
    ) -> tuple[Tensor, ...]:
        """As `out`, of two results."""
        results = zip(out or (None, None), shapes, dtypes, strict=True)
        return tuple(self.out(x, shape, dtype, f"out[{i}]") for i, (x, shape, dtype) in enumerate(results))


def are_aligned(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all begin at multiples of 16 bytes, which kernels read and store at a time."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


def check_scale(function: str, softmax_scale: float) -> float:
    """The scale as a float; refuses what is no finite number of Python's or numpy's."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(f"{function}: the softmax scale must be a number, got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"{function}: the softmax scale must be finite, got {softmax_scale}")
    return float(softmax_scale)
