"""The memory of a device, and what arrays take of it."""

from __future__ import annotations

import os
from typing import Any

import jax


def device_memory() -> int:
    """Bytes that JAX may take of its device, or of the machine for a CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class NotEnoughMemory(ValueError):
    """Arrays do not fit the device."""


def check_memory(what: str, needed: int) -> None:
    """Refuses a need that is larger than the device with a ValueError that names both sizes."""
    if needed > (limit := device_memory()):
        raise NotEnoughMemory(f"does not fit: {what} {needed / 2**30:.1f} GiB, the device has {limit / 2**30:.1f} GiB")


def size_of(arrays: Any) -> int:
    """Bytes of a pytree of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def bytes_of_a_device(arrays: Any) -> int:
    """Bytes that each device has of a pytree of arrays with shardings, or of their shapes."""

    def shard(x: Any) -> jax.ShapeDtypeStruct:  # `addressable_shards` raises for arrays of processes in JAX 0.11.2
        return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    return size_of(jax.tree.map(shard, arrays))
