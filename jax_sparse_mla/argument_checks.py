"""Argument checks at trace time: a wrong dtype raises TypeError, a wrong shape ValueError, both naming the argument.

Values are array data and cannot raise under `jit`: they are masked by the rules of each function, and
`jax_sparse_mla.debug` tells which row is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INT32 = (jnp.int32,)
UINT8 = (jnp.uint8,)
FLOAT32 = (jnp.float32,)
BF16 = (jnp.bfloat16,)
FLOATS = (jnp.bfloat16, jnp.float32)  # what a row of activations may be given as
INT_MAX = 2**31 - 1


def _dtype_names(dtypes: Sequence[Any]) -> str:
    return " or ".join(np.dtype(d).name for d in dtypes)


class ArgumentChecks:
    """Checks the array arguments of one call and binds the dimensions they share.

    >>> check = ArgumentChecks("swa_slots")
    >>> positions = check("positions", positions, ("T",), INT32)
    >>> req_rows = check("req_rows", req_rows, ("T",), INT32)      # must agree with positions on T
    >>> check.dims["T"]

    A dimension is an int (fixed), a name (bound at its first use, compared afterwards) or None (any size).
    """

    def __init__(self, function: str):
        self.function = function
        self.dims: dict[str, int] = {}

    def __call__(self, name: str, x: Any, shape: Sequence[int | str | None], dtypes: Sequence[Any]) -> jax.Array:
        """Returns `x` as a jax array. Python numbers and lists take JAX's default dtypes; numpy int64 is refused."""
        wanted = f"{self.function}: {name} must be {_dtype_names(dtypes)} {self._expected(shape)}"
        if x is None:
            raise TypeError(f"{wanted}, got None")
        if not hasattr(x, "dtype"):
            try:
                x = jnp.asarray(x)
            except (TypeError, ValueError, OverflowError) as error:
                raise TypeError(f"{wanted}, got {type(x).__name__}: {error}") from None
        if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
            raise TypeError(f"{wanted} (a JAX or numpy array), got {type(x).__module__}.{type(x).__name__}")
        if not any(x.dtype == np.dtype(d) for d in dtypes):
            raise TypeError(f"{wanted}, got {x.dtype} {list(x.shape)}")
        bound = dict(self.dims)
        ok = len(x.shape) == len(shape)
        if ok:
            for size, want in zip(x.shape, shape):
                if isinstance(want, str):
                    ok &= bound.setdefault(want, size) == size
                elif want is not None:
                    ok &= size == want
        if not ok:
            raise ValueError(f"{self.function}: {name} must have shape {self._expected(shape)}, got {list(x.shape)}")
        self.dims = bound
        return jnp.asarray(x)

    def optional(self, name: str, x: Any, shape: Sequence[int | str | None], dtypes: Sequence[Any]):
        """As `__call__`, with None passed through."""
        return None if x is None else self(name, x, shape, dtypes)

    def rank(self, name: str, x: Any) -> int:
        """The number of dimensions of an argument that may have any; a ragged list has none and raises."""
        try:
            return jnp.ndim(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{self.function}: {name} must be an array, got {type(x).__name__}: {error}") from None

    def fail(self, message: str) -> ValueError:
        """A ValueError that starts with the function's name, for `raise check.fail(...)`."""
        return ValueError(f"{self.function}: {message}")

    def static_int(self, name: str, value: Any, *, minimum: int, maximum: float = INT_MAX) -> int:
        """A static integer from `minimum` to `maximum`; anything else raises. More than int32 meets no array."""
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{self.function}: {name} must be a static int >= {minimum}, got {type(value).__name__}")
        if value < minimum:
            raise ValueError(f"{self.function}: {name} must be >= {minimum}, got {value}")
        if value > maximum:
            raise ValueError(f"{self.function}: {name} must fit int32, got {value}")
        return int(value)

    def _expected(self, shape: Sequence[int | str | None]) -> str:
        parts = []
        for dim in shape:
            if isinstance(dim, str) and dim in self.dims:
                parts.append(f"{dim}={self.dims[dim]}")
            else:
                parts.append("any" if dim is None else str(dim))
        return "[" + ", ".join(parts) + "]"
