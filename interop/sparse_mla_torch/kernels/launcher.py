"""`launcher.c`, which does what is too slow in Python for a call of a few microseconds; compiled at the first use.

It needs what Triton needs here anyway (a C compiler, Python's headers), and a torch with DLPack's exchange functions.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
import triton

# Whose compiled kernels' parameters are known, and whose builder: with other versions Python and Triton do the work.
_KNOWN_TRITON = ("3.6",)


@functools.cache
def module() -> Any | None:
    """The module, whose launches need a driver; None where it cannot be built."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or not triton.__version__.startswith(_KNOWN_TRITON):
        return None
    from triton.runtime.build import compile_module_from_src

    source, headers = Path(__file__).with_name("launcher.c"), Path(torch.__file__).with_name("include")
    try:
        built = compile_module_from_src(source.read_text(), "jax_sparse_mla_host", include_dirs=[str(headers)])
        built.bind(exchange, torch.Tensor, torch.nn.Parameter, *driver_functions())
    except Exception as error:  # whatever the toolchain's trouble is, there is a slower way
        warnings.warn(f"sparse_mla_torch: launcher.c was not built, calls take longer: {error}", stacklevel=2)
        return None
    return built


def driver_functions() -> list[int]:
    """The addresses of those that `bind` wants; 0 without a driver, where there are no CUDA tensors either."""
    names = ("cuLaunchKernel", "cuStreamIsCapturing", "cuCtxGetDevice")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [0] * len(names)
    return [ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in names]
