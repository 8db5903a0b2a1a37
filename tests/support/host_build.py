"""CUDA kernels compiled for the host by g++, with `host_cuda/` instead of CUDA's headers."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_sparse_mla.kernels import build

SOURCES = Path(__file__).parent / "host_cuda"


def compiled_once(source: str, kernel: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`compiled_for_the_host`, by one of xdist's workers for all of them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / f"{source}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / f"{source}.so"
        return ctypes.CDLL(str(library)) if library.exists() else compiled_for_the_host(source, kernel, folder)


def compiled_for_the_host(source: str, kernel: str, folder: Path, changed: Path | None = None) -> ctypes.CDLL:
    """`host_cuda/{source}.cpp`, which includes files of `kernels_cuda/{kernel}/`, or of a copy of it."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    library = folder / f"{source}.so"
    # A jump to another stack is an error to _FORTIFY_SOURCE.
    flags = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare"]
    folders = [f"-I{SOURCES}", f"-I{changed or build.source(kernel).parent}"]
    command = [compiler, *flags, "-w" if changed else "-Wno-parentheses", "-shared", "-fPIC", *folders]
    made = library.with_suffix(".made")
    built = subprocess.run(
        [*command, "-o", made, SOURCES / f"{source}.cpp"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0 and not built.stderr, built.stderr[-3000:]
    made.rename(library)
    return ctypes.CDLL(str(library))
