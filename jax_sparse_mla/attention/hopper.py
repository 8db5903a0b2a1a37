"""Our own kernels for SM90: decode in CUDA C++ (`hopper_decode`), prefill in Pallas Mosaic GPU (`hopper_prefill`)."""

from __future__ import annotations

import importlib.util

from jax_sparse_mla import cuda_build, ffi_tvm
from jax_sparse_mla.attention.hopper_decode import decode
from jax_sparse_mla.attention.hopper_prefill import prefill
from jax_sparse_mla.attention.route import DeviceInfo

__all__ = ["decode", "phases", "prefill"]


def phases() -> frozenset[str]:
    """The phases that this process can serve on its device; builds decode's kernel if need be."""
    if DeviceInfo.current().compute_capability != (9, 0):
        return frozenset()
    served = set()
    if ffi_tvm.available() and cuda_build.sparse_decode_module() is not None:
        served.add("decode")
    if importlib.util.find_spec("absl") is not None:  # Mosaic GPU imports it in jax 0.10
        served.add("prefill")
    return frozenset(served)
