"""Compiles Triton kernels without a GPU, as the launchers do; what the `compile_*` scripts share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
                warps = constants.pop("num_warps")
                yield capability, name, compile_kernel(kernel, types, constants, capability, num_warps=warps)


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
