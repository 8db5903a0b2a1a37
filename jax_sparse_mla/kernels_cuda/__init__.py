"""CUDA C++ kernels behind TVM FFI: one binary that XLA and torch call, built where it first runs.

Building needs nvcc and apache-tvm-ffi, takes some seconds, and is cached on disk by tvm-ffi. Where it cannot be done
the Triton kernels serve.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import warnings
from pathlib import Path
from typing import Any

__all__ = ["topk_function"]


@functools.cache
def topk_function(capability: tuple[int, int]) -> Any | None:
    """The function `topk` of topk.cu for GPUs of this compute capability, or None where it cannot be built."""
    if capability < (8, 0) or importlib.util.find_spec("tvm_ffi") is None or shutil.which("nvcc") is None:
        return None
    import tvm_ffi.cpp

    arch = "{}{}".format(*capability)
    try:
        module = tvm_ffi.cpp.load_inline(
            f"jax_sparse_mla_topk_sm{arch}",
            cuda_sources=Path(__file__).with_name("topk.cu").read_text(),
            functions=["topk"],
            extra_cuda_cflags=["-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"],
        )
    except Exception as error:  # whatever the toolchain's trouble is, Triton serves
        warnings.warn(f"jax_sparse_mla: the CUDA top-k kernel was not built: {error}", stacklevel=2)
        return None
    return module.topk
