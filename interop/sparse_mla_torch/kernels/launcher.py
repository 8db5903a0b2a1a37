"""`launcher.c`, which does what is too slow in Python for a call of a few microseconds; compiled at the first use.

It needs what Triton needs here anyway (a C compiler, Python's headers), and a torch with DLPack's exchange functions;
`jax_sparse_mla.native` compiles and keeps it.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
import triton

from jax_sparse_mla import native

# Versions whose compiled kernels take the parameters that `launch.py` passes. With others, Triton launches.
_KNOWN_TRITON = ("3.6",)

_NAME = "sparse_mla_torch_launcher"  # of the module, as in launcher.c


def _headers() -> list[str]:
    return [sysconfig.get_config_var("INCLUDEPY"), str(Path(torch.__file__).with_name("include"))]


_LIBRARY = native.Library(
    name="launcher",
    sources=(Path(__file__).with_name("launcher.c"),),
    compiler="c",
    flags=("-O3",),
    includes=_headers,
    packages=("torch",),
)


@functools.cache
def module() -> Any | None:
    """The module, whose launches need a driver; None where it cannot be built."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or not triton.__version__.startswith(_KNOWN_TRITON):
        return None
    try:
        built = native.load(_LIBRARY, native.python_extension(_NAME))
        built.bind(exchange, torch.Tensor, torch.nn.Parameter, *driver_functions())
    except Exception as error:  # whatever the toolchain's trouble is, there is a slower way
        warnings.warn(f"sparse_mla_torch: launcher.c is not used, calls take longer: {error}", stacklevel=2)
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
