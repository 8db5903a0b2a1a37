"""The backends that this machine can run and the one that the environment names; `route` decides from them."""

from __future__ import annotations

import os

from jax_sparse_mla.attention.backend import BACKENDS, Call
from jax_sparse_mla.attention.route import Plan, plan_call
from jax_sparse_mla.device import DeviceInfo, has_gpu


def missing_for(phase: str) -> dict[str, str]:
    """The backends that cannot serve this phase in this process, whatever the call, and why."""
    device = DeviceInfo.current()
    missing = {}
    for name, backend in BACKENDS.items():
        why = backend.wrong_device(device)
        if why is None and device.platform == "cuda" and not has_gpu():
            why = None if backend.devices is None else "JAX has no GPU here"
        if why := why or backend.missing(phase, "jax", device):
            missing[name] = why
    return missing


def installed_for(phase: str) -> frozenset[str]:
    """Names of the backends that can serve this phase here, for some call."""
    return frozenset(BACKENDS) - missing_for(phase).keys()


def plan_here(call: Call, *, backend: str | None = None) -> Plan:
    """The plan of a call on this machine, by the named backend, or the environment's, or by the router's choice.

    Raises:
      ValueError: the named backend is unknown or cannot serve the call, with the reason.
    """
    return plan_call(call, unable=missing_for(call.phase), override=backend or override_of(call.phase))


def override_of(phase: str) -> str | None:
    """The backend that the environment names for a phase."""
    names = (f"JAX_SPARSE_MLA_{phase.upper()}_BACKEND", "JAX_SPARSE_MLA_BACKEND")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
