"""CUDA kernels compiled for the host by g++, with `host_cuda/` instead of CUDA's headers."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jax_sparse_mla.launch import build

SOURCES = Path(__file__).parent / "host_cuda"
GUARD = 0xA5


def compiled_once(
    source: str,
    kernel: str,
    tmp_path_factory: pytest.TempPathFactory,
    *,
    defined: tuple[str, ...] = (),
    watched: bool = False,
) -> ctypes.CDLL:
    """`compiled_for_the_host`, or `compiled_to_be_watched`, by one of xdist's workers for all of them."""
    assert not (watched and defined)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / f"{source}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / _file_name(source, ("watched",) if watched else defined)
        if not library.exists():
            options = {} if watched else {"defined": defined}
            (compiled_to_be_watched if watched else compiled_for_the_host)(source, kernel, folder, **options)
        return ctypes.CDLL(str(library))


def _file_name(source: str, defined: tuple[str, ...]) -> str:
    return "-".join([source, *defined]) + ".so"


def compiled_for_the_host(
    source: str, kernel: str, folder: Path, changed: Path | None = None, *, defined: tuple[str, ...] = ()
) -> Path:
    """The library of `host_cuda/{source}.cpp`, which includes files of `kernels_cuda/{kernel}/`, or of a copy of it;
    with macros `defined`."""
    command = [*_command(kernel, changed, defined), "-shared"]
    return _made(command, [SOURCES / f"{source}.cpp"], folder / _file_name(source, defined))


def compiled_to_be_watched(source: str, kernel: str, folder: Path, changed: Path | None = None) -> Path:
    """The library of `compiled_for_the_host`, where `host_cuda/races.cpp` looks at every load and store: `races_found`
    counts the pairs of places in the code whose accesses of shared memory no barrier orders."""
    command = [*_command(kernel, changed, ("RACES",)), "-c", "-fsanitize=thread"]
    kernels = _made(command, [SOURCES / f"{source}.cpp"], folder / f"{source}-watched.o")
    watching = [*_command(kernel, changed, ("RACES",)), "-O2", "-shared"]
    return _made(watching, [SOURCES / "races.cpp", kernels], folder / _file_name(source, ("watched",)))


def changed_kernels(kernel: str, folder: Path) -> Path:
    """A copy of `kernels_cuda/{kernel}/`, beside what it includes, whose files a test may change."""
    return shutil.copytree(build.folder(), folder / "kernels") / kernel


def replace_once(path: Path, text: str, other: str) -> None:
    whole = path.read_text()
    assert whole.count(text) == 1
    path.write_text(whole.replace(text, other))


def _command(kernel: str, changed: Path | None, defined: tuple[str, ...]) -> list:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    # A jump to another stack is an error to _FORTIFY_SOURCE. Sums are the same on every machine, and each library of a
    # process has variables of its own.
    flags = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fno-gnu-unique"]
    flags += ["-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare", *(f"-D{name}" for name in defined)]
    folders = [f"-I{SOURCES}", f"-I{changed or build.folder() / kernel}"]
    return [compiler, *flags, "-w" if changed else "-Wno-parentheses", "-fPIC", *folders]


def _made(command: list, files: list[Path], result: Path) -> Path:
    made = result.with_suffix(".made")
    built = subprocess.run([*command, "-o", made, *files], capture_output=True, text=True, check=False)
    assert built.returncode == 0 and not built.stderr, built.stderr[-3000:]
    return made.rename(result)


def aligned(x: np.ndarray) -> np.ndarray:
    """The array, or a copy that begins at a multiple of 16 bytes."""
    if x.flags.c_contiguous and x.ctypes.data % 16 == 0:
        return x
    copy = _memory(x.nbytes)[: x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """An array of bytes 0xFF, NaN in floating-point numbers, and the bytes behind it, which are to stay `GUARD`."""
    count = math.prod(shape) * np.dtype(dtype).itemsize
    memory = _memory(count + 4096)
    memory[:count], memory[count:] = 0xFF, GUARD
    return memory[:count].view(dtype).reshape(shape), memory[count:]


def _memory(count: int) -> np.ndarray:
    """So many bytes, from a multiple of 16 on."""
    memory = np.empty(count + 16, np.uint8)
    begin = -memory.ctypes.data % 16
    return memory[begin : begin + count]
