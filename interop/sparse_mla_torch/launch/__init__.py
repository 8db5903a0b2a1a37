"""Launches of Triton kernels on torch tensors. What is named here imports no torch."""

import sysconfig
from pathlib import Path

from jax_sparse_mla.launch import build, compile_cache

__all__ = ["LIBRARY"]


def _headers() -> list[str]:
    import torch

    return [sysconfig.get_config_var("INCLUDEPY"), str(Path(torch.__file__).with_name("include"))]


# The module of launcher.c. The package may carry it for every Python from 3.11 on.
LIBRARY = compile_cache.Library(
    name="launcher",
    sources=(Path(__file__).with_name("launcher.c"),),
    compiler="c",
    flags=("-O3",),
    includes=_headers,
    packages=("torch",),
    carried=build.folder(),
)
