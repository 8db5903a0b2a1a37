"""`launcher.c`, which does what is too slow in Python for a call of a few microseconds.

It launches Triton's kernels, of the versions it knows, and what a CUDA library has planned. It needs what Triton
needs anyway (a C compiler, Python's headers), and a torch with DLPack's exchange functions;
`jax_sparse_mla.launch.compile_cache` has it from the package, or compiles it at the first use and keeps it.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from jax_sparse_mla.launch import compile_cache, triton_versions
from sparse_mla_torch.launch import LIBRARY

_NAME = "sparse_mla_torch_launcher"  # of the module, as in launcher.c


@functools.cache
def module() -> Any | None:
    """The module, whose launches need a driver; None where it cannot be built."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None
    try:
        built = compile_cache.load(LIBRARY, compile_cache.python_extension(_NAME))
        built.bind(exchange, torch.Tensor, torch.nn.Parameter, *driver_functions())
    except Exception as error:  # whatever the toolchain's trouble is, there is a slower way
        warnings.warn(f"sparse_mla_torch: launcher.c is not used, calls take longer: {error}", stacklevel=2)
        return None
    return built


def for_triton() -> Any | None:
    """The module, if it can launch what this Triton compiles; else a warning says what that costs."""
    return module() if triton_versions.are_known("Triton launches, some 20 µs of the host more a call") else None


def planned(run: int, plan: bytes, num_tensors: int) -> Callable[..., None]:
    """`launch(*tensors)` of what a CUDA library planned, on torch's current stream; None for a tensor that is absent.

    Args:
      run: the address of the library's `int run(const void* planned, const uint64_t* addresses, void* stream)`, which
        returns CUDA's error.
      plan: its plan, in bytes.
      num_tensors: how many tensors `launch` takes, at least one of them there.
    """
    built = module()
    if built is None:
        return functools.partial(_run_by_ctypes, _RUN(run), plan)
    kernel, direct = built.planned(run, plan, num_tensors), built.launch

    def launch(*tensors: torch.Tensor | None) -> None:
        if not direct(kernel, *tensors):  # a subclass of torch's tensors
            _run_by_ctypes(_RUN(run), plan, *tensors)

    return launch


_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p)


def _run_by_ctypes(run: Callable[..., int], plan: bytes, *tensors: torch.Tensor | None) -> None:
    addresses = (ctypes.c_uint64 * len(tensors))(*(0 if x is None else x.data_ptr() for x in tensors))
    device = next(x.device for x in tensors if x is not None)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    if error := run(plan, addresses, stream):
        raise RuntimeError(f"launching a kernel failed with CUDA error {error}")


def driver_functions() -> list[int]:
    """The addresses of those that `bind` wants; 0 without a driver, where there are no CUDA tensors either."""
    names = ("cuLaunchKernel", "cuStreamIsCapturing", "cuCtxGetDevice")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [0] * len(names)
    return [ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in names]
