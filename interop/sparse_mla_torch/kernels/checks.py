"""Argument checks of the launchers, by name, before a kernel sees a tensor."""

from __future__ import annotations

import torch

INT32 = (torch.int32,)
UINT8 = (torch.uint8,)
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
    wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    expected = "[" + ", ".join("any" if d is None else str(d) for d in shape) + "]"
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        given = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{function}: {name} must be a torch.Tensor, {wanted} {expected}, got {given}")
    if x.ndim != len(shape) or any(want not in (None, size) for size, want in zip(x.shape, shape)):
        raise ValueError(f"{function}: {name} must have shape {expected}, got {list(x.shape)}")
    if not x.is_contiguous() or x.device != like.device:
        raise ValueError(
            f"{function}: {name} must be contiguous and on {like.device}, got strides {list(x.stride())} on {x.device}"
        )
    return tuple(x.shape)
