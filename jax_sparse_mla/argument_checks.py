"""Argument checks: a wrong dtype raises TypeError, a wrong shape ValueError, both naming the argument.

`Checks` knows names of dtypes and sizes alone. `ArgumentChecks` checks arrays of JAX, at trace time;
`sparse_mla_torch.operations.checks.TensorChecks` checks tensors of torch by the same rules.

Values are array data and cannot raise under `jit`: they are masked by the rules of each function, and
`jax_sparse_mla.debug` tells which row is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INT32 = ("int32",)
UINT8 = ("uint8",)
FLOAT32 = ("float32",)
BF16 = ("bfloat16",)
FLOATS = ("bfloat16", "float32")  # dtypes in which a row of activations may be given
INT_MAX = 2**31 - 1

# A dimension is an int (fixed), a name (bound at its first use, compared afterwards) or None (any size).
Shape = Sequence[int | str | None]


class Checks:
    """Checks the arguments of one call, of any framework, and binds the dimensions that its arrays share."""

    def __init__(self, function: str):
        self.function = function
        self.dims: dict[str, int] = {}

    def __call__(self, name: str, x: Any, shape: Shape, dtypes: Sequence[Any]) -> Any:
        """Returns `x` if it is an array of this shape and one of these dtypes."""
        raise NotImplementedError

    def optional(self, name: str, x: Any, shape: Shape, dtypes: Sequence[Any] = INT32) -> Any:
        """As `__call__`, with None passed through."""
        return None if x is None else self(name, x, shape, dtypes)

    def fail(self, message: str) -> ValueError:
        """A ValueError that starts with the function's name, for `raise check.fail(...)`."""
        return ValueError(f"{self.function}: {message}")

    def bind(self, name: str, sizes: Sequence[int], shape: Shape) -> None:
        """Binds the names in `shape` to an array's sizes; sizes of another shape raise ValueError."""
        dims, fits = self.dims, len(sizes) == len(shape)
        for size, expected in zip(sizes, shape):
            if size == expected or expected is None:
                continue
            if isinstance(expected, str):
                dims = {**dims, expected: size} if expected not in dims else dims
                expected = dims[expected]
            fits = fits and size == expected
        if not fits:
            raise self.fail(f"{name} must have shape {self.expected(shape)}, got {list(sizes)}")
        self.dims = dims

    def expected(self, shape: Shape) -> str:
        """A shape in an error's words, with the sizes of the names that are bound."""
        parts = []
        for dim in shape:
            if isinstance(dim, str) and dim in self.dims:
                parts.append(f"{dim}={self.dims[dim]}")
            else:
                parts.append("any" if dim is None else str(dim))
        return "[" + ", ".join(parts) + "]"

    def static_int(self, name: str, value: Any, *, minimum: int, maximum: float = INT_MAX) -> int:
        """A static integer from `minimum` to `maximum`; anything else raises. More than int32 meets no array."""
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{self.function}: {name} must be a static int >= {minimum}, got {type(value).__name__}")
        if value < minimum:
            raise self.fail(f"{name} must be >= {minimum}, got {value}")
        if value > maximum:
            raise self.fail(f"{name} must fit int32, got {value}")
        return int(value)


class ArgumentChecks(Checks):
    """Checks the array arguments of one call of a JAX function.

    >>> check = ArgumentChecks("swa_slots")
    >>> positions = check("positions", positions, ("T",), INT32)
    >>> req_rows = check("req_rows", req_rows, ("T",), INT32)      # must agree with positions on T
    >>> check.dims["T"]
    """

    def __call__(self, name: str, x: Any, shape: Shape, dtypes: Sequence[Any]) -> jax.Array:
        """Returns `x` as a jax array. Python numbers and lists take JAX's default dtypes; numpy int64 is refused."""
        names = [np.dtype(d).name for d in dtypes]
        wanted = f"{self.function}: {name} must be {' or '.join(names)} {self.expected(shape)}"
        if x is None:
            raise TypeError(f"{wanted}, got None")
        if not hasattr(x, "dtype"):
            try:
                x = jnp.asarray(x)
            except (TypeError, ValueError, OverflowError) as error:
                raise TypeError(f"{wanted}, got {type(x).__name__}: {error}") from None
        if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
            raise TypeError(f"{wanted} (a JAX or numpy array), got {type(x).__module__}.{type(x).__name__}")
        if x.dtype.name not in names or not x.dtype.isnative:  # `>i4` is int32 by name
            raise TypeError(f"{wanted}, got {x.dtype} {list(x.shape)}")
        self.bind(name, x.shape, shape)
        return jnp.asarray(x)

    def rank(self, name: str, x: Any) -> int:
        """The number of dimensions of an argument that may have any; a ragged list has none and raises."""
        try:
            return jnp.ndim(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{self.function}: {name} must be an array, got {type(x).__name__}: {error}") from None
