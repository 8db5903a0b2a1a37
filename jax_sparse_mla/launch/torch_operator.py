"""torch operators inside XLA programs.

`torch_call` runs a torch operator inside an XLA program: on XLA's stream and buffers, without Python and its lock.
`torch_operator.cc` has the host code, which `compile_cache` compiles and keeps. It needs torch >= 2.10 and, once per
machine, a C++ compiler; torch is imported when a call is traced, never before.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_sparse_mla.launch import compile_cache

_TARGET = "jax_sparse_mla_torch_call"
_HOST_CODE = compile_cache.Library(
    name="torch_call",
    sources=(Path(__file__).with_name("torch_operator.cc"),),
    compiler="c++",
    flags=("-std=c++17", "-O2", "-ldl"),
    includes=lambda: [jax.ffi.include_dir()],
    packages=("jaxlib",),
)
_setting_up = threading.RLock()  # of threads that trace their first calls at once, one registers


class Strided(NamedTuple):
    """An array whose bytes an operator sees as a tensor of other sizes and strides, from `offset` on (in elements)."""

    array: jax.Array
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def torch_call(op: str, arguments: Mapping[str, Any], results: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    """Calls a torch operator inside an XLA program.

    The operator allocates what it returns through torch, so the call is never part of a command buffer (CUDA graph);
    its first returned tensors are copied to the results. Under `vmap` calls follow each other; there is no gradient.

    Args:
      op: "namespace::name"; its library is loaded already.
      arguments: by the names of the operator's schema: arrays (uint8, int32, bfloat16, float32; not empty), `Strided`
        views of them, ints, bools, floats, None. A name that the schema lacks is an error, unless its value is None;
        one that is absent takes the schema's default.
      results: a shape and dtype for each of the first returned tensors (those of a returned list count one by one).
        A result's leading axis is the tensor's; of each row it takes as many elements as it has, from the first.

    Raises:
      RuntimeError: no C++ compiler, or a torch without the C functions that the call needs.
      TypeError: an argument that the schema has no place for, or does not get.
    """
    with _setting_up:
        _register()
        operands, attributes = _marshal(_schema(op), arguments)
    function = jax.ffi.ffi_call(_TARGET, tuple(results), vmap_method="sequential")
    return function(*operands, op=op, **attributes)


def _schema(op: str):
    import torch

    namespace, name = op.split("::")
    return getattr(getattr(torch.ops, namespace), name).default._schema


def _marshal(schema, arguments: Mapping[str, Any]) -> tuple[list[jax.Array], dict[str, Any]]:
    """Operands and attributes, as `torch_operator.cc` reads them."""
    names = [argument.name for argument in schema.arguments]
    if unknown := [name for name, value in arguments.items() if name not in names and value is not None]:
        raise TypeError(f"torch_call: {schema.name} has no argument {', '.join(unknown)}, only {', '.join(names)}")
    operands, codes, views, ints, floats = [], "", [], [], []
    for argument in schema.arguments:
        if argument.name not in arguments and not argument.has_default_value():
            raise TypeError(f"torch_call: {schema.name} needs its argument {argument.name}")
        value = arguments.get(argument.name, argument.default_value)
        kind, optional = _kind(argument.type)
        if value is None and optional:
            codes += "-"
        elif kind == "TensorType" and value is not None:
            view = value if isinstance(value, Strided) else _dense(value)
            codes += "O" if optional else "T"
            operands.append(view.array)
            views += [len(view.sizes), view.offset, *view.sizes, *view.strides]
        elif kind in ("IntType", "BoolType", "SymIntType") and isinstance(value, int) and not optional:
            codes += "i"
            ints.append(int(value))
        elif kind == "FloatType" and isinstance(value, float) and not optional:
            codes += "f"
            floats.append(value)
        else:
            got = type(value).__name__
            raise TypeError(f"torch_call: {schema.name}'s {argument.name} is {argument.type}, got {got}")
    return operands, {
        "arguments": codes,
        "returns": _return_codes([value.type for value in schema.returns]),
        "views": np.asarray(views, np.int64),
        "ints": np.asarray(ints, np.int64),
        "floats": np.asarray(floats, np.float64),
    }


@functools.cache
def _returns_are_typed_backwards() -> bool:
    """Whether torch's dispatcher function converts the i-th value by the type of the i-th last, as torch 2.13 does.

    Asked of an operator whose two values differ in type but can be converted either way: an optional comes as a
    pointer, a float as its bits.
    """
    import torch

    library = torch.library.Library("jax_sparse_mla", "FRAGMENT")
    library.define("return_order() -> (float, float?)")
    library.impl("return_order", lambda: (1.0, 2.0), "CompositeExplicitAutograd")
    stack = (ctypes.c_double * 2)()
    failed = ctypes.CDLL(_torch_library("libtorch_cpu.so")).aoti_torch_call_dispatcher(
        b"jax_sparse_mla::return_order", b"", stack
    )
    if failed or (stack[0] == 1.0) == (stack[1] == 2.0):
        raise RuntimeError(f"torch_call: torch {torch.__version__} returns values in no known order")
    return stack[1] == 2.0


def _kind(type_) -> tuple[str, bool]:
    optional = type_.kind() == "OptionalType"
    return (type_.getElementType() if optional else type_).kind(), optional


def _return_codes(types: list) -> str:
    codes = [_return_code(type_) for type_ in types]
    return "".join(reversed(codes) if _returns_are_typed_backwards() else codes)


def _return_code(type_) -> str:
    in_list = type_.kind() == "ListType"
    kind, optional = _kind(type_.getElementType() if in_list else type_)
    if kind != "TensorType":
        raise TypeError(f"torch_call: an operator that returns {type_} cannot be called")
    return ("M" if optional else "L") if in_list else ("O" if optional else "T")


def _dense(array: jax.Array) -> Strided:
    strides = [1]
    for size in reversed(array.shape[1:]):
        strides.append(strides[-1] * size)
    return Strided(array, array.shape, tuple(reversed(strides[: array.ndim])))


@functools.cache
def _register() -> None:
    """Makes the custom call known to XLA. Traced programs run only where a backend is up, as XLA wants it."""
    import torch

    library = _load()
    paths = [_torch_library(name) for name in ("libtorch_cpu.so", "libtorch_cuda.so")]
    handles = [ctypes.CDLL(path)._handle if os.path.exists(path) else None for path in paths]
    bind = library.jax_sparse_mla_bind_torch
    bind.argtypes, bind.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_char_p
    if missing := bind(*handles):
        raise RuntimeError(f"torch_call: torch {torch.__version__} lacks {missing.decode()}; torch >= 2.10 has it")
    if torch.cuda.is_available():
        torch.cuda.init()  # from this thread; the calls come from XLA's
    for where, symbol in (("cpu", "host"), ("CUDA", "cuda")):
        handler = getattr(library, f"jax_sparse_mla_torch_call_{symbol}")
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform=where)


def _torch_library(name: str) -> str:
    """A library that importing torch has loaded; opening it again gives the same one."""
    import torch

    return str(Path(torch.__file__).with_name("lib") / name)


def available() -> bool:
    """Whether the host code is compiled already or a C++ compiler is there."""
    return compile_cache.available(_HOST_CODE)


def _load() -> ctypes.CDLL:
    return compile_cache.load(_HOST_CODE, lambda path: ctypes.CDLL(str(path)))
