"""CUDA kernels compiled for the host by g++, with `host_cuda/` instead of CUDA's headers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_sparse_mla.kernels import build

SOURCES = Path(__file__).parent / "host_cuda"


def compiled_for_the_host(source: str, kernel: str, folder: Path, kernels: Path | None = None) -> ctypes.CDLL:
    """`host_cuda/{source}.cpp`, which includes files of `kernels_cuda/{kernel}/`, or of another folder's `kernel`."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    library = folder / f"{source}.so"
    # A jump to another stack is an error to _FORTIFY_SOURCE.
    flags = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare"]
    folders = [f"-I{SOURCES}", f"-I{kernels / kernel if kernels else build.source(kernel).parent}"]
    command = [compiler, *flags, "-shared", "-fPIC", *folders, "-o", library, SOURCES / f"{source}.cpp"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and not built.stderr, built.stderr[-3000:]
    return ctypes.CDLL(str(library))
