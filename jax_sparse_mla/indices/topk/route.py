"""The top-k engines: one record each, and which of them serves a call and why. Pure, as `attention/route.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_sparse_mla import backend as shared
from jax_sparse_mla.backend import SM80_AND_UP, TRITON, TRITON_LAUNCHER, TVM_FFI, Choice, Need, choose, load
from jax_sparse_mla.device import DeviceInfo


@dataclasses.dataclass(frozen=True)
class Call:
    """A top-k of `topk` columns out of logits `[rows, columns]`, on a device."""

    rows: int
    columns: int
    topk: int
    device: DeviceInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(shared.Backend):
    """The record of a top-k engine.

    Attributes:
      function: "module:function" of `(logits, lengths, *, topk, page_size, …)`, as `topk_reference`.
      reads_nothing: whether it takes calls without a logit.
      most_topk: the most columns that it chooses, never more than there are; None: any number.
      not_on: compute capabilities that it does not serve, and `not_on_reason`.
    """

    function: str
    reads_nothing: bool = False
    most_topk: int | None = None
    not_on: tuple[tuple[int, int], ...] = ()
    not_on_reason: str = ""

    def refuses(self, call: Call) -> list[str]:
        if not self.reads_nothing and (call.rows == 0 or call.columns == 0):
            return ["there is nothing to read"]
        if self.most_topk is not None and call.topk > (most := min(self.most_topk, call.columns)):
            return [f"takes topk up to {most} here, got {call.topk}"]
        return [self.not_on_reason] if call.device.compute_capability in self.not_on else []


_RECORDS = (
    Engine(
        name="cuda",
        function="jax_sparse_mla.indices.topk.kernels:topk_cuda",
        devices=(SM80_AND_UP,),
        device_names="SM80 and up",
        needs=(TVM_FFI,),
        binaries={"topk": ("topk", None)},
    ),
    Engine(
        name="triton",
        function="jax_sparse_mla.indices.topk.kernels:topk_triton",
        devices=(SM80_AND_UP,),
        device_names="SM80 and up",
        needs=(TRITON, TRITON_LAUNCHER),
        unready="jax_sparse_mla.launch.dispatch:unready",
    ),
    Engine(
        name="flashinfer",
        function="jax_sparse_mla.indices.topk.flashinfer:topk_flashinfer",
        devices=(SM80_AND_UP,),
        device_names="SM80 and up",
        needs=(Need(("flashinfer-python",), ("flashinfer",)), TVM_FFI),
        most_topk=2048,
        not_on=((8, 6), (8, 9)),  # 100 KB a multiprocessor; on 12.x, where it is no more, its CUB kernel serves
        not_on_reason="needs 128 KiB of shared memory a multiprocessor",
    ),
    Engine(name="xla", function="jax_sparse_mla.indices.topk.api:topk_reference", reads_nothing=True),
)

# Preferred first: the order of the times on an H200 (`python -m benchmarks topk`). "xla" is plain JAX.
TOPK_BACKENDS: dict[str, Engine] = {engine.name: engine for engine in _RECORDS}


def missing() -> dict[str, str]:
    """The engines that cannot be used in this process, and why."""
    device = DeviceInfo.current()
    reasons = {name: engine.missing("topk", "jax", device) for name, engine in TOPK_BACKENDS.items()}
    return {name: why for name, why in reasons.items() if why}


def engine_here(rows: int, columns: int, topk: int, override: str | None = None) -> Any:
    """The function that serves these shapes here and now, or the one of the engine that is named."""
    call = Call(rows, columns, topk, DeviceInfo.current())
    return load(TOPK_BACKENDS[plan_topk(call, unable=missing(), override=override).backend].function)


def plan_topk(call: Call, *, unable: Mapping[str, str], override: str | None = None) -> Choice:
    """The engine that serves a call, the reason, and why not each of the others. Pure; arguments as `plan_call`'s.

    Raises:
      ValueError: an unknown name, or an override that cannot serve the call, with the reason.
    """
    return choose("topk", TOPK_BACKENDS, call, described="call", unable=unable, override=override)
