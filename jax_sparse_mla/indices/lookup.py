"""Safe index arithmetic: look-ups give −1 where the index is invalid, and sums do not wrap.

jnp indexing wraps negative indices as Python does, and clamps those past the end; int32 sums wrap. Each of these turns
an invalid index into a valid one, so all code that computes slots uses these functions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

INT_MAX = 2**31 - 1


def take_or_minus_one(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]` of int32 `[n]`, and −1 where `index` is outside `[0, n)` or the entry itself is negative."""
    size = table.shape[0]
    if size == 0:
        return jnp.full(index.shape, -1, jnp.int32)
    valid = (index >= 0) & (index < size)
    entry = table.at[jnp.where(valid, index, 0)].get(mode="promise_in_bounds")
    return jnp.where(valid, jnp.maximum(entry, -1), -1)


def take_2d_or_minus_one(table: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """`table[row, column]`, and −1 where row or column is outside the table or the entry itself is negative.

    Row and column broadcast to each other. They are never joined into one number, so the table may hold more than 2³¹
    entries.
    """
    row, column = jnp.broadcast_arrays(row, column)
    rows, columns = table.shape
    if rows == 0 or columns == 0:
        return jnp.full(row.shape, -1, jnp.int32)
    valid = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    entry = table.at[jnp.where(valid, row, 0), jnp.where(valid, column, 0)].get(mode="promise_in_bounds")
    return jnp.where(valid, jnp.maximum(entry, -1), -1)


def page_slot_or_minus_one(page_table: jax.Array, row: jax.Array, position: jax.Array, page_size: int) -> jax.Array:
    """The slot `page_table[row, position // page_size] * page_size + position % page_size` of a token.

    −1 where the position is negative or beyond the table, the row is not one of the table's, the page is
    negative, or the slot does not fit int32. Row and position broadcast to each other.
    """
    # Division rounds down: a negative position has a negative page.
    page = take_2d_or_minus_one(page_table, row, position // page_size)
    offset = position % page_size
    fits = page <= (INT_MAX - offset) // page_size
    return jnp.where((page >= 0) & fits, jnp.where(fits, page, 0) * page_size + offset, -1)


def add_or_minus_one(index: jax.Array, base: jax.Array) -> jax.Array:
    """`index + base` of int32 numbers, and −1 where either is negative or the sum does not fit int32."""
    valid = (index >= 0) & (base >= 0) & (index <= INT_MAX - jnp.maximum(base, 0))
    return jnp.where(valid, index + base, -1)


def exclusive_cumsum(counts: jax.Array) -> jax.Array:
    """The start of each of the concatenated parts, then the total: int32 `[n + 1]` of counts `[n]`, none negative.

    Sums past INT_MAX stay INT_MAX instead of wrapping, so "the total exceeds the capacity" is never missed.
    """
    sums = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, INT_MAX - a), counts.astype(jnp.int32))
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), sums])


def split_ragged(starts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """`(part, index)` of the first `capacity` elements of a ragged concatenation; −1 past the last part.

    `starts` are the exclusive sums of the parts' lengths, int32 `[n + 1]`.
    """
    element = jnp.arange(capacity, dtype=jnp.int32)
    # The last part that starts at or before the element: empty parts before it repeat its start.
    part = jnp.searchsorted(starts[:-1], element, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    held = element < starts[-1]
    index = element - take_or_minus_one(starts, part)
    return jnp.where(held, part, -1), jnp.where(held, index, -1)
