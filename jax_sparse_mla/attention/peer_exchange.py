"""The exchange of context parallel decode through the memory of GPUs of one process, on SM90.

One launch on each GPU takes the place of `exchange.send`, the all-to-all and `exchange.merge_received`:
`kernels_cuda/peer_exchange/kernel.cuh` says how, and why nothing is overwritten before it is read. A launch has the
addresses of other GPUs' memory, so the GPUs have to be known when a program is traced.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_sparse_mla.indices.ownership import AxisName
from jax_sparse_mla.kernels import build
from jax_sparse_mla.packages import warn_once
from jax_sparse_mla.xla import tvm

# As in the kernel: the devices that exchange with each other, and a head's bytes of out in a row, a power of two.
MOST_DEVICES = 8
LEAST_BYTES, MOST_BYTES = 128, 16_384

# Flags by which XLA runs operations of a CUDA graph at once; the second is the older one.
_LAUNCHES_AT_ONCE = (
    "xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
    "xla_gpu_graph_enable_concurrent_region=true",
)


class Groups(NamedTuple):
    """The GPUs of a mesh, in groups along an axis: each exchanges within its own.

    Attributes:
      ordinals: of all groups, one after the other.
      size: GPUs of a group.
    """

    ordinals: tuple[int, ...]
    size: int

    @property
    def name(self) -> str:
        """What a launch finds their memory by; the same in every process, as XLA keeps programs on disk."""
        groups = np.reshape(self.ordinals, (-1, self.size))
        return ";".join(",".join(map(str, group)) for group in groups)


def groups_of(mesh: Mesh, axis_name: AxisName) -> Groups | None:
    """The groups along one axis, or several; None where the mesh is not of SM90 GPUs of this process."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not set(axes) <= set(mesh.axis_names):  # an axis of `jax.vmap`
        return None
    first = len(mesh.axis_names) - len(axes)
    places = [mesh.axis_names.index(axis) for axis in axes]
    devices = np.moveaxis(mesh.devices, places, range(first, first + len(axes)))
    size = math.prod(devices.shape[first:])
    if not 2 <= size <= MOST_DEVICES or not all(map(_serves_on, devices.flat)):
        return None
    return Groups(tuple(device.local_hardware_id for device in devices.flat), size)


def _serves_on(device: jax.Device) -> bool:
    here = device.platform == "gpu" and device.process_index == jax.process_index()
    return here and str(getattr(device, "compute_capability", None)) == "9.0"


def takes(out: jax.Array) -> bool:
    """Whether the kernel takes out `[..., heads, v_dim]`."""
    size = out.shape[-1] * out.dtype.itemsize
    in_pieces = out.dtype in (jnp.bfloat16, jnp.float32) and LEAST_BYTES <= size <= MOST_BYTES and size.bit_count() == 1
    return in_pieces and 0 < math.prod(out.shape[:-1]) < 2**31


def runs_launches_at_once() -> bool:
    """Whether XLA is told to run operations of a CUDA graph at once that have nothing to do with each other.

    By default it runs them in the order of its schedule, which is the same on all devices, as the kernel needs it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return any(flag in flags for flag in _LAUNCHES_AT_ONCE)


@functools.cache
def ready(groups: Groups) -> bool:
    """Whether these GPUs have what a launch needs; gives it to them. Warns of what keeps them from it."""
    if (module := build.peer_exchange_module()) is None:
        return False
    try:
        module["prepare"](groups.name, list(groups.ordinals), groups.size)
    except RuntimeError as error:
        warn_once(f"context parallel decode exchanges by an all-to-all, its own kernel cannot be used: {error}")
        return False
    return True


def exchanging(groups: Groups) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`exchange.exchanged` on these GPUs, which are `ready`, as a function of out, lse and the sink or None.

    All GPUs of a group must run the same exchanges in the same order, and each of them one at a time.
    """

    def peer_exchange(out, lse, attn_sink):
        *leading, heads, v_dim = out.shape
        rows, own = math.prod(leading), heads // groups.size
        operands = [out.reshape(rows, heads, v_dim), lse.reshape(rows, heads)]
        sink = None
        if attn_sink is not None:
            operands.append(attn_sink)
            sink = tvm.Buffer(2)
        places = [tvm.Buffer(len(operands) + i) for i in range(2)]
        arguments = tvm.Buffer(0), tvm.Buffer(1), sink, groups.name, *places
        merged = jax.ShapeDtypeStruct((rows, own, v_dim), out.dtype)
        merged_lse = jax.ShapeDtypeStruct((rows, own), jnp.float32)
        found = tvm.call(build.peer_exchange_module, "peer_exchange", arguments, [merged, merged_lse], *operands)
        return found[0].reshape(*leading, own, v_dim), found[1].reshape(*leading, own)

    return peer_exchange
