"""The CUDA C++ kernels of `kernels_cuda/`, behind TVM FFI: one binary of each that XLA and torch call.

A binary is taken from the package, where `python -m jax_sparse_mla.launch.build` puts it before a wheel is built, or
nvcc compiles it at the first use, which takes some seconds; `compile_cache` says where it is kept. Where neither
works other kernels serve. Triton's kernels are put into the package by the same command (`launch/triton_carried.py`).
"""

from __future__ import annotations

import argparse
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from jax_sparse_mla.launch import compile_cache, mosaic
from jax_sparse_mla.packages import once, why_not

_PACKAGE = Path(__file__).parents[1]

# By kernel, the architectures for which a wheel carries binaries. Others are compiled where they are used.
KERNELS = {
    "expert_rows": ("80", "90", "100", "120"),
    "expert_tiles": ("90a",),
    "index_logits": ("90a",),
    "sparse_backward": ("90a",),
    "sparse_decode": ("90a",),
    "topk": ("80", "90", "100", "120"),
}


def folder() -> Path:
    """The kernels' sources: an installed package holds `kernels_cuda`, in a checkout it lies beside the package."""
    installed = _PACKAGE / "kernels_cuda"
    return installed if installed.is_dir() else _PACKAGE.parent / "kernels_cuda"


class Binary(NamedTuple):
    """The binary of `kernels_cuda/{kernel}/{kernel}.cu` for an architecture such as "90a"; called, it is loaded."""

    kernel: str
    arch: str

    def __call__(self) -> Any:
        return module(*self)


@once
def module(name: str, arch: str) -> Any | None:
    """The module of `kernels_cuda/{name}/` for an architecture such as "90a", or None, with a warning why."""
    if why_not("tvm_ffi"):
        return None
    import tvm_ffi

    try:
        return compile_cache.load(library(name, arch), lambda path: tvm_ffi.load_module(str(path)))
    except RuntimeError as error:
        warnings.warn(f"jax_sparse_mla: the CUDA kernel {name} cannot be used: {error}", stacklevel=2)
        return None


def library(name: str, arch: str) -> compile_cache.Library:
    """The binary of `kernels_cuda/{name}/` for an architecture."""
    return compile_cache.Library(
        name=f"{name}-sm{arch}",
        sources=tuple(sorted([*(folder() / name).glob("*.cu*"), *folder().glob("*.cuh")])),
        compiler="nvcc",
        flags=("-std=c++20", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"),
        includes=_tvm_headers,
        packages=("apache-tvm-ffi",),
        carried=folder(),
    )


def binder() -> compile_cache.Library:
    """The C++ through which XLA calls the kernels; `launch/tvm.py` loads it."""
    return compile_cache.Library(
        name="tvm_bind",
        sources=tuple(_PACKAGE / "launch" / name for name in ("tvm_bind.cc", "kernel_launch.h", "xla_call.h")),
        compiler="c++",
        flags=("-std=c++17", "-O2"),
        includes=_binder_headers,
        packages=("apache-tvm-ffi", "jaxlib"),
        carried=folder(),
    )


def _binder_headers() -> list[str]:
    """TVM-FFI's headers and XLA's."""
    import jax

    return [*_tvm_headers(), jax.ffi.include_dir()]


def _tvm_headers() -> list[str]:
    """The folders of TVM-FFI's headers."""
    from tvm_ffi import libinfo

    return sorted({libinfo.find_include_path(), libinfo.find_dlpack_include_path()})


def libraries() -> list[compile_cache.Library]:
    """All that a wheel carries: torch's launcher and prefill, what XLA calls the kernels through, and the kernels."""
    from jax_sparse_mla.attention.hopper.prefill import alone  # which launches by this package

    launchers = [entry.load() for entry in entry_points(group="jax_sparse_mla.libraries")]
    kernels = [library(name, arch) for name, archs in KERNELS.items() for arch in archs]
    return [*launchers, binder(), *kernels, *alone.libraries()]


def carried() -> tuple[list[str], list[str]]:
    """The binaries in the package: the libraries loaded from it, and the files of other sources or machines."""
    paths = {compile_cache.carried_path(each): each.name for each in libraries()}
    files = sorted(folder().glob("*.so"))
    return [paths[path] for path in files if path in paths], [path.name for path in files if path not in paths]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_sparse_mla.launch.build",
        description="Compiles the CUDA kernels, and what XLA and torch call them through, into the package, so that a "
        "wheel built from it carries them. It needs nvcc, a C++ compiler, apache-tvm-ffi and torch, and for torch's "
        "prefill jax 0.11.1 or later with its CUDA plugin. Triton, where it is installed, then compiles its kernels of "
        "XLA's programs for SM90.",
    )
    parser.parse_args()

    def made(each: compile_cache.Library) -> Path | str:
        if each.compiler == "mosaic" and (why := mosaic.why_not()):
            return f"{each.name} is left out: {why}"
        for old in folder().glob(f"{each.name}-*.so"):
            old.unlink()
        return compile_cache.compile_to(each, compile_cache.carried_path(each))

    with ThreadPoolExecutor(2) as threads:  # the largest library is several files, which are compiled side by side
        for path in threads.map(made, libraries()):
            print(path, flush=True)
    print(_triton_kernels())


def _triton_kernels() -> Path | str:
    """Compiles Triton's kernels into the package, those of programs that `shapes_alone.served` names."""
    from jax_sparse_mla.launch import triton_call, triton_carried, triton_launch
    from jax_sparse_mla.serving import shapes_alone

    if why := why_not("triton") or (None if triton_call.own_launcher() else "our launcher cannot be used"):
        return f"Triton's kernels are left out: {why}"
    triton_carried.remove()  # tracing begins to compile
    shapes_alone.trace_served()
    return triton_carried.write(triton_launch.begun)


if __name__ == "__main__":
    main()
