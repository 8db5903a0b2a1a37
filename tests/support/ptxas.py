"""What ptxas says of the CUDA kernels, compiled for SM90 without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from jax_sparse_mla.launch import build


def said_of(kernel: str, folder: Path) -> str:
    """Of `kernels_cuda/{kernel}/`, with the flags of its library: registers, spills and what it warns of."""
    pytest.importorskip("tvm_ffi")
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    library = build.library(kernel, "90a")
    command = ["nvcc", *library.flags, *(f"-I{x}" for x in library.includes()), "-cubin", "-Xptxas", "-v"]
    command += ["-o", str(folder / f"{kernel}.cubin"), str(build.source(kernel))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr
