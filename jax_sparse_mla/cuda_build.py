"""Builds the CUDA C++ kernels of `kernels_cuda/`, behind TVM FFI: one binary that XLA and torch call.

It is built where it first runs, which needs nvcc and apache-tvm-ffi and takes some seconds; tvm-ffi caches it on disk.
Where it cannot be built the Triton kernels serve.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import warnings
from pathlib import Path
from typing import Any

__all__ = ["source", "topk_module"]

_PACKAGE = Path(__file__).parent


def source(name: str) -> Path:
    """A kernel's source: an installed package holds `kernels_cuda`, in a checkout it lies beside the package."""
    installed = _PACKAGE / "kernels_cuda" / name
    return installed if installed.is_file() else _PACKAGE.parent / "kernels_cuda" / name


@functools.cache
def topk_module(capability: tuple[int, int]) -> Any | None:
    """The module with the function `topk` of topk.cu, for this compute capability, or None where it cannot be built."""
    if capability < (8, 0) or importlib.util.find_spec("tvm_ffi") is None or shutil.which("nvcc") is None:
        return None
    import tvm_ffi.cpp

    arch = "{}{}".format(*capability)
    try:
        return tvm_ffi.cpp.load(
            f"jax_sparse_mla_topk_sm{arch}",
            cuda_files=str(source("topk.cu")),
            extra_cuda_cflags=["-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"],
        )
    except Exception as error:  # whatever the toolchain's trouble is, Triton serves
        warnings.warn(f"jax_sparse_mla: the CUDA top-k kernel was not built: {error}", stacklevel=2)
        return None
