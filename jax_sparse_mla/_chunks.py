"""Functions of rows, mapped over many rows in chunks that fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def map_rows(function: Callable[[Any], Any], rows: Any, at_most: int) -> Any:
    """`jax.lax.map` of a pytree of arrays `[n, …]`, with no more than `at_most` (at least 1) rows in a chunk.

    A chunk size that divides n leaves no rest, which XLA would compile as a second copy of the function. So the largest
    divisor is taken, unless it is less than half of `at_most`.
    """
    count, at_most = jax.tree.leaves(rows)[0].shape[0], max(1, at_most)
    divides = (size for size in range(at_most, (at_most - 1) // 2, -1) if count % size == 0)
    return jax.lax.map(function, rows, batch_size=next(divides, at_most) if count > at_most else at_most)
