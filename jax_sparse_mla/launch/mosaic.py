"""Pallas Mosaic GPU kernels for launches without XLA: compiled once, to the device's code, and kept.

`compile_cache` has it done by `python -m jax_sparse_mla.launch.mosaic`, in a process of its own. There the kernel is
lowered on JAX's CPU backend, and Mosaic's compiler, of JAX's CUDA plugin, runs on a driver without a GPU
(`mosaic_cuda.c`). What it loads is the code, and what it launches says how: the threads, the shared memory, and which
array each parameter is. The process that launches the kernel needs neither JAX's plugin nor a backend of JAX.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import struct
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple

from jax_sparse_mla.launch import compile_cache
from jax_sparse_mla.packages import has_cuda_plugin

_DRIVER = compile_cache.Library(
    name="libcuda",
    sources=(Path(__file__).with_name("mosaic_cuda.c"),),
    compiler="c",
    flags=("-O1", "-Wl,-soname,libcuda.so.1"),
)
SOURCES = (Path(__file__), *_DRIVER.sources)
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
_MAGIC = b"jax_sparse_mla.mosaic"  # the end of a file: ELF, what is said of it in JSON, its length in 8 bytes


class Compiled(NamedTuple):
    """A kernel.

    Attributes:
      image: the device's code, an ELF file.
      name: of the function in it.
      threads, shared_bytes: of a block.
      parameters: of each of its parameters the array whose address it is, by its number: inputs, then results.
    """

    image: bytes
    name: str
    threads: int
    shared_bytes: int
    parameters: tuple[int, ...]


def library(kernel: str, variant: str, sources: tuple[Path, ...]) -> compile_cache.Library:
    """The code of a kernel: `compile_cache.load(library, read)`.

    Args:
      kernel: "module:function", of `variant`; it returns the function and the shapes that are to be traced.
      sources: the files that the kernel is made of.
    """
    from jax_sparse_mla.launch.build import folder

    return compile_cache.Library(
        name=f"{kernel.rpartition(':')[2]}-{variant}",
        sources=(*sources, *SOURCES),
        compiler="mosaic",
        flags=(kernel, variant),
        packages=PACKAGES,
        carried=folder(),
    )


def read(path: Path) -> Compiled:
    """The kernel in a file; RuntimeError if there is none."""
    data = path.read_bytes()
    size = int.from_bytes(data[-len(_MAGIC) - 8 : -len(_MAGIC)], "little")
    if not data.endswith(_MAGIC) or not data.startswith(b"\x7fELF") or size > len(data):
        raise RuntimeError(f"{path} holds no kernel")
    end = len(data) - len(_MAGIC) - 8
    said = json.loads(data[end - size : end])
    return Compiled(data[: end - size], **said | {"parameters": tuple(said["parameters"])})


def write(path: Path, compiled: Compiled) -> None:
    said = compiled._asdict()
    image, text = said.pop("image"), json.dumps(said).encode()
    path.write_bytes(image + text + len(text).to_bytes(8, "little") + _MAGIC)


# --- the process that compiles -------------------------------------------------------------------------------------


class _Recorded(ctypes.Structure):
    _fields_ = [
        ("image", ctypes.c_void_p),
        ("name", ctypes.c_char * 256),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("parameters", ctypes.c_uint64 * 64),
    ]


def _lowered(function: Any, shapes: tuple) -> tuple[bytes, int]:
    """Mosaic's module of the one kernel in a function, and how many arrays it takes and returns."""
    import jax

    module = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir()
    calls = []

    def walk(operation):
        for block in (block for region in operation.regions for block in region):
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call":
                    calls.append(inner)
                walk(inner.operation)

    walk(module.operation)
    if len(calls) != 1:
        raise RuntimeError(f"the function has {len(calls)} calls, and must have one kernel alone")
    (call,) = calls
    code = call.attributes["mhlo.backend_config"]["module"].value_bytes
    return code, len(call.operands) + len(call.results)


def _without_torch() -> types.ModuleType:
    """What JAX's function for torch uses of torch. Here it finds neither torch nor a GPU."""
    torch = types.ModuleType("torch")
    stream = types.SimpleNamespace(_as_parameter_=ctypes.c_void_p(None))
    torch.cuda = types.SimpleNamespace(init=lambda: None, default_stream=lambda device: stream)
    return torch


def _compile(function: Any, shapes: tuple, driver: ctypes.CDLL) -> Compiled:
    from jax.experimental.mosaic.gpu import core

    code, count = _lowered(function, shapes)
    sys.modules["torch"] = _without_torch()
    launch, _ = core._compile_as_torch_gpu_kernel(code)
    arrays = [256 * (i + 1) for i in range(count)]
    launch((ctypes.c_void_p * count)(*arrays), None)
    recorded = _Recorded.in_dll(driver, "recorded")
    parameters = recorded.parameters[: recorded.count]
    if not set(parameters) <= set(arrays) or list(recorded.block[1:]) != [1, 1] or list(recorded.grid[1:]) != [1, 1]:
        raise RuntimeError(f"Mosaic launches it in a way that is not known here: {parameters}, {[*recorded.block]}")
    return Compiled(
        image=ctypes.string_at(recorded.image, _elf_bytes(recorded.image)),
        name=recorded.name.decode(),
        threads=recorded.block[0],
        shared_bytes=recorded.shared_bytes,
        parameters=tuple(address // 256 - 1 for address in parameters),
    )


def _elf_bytes(address: int) -> int:
    """The length of an ELF file of 64 bits: the end of its last table, of sections or of segments."""
    header = ctypes.string_at(address, 64)
    segments, sections = struct.unpack_from("<QQ", header, 32)
    segment_bytes, num_segments, section_bytes, num_sections = struct.unpack_from("<4H", header, 54)
    return max(segments + segment_bytes * num_segments, sections + section_bytes * num_sections)


def why_not() -> str | None:
    """Why Mosaic GPU cannot compile here; None if it can."""
    import jax

    if jax.__version_info__ < (0, 11, 1):
        return f"it takes jax 0.11.1 or later, this is {jax.__version__}"
    if not has_cuda_plugin():
        return "JAX's CUDA plugin is not installed: pip install 'jax[cuda13]'"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_sparse_mla.launch.mosaic")
    parser.add_argument("-o", dest="path", type=Path, required=True)
    parser.add_argument("source", help="mosaic_cuda.c")
    parser.add_argument("kernel")
    parser.add_argument("variant")
    arguments = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as scratch:
        # First of all, so that everything that asks for libcuda.so.1 gets this one.
        path = compile_cache.compile_to(_DRIVER, Path(scratch) / "libcuda.so.1")
        driver = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import jax

    jax.config.update("jax_platforms", "cpu")
    module, _, function = arguments.kernel.partition(":")
    write(arguments.path, _compile(*getattr(importlib.import_module(module), function)(arguments.variant), driver))
    sys.stdout.flush()
    os._exit(0)  # what the plugin would do at the end, it would do on a driver that is none


if __name__ == "__main__":
    main()
