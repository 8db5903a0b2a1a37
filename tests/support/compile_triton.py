"""Compiles Triton kernels without a GPU, as the launchers do; what the `compile_*` scripts share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jax_sparse_mla.launch.describe import Device, Launch

_POINTERS = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "uint8": "*u8"}

OPTIONS = "num_warps", "num_stages", "maxnreg"  # Triton's, among a kernel's constants
WHOLE = 90  # for this capability every case is compiled


def compile_kernel(kernel, pointers, constants, capability, **options):
    """Pointers are aligned to 16 bytes; other run-time arguments are int32, unless `pointers` says otherwise."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: pointers.get(name, "i32") for name in names} | dict.fromkeys(constants, "constexpr")
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled(cases: Callable[[int], Iterable[tuple]]) -> Iterator[tuple]:
    """(capability, name, compiled kernel) for the capabilities of the command line.

    `cases` gives (name, kernel, argument types, constants with num_warps) for a capability. SM90 gets all of them. The
    others get the first case of each kernel, and each case whose types or constants differ from SM90's: the rest is
    the same code again.
    """
    usual = {name: (types, constants) for name, _, types, constants in cases(WHOLE)}
    for capability in map(int, sys.argv[1].split(",")):
        seen = set()
        for name, kernel, types, constants in cases(capability):
            if capability == WHOLE or kernel not in seen or usual[name] != (types, constants):
                seen.add(kernel)
                constants = dict(constants)
                options = {name: constants.pop(name) for name in OPTIONS if name in constants}
                yield capability, name, compile_kernel(kernel, types, constants, capability, **options)


def facts(cases: Callable[[int], Iterable[tuple]], **of: Callable[[object], object]) -> None:
    """Prints a JSON list: of each compiled kernel its capability, name, shared memory, and what `of` finds."""
    found = []
    for capability, name, kernel in compiled(cases):
        assert kernel.asm["cubin"], name
        fact = {"capability": capability, "kernel": name, "shared": kernel.metadata.shared}
        found.append(fact | {key: find(kernel) for key, find in of.items()})
    print(json.dumps(found))


def in_ptx(text: str) -> Callable[[object], bool]:
    return lambda kernel: text in kernel.asm["ptx"]


class Array(NamedTuple):
    """What a launch's description reads of an array."""

    shape: tuple[int, ...]
    dtype: str = "float32"


class Recorder:
    """An executor that runs nothing: `cases` are its launches, for `compile_kernel`."""

    def __init__(self, capability: int):
        self.device, self.cases = Device(divmod(capability, 10), 132), []

    def __call__(self, launch: Launch, inputs: Any, out: Any = None) -> tuple[Array | None, ...]:
        results = tuple(None if x is None else Array(tuple(x.shape), x.dtype) for x in launch.outputs)
        given = dict(zip(launch.kernel.arg_names, (*inputs, *launch.scalars, *results)))
        types = {name: self._type(x) for name, x in given.items() if x is not None}
        constants = launch.constants | {name: None for name, x in given.items() if x is None}
        self.cases.append((launch.name, launch.kernel, types, constants))
        return results

    def _type(self, x: Array | float) -> str:
        if not isinstance(x, Array):
            return "fp32" if isinstance(x, float) else "i32"
        e4m3 = "*fp8e4nv" if self.device.hardware_fp8 else "*u8"
        return e4m3 if x.dtype == "float8_e4m3fn" else _POINTERS[x.dtype]
