"""Argument checks, by name, before a kernel sees a tensor."""

from __future__ import annotations

import math
import numbers

import torch

from jax_sparse_mla.launch.describe import Output

INT32 = (torch.int32,)
UINT8 = (torch.uint8,)
BF16 = (torch.bfloat16,)
FLOAT32 = (torch.float32,)
FLOATS = (torch.bfloat16, torch.float32)


def check_tensor(
    function: str,
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, ...],
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = INT32,
) -> tuple[int, ...]:
    """The shape of a contiguous tensor on `like`'s device; None in `shape` stands for any size.

    Raises:
      TypeError: no tensor, or of another dtype.
      ValueError: of another shape, not contiguous, or on another device.
    """
    found = check_strided(function, name, x, shape, like, dtypes)
    if not x.is_contiguous():
        raise ValueError(f"{function}: {name} must be contiguous, got strides {list(x.stride())}")
    return found


def check_strided(
    function: str,
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, ...],
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = INT32,
) -> tuple[int, ...]:
    """As `check_tensor`, of a tensor with any strides."""
    if isinstance(x, torch.Tensor) and x.dtype in dtypes and x.device == like.device and _is_of(x.shape, shape):
        return tuple(x.shape)
    wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    expected = "[" + ", ".join("any" if d is None else str(d) for d in shape) + "]"
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        given = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{function}: {name} must be a torch.Tensor, {wanted} {expected}, got {given}")
    if not _is_of(x.shape, shape):
        raise ValueError(f"{function}: {name} must have shape {expected}, got {list(x.shape)}")
    raise ValueError(f"{function}: {name} must be on {like.device}, got {x.device}")


def _is_of(sizes: torch.Size, shape: tuple[int | None, ...]) -> bool:
    """Whether these are the sizes that the shape names, None being any."""
    if sizes == tuple(shape):
        return True
    return len(sizes) == len(shape) and all(want in (None, size) for size, want in zip(sizes, shape))


def check_output(function: str, name: str, x: torch.Tensor, output: Output, like: torch.Tensor) -> None:
    """Refuses a tensor that a launch cannot write its output into."""
    check_tensor(function, name, x, tuple(output.shape), like, (getattr(torch, output.dtype),))


def output_or_new(
    function: str,
    name: str,
    x: torch.Tensor | None,
    shape: tuple[int, ...],
    like: torch.Tensor,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """The tensor that a caller gives to be written, checked; a new one where there is none."""
    if x is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    check_tensor(function, name, x, shape, like, (dtype,))
    return x


def check_scale(function: str, softmax_scale: float) -> float:
    """The scale as a float; refuses what is no finite number of Python's or numpy's."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(f"{function}: the softmax scale must be a number, got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"{function}: the softmax scale must be finite, got {softmax_scale}")
    return float(softmax_scale)
