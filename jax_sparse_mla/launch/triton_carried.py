"""Compiled kernels of Triton's that the package carries, for XLA's programs: `triton-{version}.zip` beside the CUDA
kernels' binaries, where `python -m jax_sparse_mla.launch.build` puts them.

To read one takes no compiler. Its name is a digest of all that its machine code is made from, so that nothing of
another source, or for another GPU, is found. A damaged file is left aside, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_sparse_mla.packages import once, warn_once

_DAMAGED = (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def load(*kernel: Any) -> list[Any] | None:
    """A kernel's machine code and what `write` has said of it; None if the package does not carry it.

    Args:
      kernel: as `triton_launch.compile_kernel` takes it.
    """
    archive = _opened(path := _path())
    try:
        if archive is None or (name := _name(*kernel)) not in archive.NameToInfo:
            return None
        said, _, image = archive.read(name).partition(b"\n")  # its checksum is compared
        return [image, *json.loads(said)]
    except _DAMAGED as error:
        _warn(path, error)
        return None


def write(kernels: Iterable[tuple]) -> Path:
    """Compiles kernels and writes all of them, and no others, for the installed Triton. Returns the path."""
    from jax_sparse_mla.launch.triton_launch import compile_kernel

    made = {_name(*kernel): compile_kernel(*kernel) for kernel in kernels}
    path = _path()
    with zipfile.ZipFile(scratch := path.with_suffix(".new"), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, compiled in sorted(made.items()):
            image, _, *said = compiled
            archive.writestr(zipfile.ZipInfo(name), json.dumps(said).encode() + b"\n" + image, zipfile.ZIP_DEFLATED)
    os.replace(scratch, path)
    _opened.cache_clear()
    return path


def remove() -> None:
    """Removes the installed Triton's: what was compiled by an earlier version of this package is not found any more."""
    _path().unlink(missing_ok=True)
    _opened.cache_clear()


def counts() -> dict[str, int]:
    """By the version of Triton, how many kernels the package carries."""
    from jax_sparse_mla.launch import build

    files = {path.stem.removeprefix("triton-"): _opened(path) for path in sorted(build.folder().glob("triton-*.zip"))}
    return {version: len(archive.NameToInfo) for version, archive in files.items() if archive}


def _path() -> Path:
    import triton

    from jax_sparse_mla.launch import build  # not above: `python -m` warns of a module that its package has imported

    return build.folder() / f"triton-{triton.__version__}.zip"


def _name(kernel: Any, types: tuple, constants: tuple, options: tuple, capability: tuple[int, int]) -> str:
    """The kernel's name and a digest: of its sources, what it is compiled for, and variables that Triton reads."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    variables = sorted(get_cache_invalidating_env_vars().items())
    parts = kernel.cache_key, types, constants, options, capability, variables
    return f"{kernel.__name__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


@once
def _opened(path: Path) -> zipfile.ZipFile | None:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        return None
    except _DAMAGED as error:
        _warn(path, error)
        return None


def _warn(path: Path, error: Exception) -> None:
    warn_once(f"{path} is damaged ({error}): Triton compiles its kernels anew")
