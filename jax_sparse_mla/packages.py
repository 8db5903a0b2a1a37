"""Optional packages: absent ones are passed over quietly, one that is there and does not import is warned of once.

Here is also what is done and said once in a process.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def once(function: F) -> F:
    """`functools.cache` for threads: one computes a value, and others that want the same wait for it."""
    cached, locks = functools.cache(function), collections.defaultdict(threading.Lock)

    @functools.wraps(function)
    def call(*key):
        with locks[key]:
            return cached(*key)

    call.cache_info, call.cache_clear = cached.cache_info, cached.cache_clear
    return call


def is_found(name: str) -> bool:
    """Whether there is a package of this import name; it is not imported."""
    return importlib.util.find_spec(name) is not None


def has_cuda_plugin() -> bool:
    """Whether JAX's plug-in for NVIDIA GPUs is installed; nothing is imported."""
    found = importlib.util.find_spec("jax_plugins")
    folders = found.submodule_search_locations if found else ()
    return any(os.path.isdir(os.path.join(folder, name)) for folder in folders for name in ("xla_cuda12", "xla_cuda13"))


@once
def why_not(name: str) -> str | None:
    """Why a package cannot be used, or None; imports it. One that is found and fails is warned of, once in a process.

    "triton is not installed", "triton does not import: OSError: …".
    """
    if not is_found(name):
        return f"{name} is not installed"
    cache_dir = os.environ.get("TRITON_CACHE_DIR") or None  # importing jax-triton empties it
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken package raises anything: of a missing library, another version, its own
        why = f"{name} does not import: {type(error).__name__}: {error}"
        warn_once(f"{why}. It is installed and not used: mend or remove it")
        return why
    finally:
        if cache_dir is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
    return None


def give_triton_a_cache() -> None:
    """Before Triton compiles: importing jax-triton, as tokamax does too, leaves TRITON_CACHE_DIR empty, and then Triton
    raises. Without the variable it has its own folder, which TRITON_HOME names."""
    if "jax_triton" in sys.modules and os.environ.get("TRITON_CACHE_DIR") == "":  # the quick look first: launches ask
        os.environ.pop("TRITON_CACHE_DIR", None)


@functools.cache
def warn_once(message: str) -> None:
    """Warns, once in a process: of what keeps something that is there from serving, and of the next step."""
    warnings.warn(f"jax_sparse_mla: {message}", stacklevel=3)


def version(distribution: str) -> str | None:
    """The installed version of a distribution (its name on a package index, not of its module), or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
