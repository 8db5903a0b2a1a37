"""Checks of torch tensors, with messages that name the function and the argument."""

from __future__ import annotations

import math

import torch


def check_tensor(
    function: str,
    name: str,
    x: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    like: torch.Tensor | None = None,
) -> tuple[int, ...]:
    """The tensor's shape, if it is as wanted: None stands for any size, `like` has the device.

    Raises:
      TypeError: not a tensor, or of another dtype.
      ValueError: of another shape, or on another device.
    """
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, {wanted} {expected}, got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{function}: {name} must be {wanted} {expected}, got {x.dtype} {list(x.shape)}")
    if x.dim() != len(shape) or any(want not in (None, size) for want, size in zip(shape, x.shape)):
        raise ValueError(f"{function}: {name} must have shape {expected}, got {list(x.shape)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{function}: {name} must be on {like.device}, got {x.device}")
    return tuple(x.shape)


def check_scale(function: str, softmax_scale: float) -> None:
    """Refuses what is not a finite number."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"{function}: the softmax scale must be a number, got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"{function}: the softmax scale must be finite, got {softmax_scale}")
