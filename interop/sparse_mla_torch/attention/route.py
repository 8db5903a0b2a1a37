"""Which kernel serves an attention call on torch tensors, and why: `jax_sparse_mla.plan_attention` on torch's facts."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Collection

import torch

from jax_sparse_mla.attention.route import DeviceInfo, Plan, plan_attention
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32


def plan_call(
    phase: str,
    layout: KVLayout,
    *,
    rows: int,
    heads: int,
    topk: int,
    device: DeviceInfo,
    installed: Collection[str],
    against_flashmla: str | None = None,
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
      against_flashmla: why FlashMLA's operators cannot take these tensors, if they cannot.
      override: a backend's name that must serve the call.

    Raises:
      ValueError: an override that cannot serve the call.
    """
    if against_flashmla and override == "flashmla":
        raise ValueError(f"plan_call: backend 'flashmla' cannot serve this {phase} call: {against_flashmla}")
    plan = plan_attention(
        phase,
        DEEPSEEK_V32 if layout.qk_dim == DEEPSEEK_V32.qk_dim else DEEPSEEK_V4_FLASH,
        num_q_tokens=rows,
        device=device,
        installed=set(installed) - ({"flashmla"} if against_flashmla else set()),
        kv_dtype="fp8" if layout.fp8_dim else "bf16",
        num_heads=heads,
        topk=topk,
        override=override,
    )
    if against_flashmla:
        plan = dataclasses.replace(plan, rejected=plan.rejected | {"flashmla": against_flashmla})
    return plan


def override_of(phase: str) -> str | None:
    """The backend that the environment names: JAX_SPARSE_MLA_DECODE_BACKEND, …_PREFILL_BACKEND, …_BACKEND."""
    names = (f"JAX_SPARSE_MLA_{phase.upper()}_BACKEND", "JAX_SPARSE_MLA_BACKEND")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


@functools.cache
def installed_backends(device_type: str) -> frozenset[str]:
    """Of the backends that torch calls, those whose packages are there; nothing is imported."""

    def found(name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    names = {"reference"}
    if device_type == "cuda" and found("triton"):
        names.add("triton")
        if found("flash_mla") or found("sgl_kernel"):  # our sanitiser goes before it
            names.add("flashmla")
    return frozenset(names)


@functools.cache
def device_info(device: torch.device) -> DeviceInfo:
    """What routing needs to know of torch's device; JAX is not asked."""
    if device.type != "cuda":
        return DeviceInfo("cpu")
    facts = torch.cuda.get_device_properties(device)
    capability = (facts.major, facts.minor)
    return DeviceInfo("cuda", capability, facts.multi_processor_count, facts.shared_memory_per_block_optin)
