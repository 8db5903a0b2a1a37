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
    said = ""
    for unit in (build.folder() / kernel).glob("*.cu"):
        made = str(folder / f"{unit.stem}.cubin")
        done = subprocess.run([*command, "-o", made, str(unit)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said += done.stderr
    return said
