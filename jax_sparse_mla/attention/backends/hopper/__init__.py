"""Our own kernels for SM90: decode in CUDA C++ (`decode`), prefill in Pallas Mosaic GPU (`prefill`)."""

from __future__ import annotations

from jax_sparse_mla.attention.backends.hopper.decode import decode
from jax_sparse_mla.attention.backends.hopper.prefill import prefill
from jax_sparse_mla.launch import build

__all__ = ["decode", "prefill", "unready"]


def unready(phase: str, framework: str) -> str | None:
    """Why a phase cannot be served here although its packages are installed; for decode it builds the kernel."""
    if phase == "decode" and build.sparse_decode_module() is None:
        return "its CUDA kernel cannot be used here: a warning says why"
    return None
