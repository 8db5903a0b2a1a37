"""Compiled steps on disk: a later process neither traces nor compiles what an earlier one did.

JAX's own cache is asked by a program's text, so a process traces and lowers first, which takes longer than loading.
Here a digest of all that a step is made from names it: the sources of this package, the step's static arguments and the
shapes of its arrays, the device, the versions and settings that choose kernels. Files lie in the folder of JAX's cache,
`jax_compilation_cache_dir`; without one nothing is kept. Loading one runs code: only those are loaded that nobody but
the user can have written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import pickle
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.serve import calls_of
from jax_sparse_mla.launch import tvm
from jax_sparse_mla.launch.compile_cache import open_to_others
from jax_sparse_mla.launch.transforms import ENGINE_PROGRAM
from jax_sparse_mla.packages import version
from jax_sparse_mla.serving.native import building, expected, usable

_PACKAGE = Path(__file__).parents[1]
_SETTINGS = re.compile("JAX_SPARSE_MLA|XLA_|TRITON_|NVIDIA_TF32")  # environment variables
_NO_PART = re.compile("cache|log|dump|coordinat|timeout|traceback")  # settings of JAX that change no program

# What a program's text names, and how a process that does not trace it makes it ready for XLA.
_RUNTIMES = {
    "mosaic_gpu": lambda: importlib.import_module("jax.experimental.mosaic.gpu"),
    "lapack": lambda: importlib.import_module("jaxlib.lapack").prepare_lapack_call("trsm", np.float32),
}

Step = tuple[Any, frozenset[tuple[str, str]]]  # the executable, and the attention that it calls


def signature(arguments: Sequence[Any]) -> tuple:
    """What a program is made for: the pytree of its arguments, and the shapes and dtypes of the arrays."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def obtain(
    made_from: Sequence[Any],
    devices: Sequence[jax.Device],
    lower: Callable[[], jax.stages.Lowered],
    options: dict[str, Any],
) -> Step:
    """A program, from disk or compiled and kept.

    Args:
      made_from, devices: as of `path_of`.
      lower: traces it, where it is not on disk; it may call kernels that other processes do not have.
      options: XLA's.
    """
    path = path_of(made_from, devices)
    if (step := load(path, devices)) is None:
        with ENGINE_PROGRAM(True):
            lowered = lower()
        step = compile(path, lowered, options)
    return step


def path_of(made_from: Sequence[Any], devices: Sequence[jax.Device]) -> Path | None:
    """Where a program for these devices is kept, whether it is there or not; None where none is.

    Args:
      made_from: what the program is made from, beside this package and the machine; told apart by `repr`.
      devices: those that run it.
    """
    folder, parts = jax.config.jax_compilation_cache_dir, repr(made_from)
    if not folder or " at 0x" in parts or jax.process_count() > 1:  # an address is another one in each process
        return None
    machine = [(device.id, device.device_kind, device.client.platform_version) for device in devices]
    if devices[0].platform == "cpu":  # it runs on processors with the same instructions
        with contextlib.suppress(OSError):
            machine += [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    settings = {k: getattr(jax.config, k, value) for k, value in jax.config.values.items() if not _NO_PART.search(k)}
    variables = sorted(item for item in os.environ.items() if _SETTINGS.match(item[0]))
    whole = parts, machine, _sources(), _versions(), expected(), sorted(settings.items()), variables
    return Path(folder) / f"step-{hashlib.sha256(repr(whole).encode()).hexdigest()[:32]}"


def load(path: Path | None, devices: Sequence[jax.Device]) -> Step | None:
    """The program that `compile` kept, or None."""
    if (saving := _saving.get(path)) is not None:
        saving.join()
    if path is None or not path.is_file() or open_to_others(path.lstat()):
        return None
    try:
        executable, trees, routes, bound, runtimes = pickle.loads(zlib.decompress(path.read_bytes()))
        tvm.restore(bound)
        for name in runtimes:
            _RUNTIMES[name]()
        call = serialize_executable.deserialize_and_load(executable, *trees, execution_devices=devices)
    except Exception:  # cut short, or of a jaxlib that says so late: it is compiled anew
        return None
    return call, routes


def compile(path: Path | None, lowered: jax.stages.Lowered, options: dict[str, Any] | None = None) -> Step:
    """Compiles a program, and keeps it where that can be done: in a thread where kernels of other programs are being
    built, for which this one does not wait."""
    hits = _of_thread.__dict__.get("hits", 0)
    compiled = lowered.compile(options)
    step = compiled, calls_of(lowered)
    was_loaded = _of_thread.__dict__.get("hits", 0) > hits
    # What a CPU's XLA has loaded, as from JAX's cache, it serialises without its functions.
    if path is None or (was_loaded and jax.default_backend() == "cpu"):
        return step
    if building():
        _saving[path] = threading.Thread(target=_save, args=(path, lowered, step), daemon=True)  # no exit waits for it
        _saving[path].start()
    else:
        _save(path, lowered, step)
    return step


def _save(path: Path, lowered: jax.stages.Lowered, step: Step) -> None:
    if usable() != expected():  # it may call other kernels than its name says
        return
    # A program with constants of its own cannot be kept, nor one that calls what another process cannot name.
    with contextlib.suppress(OSError, RuntimeError, ValueError, pickle.PicklingError, AttributeError, TypeError):
        executable, *trees = serialize_executable.serialize(step[0])
        text = lowered.as_text()
        runtimes = [name for name in _RUNTIMES if name in text]
        whole = pickle.dumps((executable, trees, step[1], tvm.bound_in(text), runtimes))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(zlib.compress(whole, 1))
        os.replace(file.name, path)


def _count_hits(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _of_thread.hits = _of_thread.__dict__.get("hits", 0) + 1


_saving: dict[Path, threading.Thread] = {}
_of_thread = threading.local()  # `hits`: programs that JAX's cache has given it
jax.monitoring.register_event_listener(_count_hits)


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(bytes(file.relative_to(_PACKAGE)) + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _versions() -> list[tuple[str, str | None]]:
    needed = [name for backend in BACKENDS.values() for need in backend.needs for name in need.distributions]
    names = {"jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "triton", "jax-triton", *needed}
    return [(name, version(name)) for name in sorted(names)]
