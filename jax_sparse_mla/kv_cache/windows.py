"""Reads and writes runs of bytes of a paged buffer by (page, byte).

The buffer is never flattened, so it may exceed 2 GiB, and XLA updates a donated buffer in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def locate_slots(slots: jax.Array, num_pages: int, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(valid, page, offset)` of int32 slots: whether a slot exists, its page, and its token within the page.

    A slot that does not exist has page `num_pages` (which `scatter_windows` drops) and offset 0.
    """
    page = lax.div(jnp.maximum(slots, 0), jnp.int32(page_size))
    valid = (slots >= 0) & (page < num_pages)
    return valid, jnp.where(valid, page, num_pages), jnp.where(valid, slots - page * page_size, 0)


def slots_of_share(slots: jax.Array, axes: tuple[str, ...], num_slots: int) -> jax.Array:
    """Slots as those of a device's share of `num_slots`, −1 for the others; pages are sharded over the mesh `axes`."""
    first = lax.axis_index(axes) * num_slots
    return jnp.where((slots >= first) & (slots - first < num_slots), slots - first, -1)


def write_own_pages(write, axes: tuple[str, ...], cache, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """`write(cache, slots, rows)` of the slots in a device's share of the pages; for `sharding.PartitionRule`."""
    return write(cache, slots_of_share(slots, axes, cache.num_pages * cache.page_size), rows)


def gather_windows(data: jax.Array, page: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """`data[page[i], start[i] : start[i] + width]`, of at least one page, for int32 page and start `[n]`.

    Positions are clamped, so mask what was out of range.
    """
    return lax.gather(
        data,
        jnp.stack([page, start], axis=-1),
        lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)),
        slice_sizes=(1, width),
        mode=lax.GatherScatterMode.CLIP,
    )


def scatter_windows(data: jax.Array, page: jax.Array, start: jax.Array, windows: jax.Array) -> jax.Array:
    """`data[page[i], start[i] : start[i] + width] = windows[i]`, in place where XLA may (a donated argument of `jit`).

    Page and start are int32 `[n]`, not negative; a page out of range drops its window, and a window stays within its
    page.
    """
    return lax.scatter(
        data,
        jnp.stack([page, start], axis=-1),
        windows,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
