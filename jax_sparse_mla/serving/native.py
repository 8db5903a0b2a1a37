"""The native code of serving steps, loaded while a model is: what has to be built then takes no time of its own."""

from __future__ import annotations

import threading
from functools import partial

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS
from jax_sparse_mla.indices.topk.route import TOPK_BACKENDS
from jax_sparse_mla.launch import build
from jax_sparse_mla.launch.triton_call import own_launcher


def begin_to_load() -> None:
    """Begins to load what JAX's device calls, and to build what is missing; whoever needs a part waits for it."""
    for load in _parts():
        threading.Thread(target=load, daemon=True).start()  # a command that is refused does not wait for it


def usable() -> list[bool]:
    """Which parts serve here; a program depends on them."""
    return [load() not in (None, False) for load in _parts()]


def _parts() -> list:
    """What loads each: the launcher of kernels, and the CUDA kernels that serve the device."""
    device = DeviceInfo.current()
    if device.platform != "cuda":
        return []
    kernels = {"decode": BACKENDS["hopper"], "index_logits": LOGITS_BACKENDS["hopper"], "topk": TOPK_BACKENDS["cuda"]}
    binaries = [backend.binary(phase, device) for phase, backend in kernels.items() if not backend.wrong_device(device)]
    return [own_launcher, *(partial(build.module, *binary) for binary in binaries)]
