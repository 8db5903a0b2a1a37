"""Launches of Triton kernels inside XLA programs by a few lines of our own C++, `kernel_launch.h`.

Triton begins to compile a kernel for the GPU when the call is traced, in a thread beside those of the program's other
kernels, unless the package carries it (`triton_carried.py`), and lowering waits for it. The program then calls a
function that holds the machine code and the numbers, and takes XLA's buffers. jaxlib's launcher, which jax-triton
emits, looks a kernel up by its whole text before every execution, of recorded calls too: for a step of 43 layers that
takes the host longer than all else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import numpy as np
from jax.interpreters import mlir

from jax_sparse_mla.launch import triton_carried, triton_versions, tvm
from jax_sparse_mla.launch.describe import Launch
from jax_sparse_mla.packages import give_triton_a_cache, once

DRIVER = "libcuda.so.1"

_POINTERS = {
    "bfloat16": "*bf16",
    "bool": "*i1",
    "float8_e4m3fn": "*fp8e4nv",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "uint8": "*u8",
}
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


class Compiled(NamedTuple):
    """A kernel's machine code, and its SHA-256."""

    image: bytes
    digest: str
    name: str
    threads: int
    shared_bytes: int


def call(
    launch: Launch,
    inputs: Sequence[jax.Array | int | np.float32 | None],
    outputs: Sequence[jax.ShapeDtypeStruct | None],
    aliases: Mapping[int, int],
    zeroed: Sequence[int],
    capability: tuple[int, int],
) -> tuple[jax.Array | None, ...]:
    """The outputs of a launch, in the program that is being traced.

    Args:
      launch: its kernel, grid and constants are read.
      inputs: arrays and numbers, the launch's scalars behind them; None where the kernel reads nothing.
      outputs: the arrays that it writes; None where it writes nothing.
      aliases: by output, the input whose buffer it has; both are indices into these two lists.
      zeroed: outputs that the kernel expects zeros in.
      capability: compute capability of the GPU.
    """
    kernel, constants = launch.kernel, launch.constants
    names = (name for name in kernel.arg_names if name not in constants)
    arguments = dict(zip(names, (*inputs, *outputs), strict=True))
    constants = dict(constants) | {name: None for name, x in arguments.items() if x is None}
    types = {name: _type(x) for name, x in arguments.items() if x is not None}
    options = {name: constants.pop(name) for name in list(constants) if name not in kernel.arg_names}
    options |= triton_versions.OPTIONS
    operands = [x for x in inputs if isinstance(x, jax.Array)]
    results = [x for x in outputs if x is not None]
    buffers = iter(range(len(operands) + len(results)))
    parameters = []
    for name, kind in types.items():
        parameters += (next(buffers), 0) if kind.startswith("*") else (-1, _bytes(kind, arguments[name]))
    parameters += (-1, 0) * triton_versions.SCRATCH
    operand = {i: n for n, i in enumerate(i for i, x in enumerate(inputs) if isinstance(x, jax.Array))}
    result = {i: n for n, i in enumerate(i for i, x in enumerate(outputs) if x is not None)}
    compiled = kernel, _items(types), _items(constants), _items(options), capability
    _begin(compiled)
    zeroed = tuple(len(operands) + result[i] for i in zeroed)
    aliases = tuple((operand[source], result[i]) for i, source in aliases.items())
    written = iter(launch_compiled(compiled, (*launch.grid, 1, 1)[:3], parameters, operands, results, zeroed, aliases))
    return tuple(None if x is None else next(written) for x in outputs)


def launch_compiled(
    kernel: Compiled | tuple,
    grid: tuple[int, int, int],
    parameters: Sequence[int],
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    zeroed: tuple[int, ...] = (),
    aliases: tuple[tuple[int, int], ...] = (),
) -> Sequence[jax.Array]:
    """The results of a kernel that is compiled, or of one of Triton's that lowering has `compile_kernel` compile.

    Args:
      parameters: for each of the kernel's the number of a buffer, operands before results, and 0; or −1 and the 8 bytes
        of a number.
      zeroed: numbers of buffers that are set to zero first.
      aliases: an operand and the result that has its buffer.
    """
    numbers = {"parameters": tuple(parameters), "zeroed": zeroed, "aliases": aliases}
    return _launch_p.bind(*operands, kernel=kernel, grid=grid, results=tuple(results), **numbers)


_launch_p = jex.core.Primitive("triton_launch")
_launch_p.multiple_results = True
_launch_p.def_impl(lambda *operands, **params: jax.jit(functools.partial(_launch_p.bind, **params))(*operands))


@_launch_p.def_abstract_eval
def _abstract(*operands: Any, results: tuple, **params: Any) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]


def _lower(ctx: Any, *operands: Any, kernel: tuple, grid, parameters, zeroed, aliases, results) -> Sequence[Any]:
    compiled = kernel if isinstance(kernel, Compiled) else compile_kernel(*kernel)
    launch = (*grid, compiled.threads, compiled.shared_bytes), parameters, zeroed
    target = tvm.target(compiled.name, (compiled.digest, *launch), _bind, compiled, *launch)
    return jax.ffi.ffi_lowering(target.name, operand_output_aliases=dict(aliases))(ctx, *operands, key=target.key)


for _platform in ("cuda", "cpu"):  # on a CPU, for the test's own driver
    mlir.register_lowering(_launch_p, _lower, platform=_platform)


_threads = ThreadPoolExecutor(os.cpu_count(), "triton")
begun: set[tuple] = set()  # what `compile_kernel` is asked for
# Triton parses a kernel's source where it compiles it, and where it is hashed. Python 3.11 before 3.11.8 fails at times
# where two threads parse at once (python/cpython#106905): there kernels are compiled one after the other.
_parsing = threading.RLock() if sys.version_info < (3, 11, 8) else contextlib.nullcontext()


def _begin(kernel: tuple) -> None:
    """Compiles in a thread, once; lowering meets its errors."""
    with _parsing:
        is_new = kernel not in begun
        begun.add(kernel)
    if is_new:
        _threads.submit(compile_kernel, *kernel)


@once
def compile_kernel(
    kernel: Any, types: tuple, constants: tuple, options: tuple, capability: tuple[int, int]
) -> Compiled:
    """The machine code for parameters of these types; pointers are at multiples of 16 bytes, as XLA's are.

    It is the carried one, or Triton compiles it.

    Raises:
      RuntimeError: a kernel that asks for memory of its own or for thread block clusters, or a cache folder that cannot
        be written.
    """
    if carried := triton_carried.load(kernel, types, constants, options, capability):
        image, *said = carried
        return Compiled(image, hashlib.sha256(image).hexdigest(), *said)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    positions, constants = {name: i for i, name in enumerate(kernel.arg_names)}, dict(constants)
    signature = {name: dict(types).get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(positions[name],): [["tt.divisibility", 16]] for name, kind in types if kind.startswith("*")}
    values = {(positions[name],): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    give_triton_a_cache()
    try:
        with _parsing:
            made = triton.compile(source, target=target, options=dict(options))
    except OSError as error:
        raise RuntimeError(
            f"Triton cannot keep what it compiles ({error}): set TRITON_CACHE_DIR to a folder"
        ) from error
    metadata = made.metadata
    if triton_versions.takes_more(metadata):
        raise RuntimeError(f"{metadata.name} needs scratch memory or a cluster, which kernel_launch.h does not give")
    image = made.asm["cubin"]
    digest = hashlib.sha256(image).hexdigest()
    return Compiled(image, digest, metadata.name, 32 * metadata.num_warps, metadata.shared)


def _bind(compiled: Compiled, shape: tuple, parameters: tuple, zeroed: tuple) -> Any:
    """The function of XLA's buffers that launches the kernel."""
    name, shape, parameters = compiled.name, list(shape), list(parameters)
    return tvm.binder().bind_kernel(compiled.image, name, shape, parameters, list(zeroed), DRIVER)


def _type(x: Any) -> str:
    """As Triton's signatures have it."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return _POINTERS[x.dtype.name]
    if isinstance(x, (float, np.floating)):
        return "fp32"
    return "i32" if -(2**31) <= x < 2**31 else "i64"


def _bytes(kind: str, number: float) -> int:
    """The bytes of a number, as an int of 8 bytes."""
    return int.from_bytes(struct.pack(_FORMATS[kind], number).ljust(8, b"\0"), "little", signed=True)


def _items(mapping: Mapping[str, Any]) -> tuple:
    return tuple(mapping.items())
