"""Stand-ins for TVM-FFI modules: Python functions with the argument lists of the real ones, called through XLA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np

_DTYPES = {"bfloat16": ml_dtypes.bfloat16}


def array(tensor) -> np.ndarray:
    """The tensor's own memory, strides included: what the real function would read and write."""
    dtype = np.dtype(_DTYPES.get(str(tensor.dtype), str(tensor.dtype)))
    if not tensor.numel():
        return np.zeros(tensor.shape, dtype)
    extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides)) + 1
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(tensor.data_ptr())
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    return np.ndarray(tensor.shape, dtype, memory, 0, strides)


def module(**functions: Callable) -> Callable[[], dict]:
    """A loader of a module of these functions, which get numpy arrays for tensors and every other argument as is."""
    import tvm_ffi

    def wrap(function):
        return tvm_ffi.convert(lambda *args: function(*(array(a) if hasattr(a, "data_ptr") else a for a in args)))

    wrapped = {name: wrap(function) for name, function in functions.items()}
    return lambda: wrapped
