"""The native code of serving steps, loaded while a model is: what has to be built then takes no time of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS
from jax_sparse_mla.indices.topk.route import TOPK_BACKENDS
from jax_sparse_mla.launch import build, compile_cache, triton_versions
from jax_sparse_mla.launch.triton_call import own_launcher
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.packages import why_not
from jax_sparse_mla.serving import quantised_cuda


def begin_to_load(spec: ModelSpec | None = None) -> None:
    """Begins to load what JAX's device calls, and to build what is missing; whoever needs a part waits for it.

    Args:
      spec: the model's, whose prefill from a gathered workspace is loaded too.
    """
    if spec is not None and _has_prefill():
        alone.begin(spec.num_heads, spec.qk_dim)
    for part in _parts():
        thread = threading.Thread(target=part.load, daemon=True)  # a command that is refused does not wait
        thread.start()
        _threads[:] = [*filter(threading.Thread.is_alive, _threads), thread]


def building() -> bool:
    """Whether a part that was begun is not there yet."""
    return any(thread.is_alive() for thread in _threads)


def usable() -> list[bool]:
    """Which parts serve here; a program depends on them. Waits for all."""
    return [part.load() not in (None, False) for part in _parts()]


def expected() -> list[bool]:
    """What `usable` will be where nothing fails to build: a program is named by it, and so begins before all is."""
    return [compile_cache.available(part.library) and not part.unusable() for part in _parts()]


class _Part(NamedTuple):
    library: compile_cache.Library
    load: Callable[[], Any]  # None or False where it cannot be had
    unusable: Callable[[], Any] = partial(why_not, "tvm_ffi")  # why, if that is known before it is built


_threads: list[threading.Thread] = []


def _parts() -> list[_Part]:
    """The launcher of kernels, and the kernels that serve the device."""
    device = DeviceInfo.current()
    if device.platform != "cuda":
        return []
    kernels = {"decode": BACKENDS["hopper"], "index_logits": LOGITS_BACKENDS["hopper"], "topk": TOPK_BACKENDS["cuda"]}
    kernels |= {"expert_rows": quantised_cuda.FEW, "expert_tiles": quantised_cuda.MANY}
    binaries = [backend.binary(phase, device) for phase, backend in kernels.items() if not backend.wrong_device(device)]
    return [
        _Part(build.binder(), own_launcher, lambda: why_not("tvm_ffi") or triton_versions.unknown()),
        *(_Part(build.library(*binary), partial(build.module, *binary)) for binary in binaries),
        *(_Part(alone.library(name), partial(alone.loaded, name), lambda: None) for name in alone.begun()),
    ]


def _has_prefill() -> bool:
    """Whether the prefill kernel serves JAX's device and can be had without XLA."""
    device = DeviceInfo.current()
    serves = device.platform == "cuda" and not BACKENDS["hopper"].wrong_device(device)
    return serves and alone.unready("prefill", "torch") is None
