"""Which kernel serves an attention call on torch tensors, and why: the router of `jax_sparse_mla` on torch's devices.

A backend's functions for torch stand in `attention/backends/<name>.py`: `decode` and `prefill` make the call of one
shape; `decode_obstacle` and `prefill_obstacle`, where there are any, say why the backend cannot take these tensors;
`WRITES_INTO` says whether its calls write into results that they are given, `PREFILL_APART` of which tensors prefill
takes tokens that stand evenly apart.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch

from jax_sparse_mla.attention.backend import BACKENDS, Call
from jax_sparse_mla.attention.machine import override_of
from jax_sparse_mla.attention.route import Plan, plan_call
from jax_sparse_mla.device import DeviceInfo
from sparse_mla_torch.attention.beside_flashmla import why_flashmla_alone


class FasterAlone(Exception):
    """FlashMLA's own kernel does a call sooner, and the caller has it; the message says why."""


def plan(call: Call, *arguments: Any, beside_flashmla: bool = False) -> Plan:
    """The backend of a call; the environment's overrides are read.

    `arguments` are those of the backends' `decode_obstacle` or `prefill_obstacle`; without them none is asked.

    Raises:
      ValueError: the environment names a backend that cannot serve the call, with the reason.
      FasterAlone: `beside_flashmla` (the caller has FlashMLA's functions), and the environment names no backend.
    """
    override = override_of(call.phase)
    unable = unable_for(call.phase, call.device)
    for name in BACKENDS if arguments else ():
        asked = name not in unable and override in (None, name)  # a backend may have to compile before it answers
        obstacle = None if not asked else getattr(backend_module(name), f"{call.phase}_obstacle", None)
        if obstacle is not None and (why := obstacle(*arguments)):
            unable[name] = why
    made = plan_call(call, unable=unable, override=override)
    if beside_flashmla and override is None and (why := why_flashmla_alone(call, made.backend)):
        raise FasterAlone(why)
    return made


def unable_for(phase: str, device: DeviceInfo) -> dict[str, str]:
    """The backends that torch cannot take for a phase here, whatever the call, and why."""
    unable = {}
    for name, backend in BACKENDS.items():
        why = backend.wrong_device(device)
        if why is None and phase not in backend.torch:
            why = f"torch does not call its {phase}"
        if why := why or missing(name, phase, device):
            unable[name] = why
    return unable


@functools.cache
def missing(name: str, phase: str, device: DeviceInfo) -> str | None:
    """Why a backend cannot be used from torch in this process; None if it can."""
    return BACKENDS[name].missing(phase, "torch", device)


def backend_module(name: str) -> ModuleType:
    """A backend's functions for torch."""
    return importlib.import_module(f"sparse_mla_torch.attention.backends.{name}")


@functools.cache
def device_info(device: torch.device) -> DeviceInfo:
    """Torch's device as the router takes it; JAX is not asked."""
    if device.type != "cuda":
        return DeviceInfo("cpu")
    gpu = torch.cuda.get_device_properties(device)
    return DeviceInfo("cuda", (gpu.major, gpu.minor), gpu.multi_processor_count, gpu.shared_memory_per_block_optin)
