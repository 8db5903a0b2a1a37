"""Our own kernels for SM90: decode in CUDA C++ (`decode`), prefill in Pallas Mosaic GPU (`prefill`)."""

from __future__ import annotations

import importlib.util

from jax_sparse_mla.attention.backends.hopper.decode import decode
from jax_sparse_mla.attention.backends.hopper.prefill import prefill
from jax_sparse_mla.attention.route import DeviceInfo
from jax_sparse_mla.kernels import build
from jax_sparse_mla.xla import tvm

__all__ = ["decode", "prefill", "serves"]


def serves(phase: str) -> bool:
    """Whether this process can serve the phase on its device; asked of decode, it builds the kernel if need be."""
    if DeviceInfo.current().compute_capability != (9, 0):
        return False
    if phase == "prefill":
        return importlib.util.find_spec("absl") is not None  # Mosaic GPU imports it in jax 0.10
    return tvm.available() and build.sparse_decode_module() is not None
