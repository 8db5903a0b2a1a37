"""Exchanges tensors between torch and JAX through DLPack, without a copy; what would be unsafe is refused.

Neither side may write to memory that it received from the other. Caches that JAX updates are JAX's own, and torch must
not write to an array of JAX, which takes its arrays to be immutable.

On CUDA the receiver's stream (torch's current stream, or JAX's compute stream) waits for the giver's work so far; the
host does not wait. JAX keeps a tensor alive until its programs are done with it. For the other direction see
`to_torch`.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

_ALIGNMENT = 16  # bytes, which an XLA program expects of its arguments on a GPU

# JAX without 64-bit types, its default, would narrow these silently, in a copy.
_NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}


@contextlib.contextmanager
def torch_device_kept() -> Iterator[None]:
    """Puts torch's current GPU back afterwards: JAX leaves the one current that it used last, at its start the last."""
    if not torch.cuda.is_initialized():
        yield
        return
    device = torch.cuda.current_device()
    try:
        yield
    finally:
        torch.cuda.set_device(device)


@torch_device_kept()
def jax_device(device: torch.device) -> jax.Device:
    """The JAX device of a torch device; a ValueError if JAX does not have it here."""
    try:
        return jax.devices(device.type)[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"jax_device: JAX has no {device} here: {error}") from None


@torch_device_kept()
def to_jax(tensor: torch.Tensor, name: str = "tensor") -> jax.Array:
    """The same memory as a JAX array.

    It cannot be donated, since a program could then write to torch's memory. On a GPU such a call raises; on a CPU JAX
    takes a buffer of its own.

    Args:
      tensor: contiguous, without gradient, of a dtype that JAX keeps (bfloat16, float16, float32, the float8
        types, uint8, int8, int32, bool). On a CPU, memory that is not 64-byte aligned is copied by JAX.
      name: for messages.

    Raises:
      TypeError: not a tensor, or a 64-bit dtype, which JAX would narrow without `jax_enable_x64`.
      ValueError: a tensor that requires a gradient, is not contiguous or a lazily negated or conjugated view, or on a
        GPU is not 16-byte aligned.
      RuntimeError: torch captures a CUDA graph on this stream.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_jax: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype in _NARROWED and not jax.config.jax_enable_x64:
        narrow = _NARROWED[tensor.dtype]
        raise TypeError(f"to_jax: {name} is {tensor.dtype}, which JAX would narrow in a copy: pass .to({narrow})")
    if tensor.requires_grad:
        raise ValueError(f"to_jax: {name} requires a gradient, which does not pass to JAX: pass .detach()")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"to_jax: {name} is a lazily negated or conjugated view: pass .resolve_neg().resolve_conj()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"to_jax: {name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}: pass .contiguous(), "
            "or the whole buffer that it is a view of"
        )
    if tensor.numel() == 0:  # DLPack has no memory to share
        dtype = str(tensor.dtype).removeprefix("torch.")
        return jax.numpy.zeros(tuple(tensor.shape), dtype, device=jax_device(tensor.device))
    if tensor.is_cuda and tensor.data_ptr() % _ALIGNMENT:
        address = hex(tensor.data_ptr())
        raise ValueError(f"to_jax: {name} starts at {address}, not {_ALIGNMENT}-byte aligned: pass .clone()")
    with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            # JAX's stream would wait for an event of the capture, and so become part of it.
            raise RuntimeError(
                f"to_jax: {name} is handed over while a CUDA graph is captured, which JAX cannot be part of"
            )
        array = jax.dlpack.from_dlpack(tensor)  # torch exports only from its current GPU
    # Lives as long as the array: XLA donates no buffer that something else refers to.
    weakref.finalize(array, lambda _: None, array.__dlpack__()).atexit = False
    return array


@torch_device_kept()
def to_torch(array: jax.Array) -> torch.Tensor:
    """The same memory as a torch tensor. Read it only: JAX may share the buffer.

    On a GPU the memory goes back to JAX only behind torch's work: when the last tensor over it dies, it waits for all
    work so far on the stream that is then torch's current one. XLA alone would give the memory to the next program at
    once, while torch's kernels still read it.
    """
    if array.size == 0:
        (device,) = array.devices()
        where = "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=where)
    tensor = torch.from_dlpack(array)
    if tensor.is_cuda:
        weakref.finalize(tensor.untyped_storage(), _return_to_jax, array, tensor.device).atexit = False
    return tensor


# Arrays whose tensors are gone; and such arrays with the event after which torch no longer reads them.
_gone: collections.deque[tuple[torch.device, jax.Array]] = collections.deque()
_returning: collections.deque[tuple[torch.cuda.Event, jax.Array]] = collections.deque()


def _return_to_jax(array: jax.Array, device: torch.device) -> None:
    _gone.append((device, array))
    if torch.cuda.is_current_stream_capturing():
        return  # an event must not enter a capture: the next tensor that dies records one for this array too
    # Other threads, and the garbage collector in this one, may run this at any point: whoever pops an entry owns it.
    for device, array in _popped(_gone):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _returning.append((event, array))
    for event, array in _popped(_returning):
        if not event.query():
            _returning.appendleft((event, array))
            return


def _popped(entries: collections.deque) -> Iterator[tuple]:
    while entries:
        try:
            yield entries.popleft()
        except IndexError:
            return


@torch_device_kept()
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a JAX function with torch tensors anywhere in its arguments, and gives its arrays back as tensors.

    >>> out, lse = call(sparse_mla_decode, q, cache, indices, softmax_scale=scale)      # q, indices: torch tensors
    """
    args, kwargs = jax.tree.map(lambda x: to_jax(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    return jax.tree.map(lambda x: to_torch(x) if isinstance(x, jax.Array) else x, function(*args, **kwargs))
