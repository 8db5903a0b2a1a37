"""Functions of a row, mapped over many rows in chunks that fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def map_rows(function: Callable[[Any], Any], rows: Any, at_most: int) -> Any:
    """`jax.lax.map` of a pytree of arrays `[n, …]`, with no more than `at_most` (at least 1) rows in a chunk.

    All chunks have one size; the first rows are taken again where the last chunk is not full. `jax.lax.map` alone would
    treat the last rows by themselves, and XLA compile the function twice. A gradient costs the same either way.
    """
    count, at_most = jax.tree.leaves(rows)[0].shape[0], max(1, at_most)
    if count <= at_most:
        return jax.lax.map(function, rows, batch_size=at_most)
    chunks = -(-count // at_most)
    size = -(-count // chunks)
    if missing := chunks * size - count:
        rows = jax.tree.map(lambda x: jnp.concatenate([x, x[:missing]]), rows)
    results = jax.lax.map(function, rows, batch_size=size)
    return jax.tree.map(lambda x: x[:count], results) if missing else results
