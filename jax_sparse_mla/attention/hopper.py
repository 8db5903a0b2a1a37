"""Our own kernels for SM90: decode in CUDA C++ (`hopper_decode`), prefill in Pallas Mosaic GPU (`hopper_prefill`)."""

from __future__ import annotations

import importlib.util

from jax_sparse_mla import cuda_build, ffi_tvm
from jax_sparse_mla.attention.hopper_decode import decode
from jax_sparse_mla.attention.hopper_prefill import prefill
from jax_sparse_mla.attention.route import DeviceInfo

__all__ = ["decode", "prefill", "serves"]


def serves(phase: str) -> bool:
    """Whether this process can serve the phase on its device; asked of decode, it builds the kernel if need be."""
    if DeviceInfo.current().compute_capability != (9, 0):
        return False
    if phase == "prefill":
        return importlib.util.find_spec("absl") is not None  # Mosaic GPU imports it in jax 0.10
    return ffi_tvm.available() and cuda_build.sparse_decode_module() is not None
