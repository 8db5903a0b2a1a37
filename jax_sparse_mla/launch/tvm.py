"""XLA custom calls into functions of TVM-FFI modules, which write into the buffers they are given.

Nothing here imports tvm_ffi until a call is traced. Our C++ (`tvm_bind.cc`) binds each function to its argument list
and calls it from XLA, so that no Python runs with the kernel. `compile_cache` has it from the package, or from the
machine's C++ compiler. One handler a platform serves all targets, and an attribute says which function it calls.
jax-tvm-ffi has a handler for each function and 1,024 of them in a process, which eight programs of a model with 43
layers use up.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_sparse_mla.launch import compile_cache
from jax_sparse_mla.packages import once


class Bound(NamedTuple):
    """The function `bind(*arguments)` of XLA's buffers on a platform, "cpu" or "gpu"."""

    bind: Callable[..., Any]
    arguments: tuple
    platform: str


_lock = threading.Lock()
_targets: dict[str, Bound] = {}
_registered: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One of a custom call's buffers as an argument: the operands in order, then the results.

    Attributes:
      index: which buffer.
      rows, row_bytes: if not 0, the buffer is uint8 `[pages, page_bytes]` and the function sees it as `[pages, rows,
        row_bytes]`, with the page's padding between two pages.
      first, pages: if `pages` is not 0, the function sees so many rows of the buffer's first axis, from `first` on.
    """

    index: int
    rows: int = 0
    row_bytes: int = 0
    first: int = 0
    pages: int = 0


def pages_of(cache: Any, index: int, rows: int = 0, row_bytes: int = 0) -> Buffer:
    """The pages of a cache, a view's among those of other layers (`PagedKV`), whose array is the buffer `index`."""
    if cache.num_layers == 1:
        return Buffer(index, rows, row_bytes)
    return Buffer(index, rows, row_bytes, cache.first_page, cache.num_pages)


def call(
    module: Callable[[], Any],
    function: str,
    arguments: Sequence[Buffer | bool | int | float | str | None],
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
) -> tuple[jax.Array, ...]:
    """Calls `function` of a TVM-FFI module from the program being traced.

    The call has no batching rule and no gradient. It may be captured into a CUDA graph, so the function must only
    launch kernels, and fill memory, on the stream that it is given; results start as whatever their memory held.

    Args:
      module: loads the module, such as a `build.Binary`; called once for each function and list of arguments.
      function: the function's name in the module.
      arguments: its arguments in order: a `Buffer`, or a constant.
      results: the arrays that it writes, scratch included.
      operands: the arrays that it reads.
    """
    arguments = tuple(arguments)
    origin = tuple(module) if isinstance(module, tuple) else (module.__module__, module.__qualname__)
    meaning = *origin, arguments
    name, key = target(function, meaning, _bound, module, function, arguments)
    return tuple(jax.ffi.ffi_call(name, tuple(results))(*operands, key=key))


class Target(NamedTuple):
    """The name of an XLA custom call, and its attribute `key`."""

    name: str
    key: np.int64


def target(what: str, meaning: tuple, bind: Callable[..., Any], *bound: Any) -> Target:
    """The target that calls `bind(*bound)`, a function of XLA's buffers.

    The name is made of `what` and of `meaning`, which says what is bound, since XLA keeps programs on disk by their
    text: another process may run this one's, and a name must mean the same in both.
    """
    return _target(what, meaning, bind, bound, "gpu" if jax.default_backend() == "gpu" else "cpu")


@functools.cache
def _target(what: str, meaning: tuple, bind: Callable[..., Any], bound: tuple, platform: str) -> Target:
    bound_to, digest = Bound(bind, bound, platform), hashlib.sha256(repr((meaning, platform)).encode()).hexdigest()[:16]
    first = name = f"jax_sparse_mla.{what}.{digest}"
    with _lock:
        for number in itertools.count(2):
            if _targets.setdefault(name, bound_to) == bound_to:
                break
            name = f"{first}.{number}"  # two modules of one name
        return Target(name, _register(name, bound_to))


def _register(name: str, to: Bound) -> np.int64:
    key = int.from_bytes(hashlib.sha256(f"{name} {to.platform}".encode()).digest()[:8], "little", signed=True)
    if name not in _registered:
        binder().add(key, to.bind(*to.arguments))
        handler = jax.ffi.pycapsule(binder().handler(to.platform == "gpu"))
        jax.ffi.register_ffi_target(name, handler, platform="CUDA" if to.platform == "gpu" else "cpu")
        _registered.add(name)
    return np.int64(key)


def bound_in(text: str) -> dict[str, Bound]:
    """What a lowered program calls, by name; for `restore` in another process."""
    return {name: to for name in re.findall(r"@(jax_sparse_mla\.[\w.]+)", text) if (to := _targets.get(name))}


def restore(bound: dict[str, Bound]) -> None:
    """Makes the calls of a program that another process has lowered.

    Raises:
      ValueError: a name means something else in this process.
    """
    with _lock:
        for name, to in bound.items():
            if _targets.setdefault(name, to) != to:
                raise ValueError(f"{name} is another call in this process")
            _register(name, to)


def _bound(module: Callable[[], Any], function: str, arguments: tuple) -> Any:
    """A module's function with its arguments, see `call`."""
    values = [list(dataclasses.astuple(a)) if isinstance(a, Buffer) else a for a in arguments]
    return binder().bind(module()[function], values)


@once
def binder() -> Any:
    """The module of `tvm_bind.cc`: `bind`, `bind_kernel`; `add` and `handler`, which call what they made from XLA."""
    import tvm_ffi

    from jax_sparse_mla.launch import build  # not above: `python -m` warns of a module that its package has imported

    def opened(path: Path) -> Any:
        module = tvm_ffi.load_module(str(path))
        # XLA refuses a handler that was compiled against the headers of a newer jaxlib than it runs with.
        probe = f"jax_sparse_mla.probe.{path.stem}"
        try:
            jax.ffi.register_ffi_target(probe, jax.ffi.pycapsule(module.handler(False)), platform="cpu")
        except Exception as error:
            raise RuntimeError(f"XLA does not take the handlers of {path.name}: {error}") from error
        return module

    return compile_cache.load(build.binder(), opened)
