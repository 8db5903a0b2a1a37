"""The top-k engines: one record each, and which of them serves a call and why. Pure, as `attention/route.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_sparse_mla import backend as shared
from jax_sparse_mla.backend import Choice, Need, choose, load
from jax_sparse_mla.device import DeviceInfo


@dataclasses.dataclass(frozen=True)
class Call:
    """A top-k of `topk` columns out of logits `[rows, columns]`, on a device of this compute capability or on none."""

    rows: int
    columns: int
    topk: int
    capability: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(shared.Backend):
    """The record of a top-k engine.

    Attributes:
      function: "module:function" of `(logits, lengths, *, topk, page_size, …)`, as `topk_reference`.
      everywhere: whether it serves every call on every device; else CUDA devices from SM80 on, where there is a logit.
      most_topk: the most columns that it chooses, never more than there are; None: any number.
      not_on: compute capabilities that it does not serve, and `not_on_reason`.
    """

    function: str
    everywhere: bool = False
    most_topk: int | None = None
    not_on: tuple[tuple[int, int], ...] = ()
    not_on_reason: str = ""

    def cannot(self, call: Call) -> list[str]:
        if self.everywhere:
            return []
        if call.capability is None:
            return ["needs a CUDA device"]
        if call.capability < (8, 0):
            return ["serves compute capability 8.0 and up, got {}.{}".format(*call.capability)]
        if call.rows == 0 or call.columns == 0:
            return ["there is nothing to read"]
        if self.most_topk is not None and call.topk > (most := min(self.most_topk, call.columns)):
            return [f"takes topk up to {most} here, got {call.topk}"]
        return [self.not_on_reason] if call.capability in self.not_on else []


_TVM_FFI = Need(("apache-tvm-ffi",), ("tvm_ffi",))

_RECORDS = (
    Engine(
        name="cuda",
        function="jax_sparse_mla.indices.topk.kernels:topk_cuda",
        needs=(_TVM_FFI,),
        unready="jax_sparse_mla.indices.topk.route:cuda_unready",
    ),
    Engine(
        name="triton",
        function="jax_sparse_mla.indices.topk.kernels:topk_triton",
        needs=(Need(("triton",), ("triton",)), Need(("apache-tvm-ffi", "jax-triton"), ("tvm_ffi", "jax_triton"))),
        unready="jax_sparse_mla.launch.dispatch:unready",
    ),
    Engine(
        name="flashinfer",
        function="jax_sparse_mla.indices.topk.flashinfer:topk_flashinfer",
        needs=(Need(("flashinfer-python",), ("flashinfer",)), _TVM_FFI),
        most_topk=2048,
        not_on=((8, 6), (8, 9)),  # 100 KB a multiprocessor; on 12.x, where it is no more, its CUB kernel serves
        not_on_reason="needs 128 KiB of shared memory a multiprocessor",
    ),
    Engine(name="xla", function="jax_sparse_mla.indices.topk.api:topk_reference", everywhere=True),
)

# Preferred first: the order of the times on an H200 (`python -m benchmarks topk`). "xla" is plain JAX.
TOPK_BACKENDS: dict[str, Engine] = {engine.name: engine for engine in _RECORDS}


def cuda_unready(phase: str, framework: str) -> str | None:
    """Why the CUDA kernel cannot be launched here although its packages are found; it is built if need be."""
    from jax_sparse_mla.launch import build

    capability = DeviceInfo.current().compute_capability
    if capability is None or build.topk_module(capability) is None:
        return "its CUDA kernel cannot be used here: a warning says why"
    return None


def missing() -> dict[str, str]:
    """The engines that cannot be used in this process, and why."""
    if DeviceInfo.current().platform != "cuda":
        return {name: "needs a CUDA device" for name, engine in TOPK_BACKENDS.items() if not engine.everywhere}
    reasons = {name: engine.missing("topk", "jax") for name, engine in TOPK_BACKENDS.items()}
    return {name: why for name, why in reasons.items() if why}


def engine_here(rows: int, columns: int, topk: int, override: str | None = None) -> Any:
    """The function that serves these shapes here and now, or the one of the engine that is named."""
    call = Call(rows, columns, topk, DeviceInfo.current().compute_capability)
    return load(TOPK_BACKENDS[plan_topk(call, unable=missing(), override=override).backend].function)


def plan_topk(call: Call, *, unable: Mapping[str, str], override: str | None = None) -> Choice:
    """The engine that serves a call, the reason, and why not each of the others. Pure; arguments as `plan_call`'s.

    Raises:
      ValueError: an unknown name, or an override that cannot serve the call, with the reason.
    """
    return choose("topk", TOPK_BACKENDS, call, described="call", unable=unable, override=override)
