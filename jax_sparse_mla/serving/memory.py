"""The memory of a device, and what arrays take of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax


def host_memory() -> int:
    """Bytes of the machine, or fewer where the process is in a container with a limit."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of the second and the first version of cgroups
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(sizes)


def host_device() -> jax.Device | None:
    """JAX's device for the host's memory; None where it was started without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def device_memory() -> int:
    """Bytes that JAX may take of its default device, or of the host for a CPU."""
    default = jax.config.jax_default_device
    device = default if isinstance(default, jax.Device) else jax.local_devices()[0]
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or host_memory()


def free_memory() -> int:
    """As `device_memory`, less what is in use now; of a host at most what its system says is available."""
    if "bytes_limit" in (jax.local_devices()[0].memory_stats() or {}):
        every = [device.memory_stats() for device in jax.local_devices()]
        return min(stats["bytes_limit"] - stats["bytes_in_use"] for stats in every)
    free = host_memory()
    with contextlib.suppress(OSError):
        words = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        free = min([free, *(1024 * int(count) for name, count, *_ in words if name == "MemAvailable:")])
    return free


class NotEnoughMemory(ValueError):
    """Arrays do not fit the device, or the host."""


def check_memory(what: str, needed: int) -> None:
    """Refuses a need that is larger than the device with a ValueError that names both sizes."""
    _check(what, needed, "device", device_memory())


def check_host_memory(what: str, needed: int) -> None:
    """As `check_memory`, for what the host holds."""
    _check(what, needed, "host", host_memory())


def _check(what: str, needed: int, where: str, limit: int) -> None:
    if needed > limit:
        raise NotEnoughMemory(f"does not fit: {what} {needed / 2**30:.1f} GiB, the {where} has {limit / 2**30:.1f} GiB")


def size_of(arrays: Any) -> int:
    """Bytes of a pytree of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def bytes_of_a_device(arrays: Any) -> int:
    """Bytes that each device has of a pytree of arrays with shardings, or of their shapes."""

    def shard(x: Any) -> jax.ShapeDtypeStruct:  # `addressable_shards` raises for arrays of processes in JAX 0.11.2
        return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    return size_of(jax.tree.map(shard, arrays))
