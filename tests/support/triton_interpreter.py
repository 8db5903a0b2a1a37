"""Makes Triton's interpreter fast enough for tests; mends a mask of 3.9 and a constant of 3.8. For importing once.

For every call of a device function it looks through the whole language again to replace its builtins, which the
kernel's launch has done; for every tensor it writes out the names of its types, which nobody reads, and it makes a
table of all dtypes to look up one.
"""

from __future__ import annotations

import os

import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

_patch_language, _run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
_tensor_of_any = TritonSemantic.to_tensor
_numpy_dtype_of_any, _splat = interpreter._get_np_dtype, interpreter.InterpreterBuilder.create_splat
# How the current launch has patched the language, by which of its modules; the first is the launch's own.
_patched: dict[frozenset[str], interpreter._LangPatchScope] | None = None


def _patch_language_once(fn):
    seen = frozenset(x.__name__ for x in fn.__globals__.values() if x is tl or x is tl.core)
    if _patched is None or not seen or seen not in _patched:
        scope = _patch_language(fn)
        if _patched:  # Triton restores what a launch has patched, and forgets what its functions have
            next(iter(_patched.values()))._changes.extend(scope._changes)
        if _patched is not None:
            _patched[seen] = scope
        return scope
    return interpreter._LangPatchScope()


def _run_grid_patched_once(self, *args, **kwargs):
    global _patched
    before, _patched = _patched, {}
    try:
        return _run_grid(self, *args, **kwargs)
    finally:
        _patched = before


class _Later:
    """An attribute that is computed when it is read first."""

    def __init__(self, compute):
        self._compute = compute

    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def _make_later(cls, name, compute) -> None:
    attribute = _Later(compute)
    attribute.__set_name__(cls, name)
    setattr(cls, name, attribute)


def _init_block_type(self, element_ty, shape):
    self.element_ty = element_ty
    self.shape = tl.core.tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
    if not self.shape:
        raise TypeError("0d block_type is forbidden")
    self.numel = tl.core.validate_block_shape(self.shape)


def _init_tuple_type(self, types, fields=None):
    self.types = types
    self.fields = fields or [""] * len(types)


def _init_tuple(self, args, type=None):
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


_NUMPY_DTYPES = {}


def _numpy_dtype(of):
    if type(of) is not tl.dtype:
        return _numpy_dtype_of_any(of)
    if of.name not in _NUMPY_DTYPES:
        _NUMPY_DTYPES[of.name] = _numpy_dtype_of_any(of)
    return _NUMPY_DTYPES[of.name]


def _spread(self, type, of):
    """3.9 takes a mask of one element for a number, as what was compared is."""
    return _splat(self, type, interpreter.TensorHandle(of.data, type.scalar))


def _to_tensor(self, x, check_type=True):
    """The interpreter makes a constant of a constant less a tensor, and 3.8 takes only numbers for constants."""
    return _tensor_of_any(self, x.value if isinstance(x, tl.constexpr) else x, check_type)


if os.environ.get("TRITON_INTERPRET") == "1":
    TritonSemantic.to_tensor = _to_tensor
    interpreter.InterpreterBuilder.create_splat = _spread
    interpreter._patch_lang = _patch_language_once
    interpreter.GridExecutor.__call__ = _run_grid_patched_once
    interpreter._get_np_dtype = _numpy_dtype
    tl.core.block_type.__init__ = _init_block_type
    _make_later(tl.core.block_type, "name", lambda x: f"<{x.shape}, {x.element_ty}>")
    tl.core.tuple_type.__init__ = _init_tuple_type
    _make_later(tl.core.tuple_type, "name", lambda x: f"[{','.join(f'{k}:{v}' for k, v in zip(x.fields, x.types))}]")
    tl.core.tuple.__init__ = _init_tuple
    _make_later(tl.core.tuple, "type", lambda x: tl.core._type_for_tuple_values(x.values))
