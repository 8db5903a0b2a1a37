"""Zero-copy exchange of tensors between torch and JAX through DLPack, with its hazards refused instead of suffered.

What JAX alone computes reaches torch through here. JAX cannot update a buffer that torch owns, so caches that JAX
writes are JAX's (or are handed over for good), and an array that torch received must not be written to: JAX holds
it to be immutable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

# JAX (with 64-bit types off, as served) would narrow these silently, in a copy.
_NARROWED = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}


def to_jax(tensor: torch.Tensor, name: str = "tensor") -> jax.Array:
    """The same memory as a JAX array.

    Args:
      tensor: contiguous, without gradient, of a dtype that JAX keeps (bfloat16, float16, float32, the float8
        types, uint8, int8, int32, bool). On a CPU, memory that is not 64-byte aligned is copied by JAX.
      name: for messages.

    Raises:
      TypeError: not a tensor, or a 64-bit dtype, which JAX would narrow.
      ValueError: a tensor that requires a gradient or is not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_jax: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype in _NARROWED:
        narrow = _NARROWED[tensor.dtype]
        raise TypeError(f"to_jax: {name} is {tensor.dtype}, which JAX would narrow in a copy: pass .to({narrow})")
    if tensor.requires_grad:
        raise ValueError(f"to_jax: {name} requires a gradient, which does not pass to JAX: pass .detach()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"to_jax: {name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}: pass .contiguous(), "
            "or the whole buffer that it is a view of"
        )
    if tensor.numel() == 0:  # DLPack has no memory to share
        return jax.numpy.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return jax.dlpack.from_dlpack(tensor)


def to_torch(array: jax.Array) -> torch.Tensor:
    """The same memory as a torch tensor. Read it only: JAX may share the buffer."""
    if array.size == 0:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    return torch.from_dlpack(array)


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a JAX function with torch tensors anywhere in its arguments, and gives its arrays back as tensors.

    >>> out, lse = call(sparse_mla_decode, q, cache, indices, softmax_scale=scale)      # q, indices: torch tensors
    """
    args, kwargs = jax.tree.map(lambda x: to_jax(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    return jax.tree.map(lambda x: to_torch(x) if isinstance(x, jax.Array) else x, function(*args, **kwargs))
