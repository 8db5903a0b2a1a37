"""The CUDA C++ kernels of `kernels_cuda/`, behind TVM FFI: one binary of each that XLA and torch call.

A binary is taken from the package, where `python -m jax_sparse_mla.kernels.build` puts it before a wheel is built; or
it is compiled at the first use, which needs nvcc and takes some seconds, and kept in the user's cache. Its name holds
the host's machine and a digest of the sources, so that it is never another version's, nor an x86-64 host's on a Grace.
Where neither works other kernels serve.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

__all__ = ["folder", "module", "source", "sparse_decode_module", "topk_module"]

_PACKAGE = Path(__file__).parents[1]

# The architectures whose binaries a wheel carries.
_CARRIED = {"sparse_decode": ("90a",), "topk": ("80", "90", "100", "120")}


def folder() -> Path:
    """The kernels' sources: an installed package holds `kernels_cuda`, in a checkout it lies beside the package."""
    installed = _PACKAGE / "kernels_cuda"
    return installed if installed.is_dir() else _PACKAGE.parent / "kernels_cuda"


def source(name: str) -> Path:
    """A kernel's source, `kernels_cuda/{name}/{name}.cu`."""
    return folder() / name / f"{name}.cu"


def topk_module(capability: tuple[int, int]) -> Any | None:
    """The module with the function `topk` of topk.cu, for this compute capability, or None where there is none."""
    return module("topk", "{}{}".format(*capability)) if capability >= (8, 0) else None


def sparse_decode_module() -> Any | None:
    """The module with the function `sparse_decode` of sparse_decode.cu, for SM90, or None where there is none."""
    return module("sparse_decode", "90a")


@functools.cache
def module(name: str, arch: str) -> Any | None:
    """The module of `kernels_cuda/{name}/{name}.cu` for an architecture such as "90a", or None, with a warning why."""
    if importlib.util.find_spec("tvm_ffi") is None:
        return None
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(_binary(name, arch)))
    except (OSError, RuntimeError) as error:
        warnings.warn(f"jax_sparse_mla: the CUDA kernel {name} cannot be used: {error}", stacklevel=2)
        return None


def _binary(name: str, arch: str) -> Path:
    """Where the binary is, compiled if need be. One that the package carries needs no home directory."""
    file = _file_name(name, arch)
    carried = folder() / file
    if carried.is_file():
        return carried
    cached = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jax_sparse_mla" / file
    if not cached.is_file():
        _compile(name, arch, cached)
    return cached


def _file_name(name: str, arch: str) -> str:
    digest = hashlib.sha256()
    for path in sorted([*source(name).parent.glob("*.cu*"), *folder().glob("*.cuh")]):
        digest.update(path.read_bytes())
    return f"{name}-sm{arch}-{platform.machine()}-{digest.hexdigest()[:12]}.so"


def _compile(name: str, arch: str, to: Path) -> None:
    """Raises RuntimeError with what the compiler says."""
    from tvm_ffi import libinfo

    if (nvcc := shutil.which("nvcc")) is None:
        raise RuntimeError("this package carries no binary of it, and nvcc is not on the PATH to compile one")
    to.parent.mkdir(parents=True, exist_ok=True)
    includes = {libinfo.find_include_path(), libinfo.find_dlpack_include_path()}
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        made = Path(scratch) / to.name
        command = [nvcc, "-std=c++20", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-shared"]
        command += ["-Xcompiler", "-fPIC", *(f"-I{path}" for path in sorted(includes))]
        result = subprocess.run([*command, "-o", made, source(name)], capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"nvcc failed: {(result.stderr or result.stdout)[-2000:]}")
        made.replace(to)  # at once: processes that compile it too do no harm


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_sparse_mla.kernels.build",
        description="Compiles the CUDA kernels into the package, so that a wheel built from it carries them.",
    )
    parser.parse_args()
    for name, archs in _CARRIED.items():
        for old in folder().glob(f"{name}-sm*.so"):
            old.unlink()
        for arch in archs:
            path = folder() / _file_name(name, arch)
            _compile(name, arch, path)
            print(path)


if __name__ == "__main__":
    main()
