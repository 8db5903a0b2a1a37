"""Our own kernels for SM90: decode in CUDA C++."""

from __future__ import annotations

from jax_sparse_mla import cuda_build, ffi_tvm
from jax_sparse_mla.attention.hopper_decode import decode
from jax_sparse_mla.attention.route import DeviceInfo

__all__ = ["PHASES", "available", "decode"]

PHASES = ("decode",)


def available() -> bool:
    """Whether the device is an SM90 and its kernel can be loaded; compiles it if need be."""
    on_sm90 = DeviceInfo.current().compute_capability == (9, 0)
    return on_sm90 and ffi_tvm.available() and cuda_build.sparse_decode_module() is not None
