"""Which kernel serves an attention call on torch tensors, and why: `jax_sparse_mla.plan_attention` on torch's facts."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from jax_sparse_mla.attention.backends import flashmla
from jax_sparse_mla.attention.route import DeviceInfo, Plan, plan_attention
from jax_sparse_mla.kernels import build
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32

# Measured once, on an H200 (docs/torch.md).
_HOPPER_BY_NAME = "served where it is asked for by name: launching it from torch takes the host longer than FlashMLA"


def plan_call(
    phase: str,
    layout: KVLayout,
    *,
    rows: int,
    heads: int,
    topk: int,
    device: DeviceInfo,
    installed: Collection[str],
    against: Mapping[str, str] = MappingProxyType({}),
    override: str | None = None,
) -> Plan:
    """The backend of a call. Pure.

    Args:
      phase: "decode" or "prefill".
      layout: of the cached rows, or of the workspace.
      rows, heads: query rows and heads, at least 1.
      topk: index columns of a row, of both tables.
      device: what will run it.
      installed: names of the installed backends.
      against: backends that cannot take these tensors, and why.
      override: a backend's name that must serve the call.

    Raises:
      ValueError: an override that cannot serve the call.
    """
    if override in against:
        raise ValueError(f"plan_call: backend {override!r} cannot serve this {phase} call: {against[override]}")
    if phase == "decode" and device.compute_capability == (9, 0) and override != "hopper":
        against = {"hopper": _HOPPER_BY_NAME} | dict(against)
    plan = plan_attention(
        phase,
        DEEPSEEK_V32 if layout.qk_dim == DEEPSEEK_V32.qk_dim else DEEPSEEK_V4_FLASH,
        num_q_tokens=rows,
        device=device,
        installed=set(installed) - set(against),
        kv_dtype="fp8" if layout.fp8_dim else "bf16",
        num_heads=heads,
        topk=topk,
        override=override,
    )
    return dataclasses.replace(plan, rejected=plan.rejected | against)


def override_of(phase: str) -> str | None:
    """The backend that the environment names: JAX_SPARSE_MLA_DECODE_BACKEND, …_PREFILL_BACKEND, …_BACKEND."""
    names = (f"JAX_SPARSE_MLA_{phase.upper()}_BACKEND", "JAX_SPARSE_MLA_BACKEND")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


@functools.cache
def unnamed_backends(device_type: str) -> frozenset[str]:
    """Of the backends that serve without being asked for by name, those whose packages are there."""
    names = {"reference"}
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        names.add("triton")
        if flashmla.has_operators():  # our sanitiser goes before them
            names.add("flashmla")
    return frozenset(names)


@functools.cache
def installed_backends(device_type: str) -> frozenset[str]:
    """All that torch calls and that can be used here; on SM90 our kernel is loaded, and built if need be."""
    sm90 = device_type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    ours = {"hopper"} if sm90 and build.sparse_decode_module() is not None else set()
    return unnamed_backends(device_type) | ours


def candidates(device_type: str, override: str | None) -> frozenset[str]:
    """What a call is planned with: nothing is built that it does not name."""
    return installed_backends(device_type) if override == "hopper" else unnamed_backends(device_type)


@functools.cache
def device_info(device: torch.device) -> DeviceInfo:
    """What routing needs to know of torch's device; JAX is not asked."""
    if device.type != "cuda":
        return DeviceInfo("cpu")
    facts = torch.cuda.get_device_properties(device)
    capability = (facts.major, facts.minor)
    return DeviceInfo("cuda", capability, facts.multi_processor_count, facts.shared_memory_per_block_optin)
