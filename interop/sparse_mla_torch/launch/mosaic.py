"""Launches of Pallas Mosaic GPU kernels on torch tensors, on the device's current stream; no JAX in between.

`jax_sparse_mla.launch.mosaic` compiles a kernel once and keeps it; here each device loads it once in a process.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from jax_sparse_mla.launch import compile_cache, mosaic
from jax_sparse_mla.packages import once
from sparse_mla_torch.launch import launcher

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Function(NamedTuple):
    """A kernel on a device: the driver's handle of its function."""

    address: int
    compiled: mosaic.Compiled
    device: int


@once
def load(library: compile_cache.Library, device: int) -> Function | None:
    """The kernel on a device, compiled if need be; None, with a warning why, where it cannot be."""
    try:
        compiled = _compiled(library)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with _Context(device):
            _check(_driver().cuModuleLoadData(ctypes.byref(module), compiled.image))
            _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, compiled.name.encode()))
            _check(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, compiled.shared_bytes))
    except (RuntimeError, OSError) as error:
        warnings.warn(f"sparse_mla_torch: the kernel {library.name} cannot be used: {error}", stacklevel=2)
        return None
    return Function(function.value, compiled, device)


@once
def _compiled(library: compile_cache.Library) -> mosaic.Compiled:
    return compile_cache.load(library, mosaic.read)


def direct(function: Function, blocks: int, arrays: Sequence[int | None]) -> Callable[..., None]:
    """`launch(*tensors)`: the kernel by so many thread blocks; a tensor that is absent is None.

    Args:
      arrays: of each of the kernel's inputs and results the number that it takes, or None if it is a tensor's address.
        `launch` takes the tensors in this order.
    """
    compiled, num_tensors, order = function.compiled, 0, []
    for number in arrays:
        order.append(num_tensors if number is None else (256 * number).to_bytes(8, "little"))
        num_tensors += number is None
    parameters = tuple(order[i] for i in compiled.parameters)
    by_driver = functools.partial(_launch_by_driver, function, blocks, parameters)
    if (module := launcher.module()) is None:
        return by_driver
    grid_and_block = (blocks, 1, 1, compiled.threads, compiled.shared_bytes)
    kernel = module.kernel(function, function.address, *grid_and_block, 1, num_tensors, parameters)
    at_once = module.launch

    def launch(*tensors: torch.Tensor | None) -> None:
        if not at_once(kernel, *tensors):  # a subclass of torch's tensors, or a thread that has no context yet
            by_driver(*tensors)

    return launch


def _launch_by_driver(function: Function, blocks: int, parameters: tuple, *tensors: torch.Tensor | None) -> None:
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    values = [addresses[x] if isinstance(x, int) else int.from_bytes(x, "little") for x in parameters]
    numbers = (ctypes.c_uint64 * len(values))(*values)
    size = ctypes.sizeof(ctypes.c_uint64)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(numbers) + size * i for i in range(len(values))))
    stream = ctypes.c_void_p(torch.cuda.current_stream(function.device).cuda_stream)
    shape = (blocks, 1, 1, function.compiled.threads, 1, 1, function.compiled.shared_bytes)
    with _Context(function.device):
        _check(_driver().cuLaunchKernel(ctypes.c_void_p(function.address), *shape, stream, pointers, None))


class _Context:
    """torch's context of a device, current in this thread: a thread has none before its first call of CUDA."""

    def __init__(self, device: int):
        self._context, handle = ctypes.c_void_p(), ctypes.c_int()
        _check(_driver().cuDeviceGet(ctypes.byref(handle), device))
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(self._context), handle))

    def __enter__(self) -> None:
        _check(_driver().cuCtxPushCurrent_v2(self._context))

    def __exit__(self, *error) -> None:
        _check(_driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}")
