"""The record of a backend, whatever its operation: its devices, what it needs installed, and how one is chosen.

A record is plain data. Reading it imports no kernel, no triton and no torch: functions are named by strings
("module:function") and loaded when they are called.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.packages import is_found, version, why_not

FRAMEWORKS = ("jax", "torch")

Capability = tuple[int, int]
SM80_AND_UP, SM90, SM100, SM120 = ((8, 0), (99, 9)), ((9, 0), (9, 0)), ((10, 0), (10, 9)), ((12, 0), (12, 9))


@dataclasses.dataclass(frozen=True)
class Need:
    """A package that a backend calls.

    Attributes:
      distributions: what to install for it; any one of them will do.
      modules: what they are imported as; one of them must be found.
      frameworks, phases: which calls need it; no phases stand for all.
    """

    distributions: tuple[str, ...]
    modules: tuple[str, ...]
    frameworks: tuple[str, ...] = FRAMEWORKS
    phases: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Why the package cannot be used; None if it can. It is imported, and warned of where that fails.

        Of several modules none is imported: the backend's `unready` loads the one that it takes.
        """
        if not any(map(is_found, self.modules)):
            return f"{' or '.join(self.distributions)} is not installed"
        return why_not(self.modules[0]) if len(self.modules) == 1 else None

    def versions(self) -> str:
        """The versions that are installed, as `jax-sparse-mla doctor` prints them."""
        versions = [f"{name} {number}" for name in self.distributions if (number := version(name))]
        return ", ".join(versions) or self.missing() or " or ".join(self.modules)


KERNEL_UNUSABLE = "its CUDA kernel cannot be used here: a warning says why"

TVM_FFI = Need(("apache-tvm-ffi",), ("tvm_ffi",))
TRITON = Need(("triton",), ("triton",))
TRITON_LAUNCHER = Need(("apache-tvm-ffi", "jax-triton"), ("tvm_ffi", "jax_triton"), frameworks=("jax",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """The record of one backend of some operation.

    Attributes:
      name: as overrides and plans name it.
      devices: ranges of compute capabilities, both ends included; None: any device.
      device_names: the same in words.
      needs: the packages that it calls.
      binaries: by phase, the CUDA kernel of ours that it launches and its architecture, as `launch.build` has them;
        None is the device's own, of a kernel that uses no feature of one architecture alone.
      unready: "module:function" of `(phase, framework) -> str | None`, which says why the backend cannot be used here
        although its packages are found; it may load a kernel. None: nothing is left to ask.
    """

    name: str
    devices: tuple[tuple[Capability, Capability], ...] | None = None
    device_names: str = ""
    needs: tuple[Need, ...] = ()
    binaries: Mapping[str, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    unready: str | None = None

    def cannot(self, call: Any) -> list[str]:
        """Why the backend cannot take the call, from plain data; empty if it can."""
        return [why for why in (self.wrong_device(call.device), *self.refuses(call)) if why]

    def refuses(self, call: Any) -> Sequence[str | None]:
        """Why the backend cannot take the call on any device; None or nothing where it can."""
        return ()

    def wrong_device(self, device: DeviceInfo) -> str | None:
        """Why the backend does not run on the device; None if it does."""
        if self.devices is None:
            return None
        capability = device.compute_capability
        if device.platform != "cuda" or capability is None:
            return f"needs a CUDA device ({self.device_names}), got {device.platform}"
        if any(first <= capability <= last for first, last in self.devices):
            return None
        return "serves {}, got compute capability {}.{}".format(self.device_names, *capability)

    def binary(self, phase: str, device: DeviceInfo) -> tuple[str, str] | None:
        """The CUDA kernel of a phase, and the architecture that the device takes it of; None without one."""
        if phase not in self.binaries:
            return None
        kernel, arch = self.binaries[phase]
        return kernel, arch or "{}{}".format(*device.compute_capability)

    def missing(self, phase: str, framework: str, device: DeviceInfo) -> str | None:
        """Why the backend cannot be used in this process, on any call; None if it can.

        It builds its CUDA kernel if need be, for a device that it serves.
        """
        if why := self.wrong_device(device):
            return why
        for need in self.needs:
            if framework in need.frameworks and phase in (need.phases or (phase,)) and (why := need.missing()):
                return why
        binary = self.binary(phase, device)
        if binary and load("jax_sparse_mla.launch.build:module")(*binary) is None:
            return KERNEL_UNUSABLE
        return None if self.unready is None else load(self.unready)(phase, framework)


def load(name: str) -> Any:
    """The object that "module:attribute" names."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def first_able(backends: Mapping[str, Any], call: Any, phase: str, framework: str = "jax") -> Any:
    """The record of the first backend that can serve a call in this process; the last one always can.

    Only those are asked for their packages and kernels that can take the call.
    """
    *preferred, last = backends.values()
    return next((x for x in preferred if not x.cannot(call) and not x.missing(phase, framework, call.device)), last)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The decision for one call: the backend's name, why it is this one, and why not each of the others."""

    backend: str
    reason: str
    rejected: dict[str, str]


def choose(
    function: str,
    backends: Mapping[str, Backend],
    call: Any,
    *,
    described: str,
    unable: Mapping[str, str],
    order: Sequence[str] | None = None,
    override: str | None = None,
) -> Choice:
    """The first backend that can serve a call. Pure.

    Args:
      function: named by errors.
      backends: the records by name, preferred first; the last one serves every call.
      call: what the records' `cannot` takes.
      described: the call in an error's words, such as "decode call".
      unable: backends that cannot be used for reasons that the call does not hold, and why.
      order: the names, preferred first, where it is another order than the records'.
      override: the name of the backend that must serve the call.

    Raises:
      ValueError: an unknown name, or an override that cannot serve the call, with the reason.
    """
    if override is not None:
        refuse_unknown(function, "override backend", override, backends)
    reasons = {
        name: dict.fromkeys(filter(None, [unable.get(name), *backend.cannot(call)]))
        for name, backend in backends.items()
    }
    cannot = {name: "; ".join(why) for name, why in reasons.items() if why}
    if override in cannot:
        raise ValueError(f"{function}: backend {override!r} cannot serve this {described}: {cannot[override]}")
    order = tuple(backends) if order is None else order
    chosen = override or next(name for name in order if name not in cannot)
    not_chosen = "not asked for" if override else f"able, but {chosen} is preferred"
    return Choice(
        backend=chosen,
        reason="asked for by name" if override else f"the first of {', '.join(order)} that can serve it",
        rejected={name: cannot.get(name, not_chosen) for name in backends if name != chosen},
    )


def refuse_unknown(function: str, what: str, value: Any, known: Any) -> None:
    """Raises a ValueError for a value that is none of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{function}: {what} must be one of {', '.join(known)}, got {value!r}")
