"""Which backend and kernel serve an attention call, and why. Pure: plain data in, plain data out, no JAX arrays.

`plan_call` decides from a `Call` and the records of `attention/backend.py`; `plan_attention` is the same for a model.
The attention functions call it at trace time, and `jax-sparse-mla doctor` prints it. Every backend gets a line: chosen,
or the reason why not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.attention.backend import BACKENDS, PHASES, Call
from jax_sparse_mla.backend import choose, refuse_unknown
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.layout import bf16_layout, workspace_layout
from jax_sparse_mla.models import ModelSpec

# Measured on an H200 (docs/reference/routing.md): a decode call of at most so many blocks of 64 heads x 64 indices for
# each multiprocessor is done earlier by the Triton kernel than by FlashMLA with the copies that XLA needs around it.
_BLOCKS_PER_SM_BEFORE_FLASHMLA = 5

# Measured on an H200 (docs/reference/routing.md): from so many rows on, a prefill chunk is done earlier from a gathered
# workspace than from the paged caches.
GATHERED_FROM_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decision for one call.

    Attributes:
      backend: one of `BACKENDS`.
      kernel: "paged_decode" (attends to the paged caches) or "sparse_prefill" (attends to a bf16 workspace).
      reason: why this backend and this kernel.
      rejected: each other backend and why not.
    """

    backend: str
    kernel: str
    reason: str
    rejected: dict[str, str]


def plan_attention(
    phase: str,
    spec: ModelSpec,
    *,
    num_q_tokens: int,
    device: DeviceInfo,
    installed: Collection[str],
    kv_dtype: str = "fp8",
    num_heads: int | None = None,
    topk: int | None = None,
    override: str | None = None,
    batch_invariant: bool = False,
) -> Plan:
    """Chooses the backend and kernel of an attention call.

    Args:
      phase: "decode" (paged caches) or "prefill" (bf16 workspace).
      spec: the model.
      num_q_tokens: query rows of the call.
      device: what will run it.
      installed: names of the installed backends; "reference" always counts as installed.
      kv_dtype: of the cache: "fp8" stands for the model's own layout, "bf16" for the unquantised one.
      num_heads: query heads on this rank; the model's by default.
      topk: index columns of the call, both tables together. Without it the amount of work is unknown, and what was
        measured for calls of little work is not applied.
      override: a backend's name that must serve the call.
      batch_invariant: whether a row's result must not depend on the other rows (`sparse_mla_decode`).

    Returns:
      The plan, with the reason of every backend that was not chosen.

    Raises:
      TypeError: an argument of another type.
      ValueError: an unknown phase, kv_dtype or backend name, sizes below 1, or an override that cannot run.
    """
    function = "plan_attention"
    check = ArgumentChecks(function)
    for name, value, cls in (("spec", spec, ModelSpec), ("device", device, DeviceInfo)):
        if not isinstance(value, cls):
            raise TypeError(f"{function}: {name} must be a {cls.__name__}, got {type(value).__name__}")
    if isinstance(installed, str) or not isinstance(installed, Collection):
        raise TypeError(f"{function}: installed must be a set of backend names, got {type(installed).__name__}")
    num_heads = spec.num_heads if num_heads is None else num_heads
    refuse_unknown(function, "phase", phase, PHASES)
    refuse_unknown(function, "kv_dtype", kv_dtype, ("fp8", "bf16"))
    for name in installed:
        refuse_unknown(function, "installed backend", name, BACKENDS)
    sizes = {"num_q_tokens": (num_q_tokens, 0), "num_heads": (num_heads, 1), "topk": (0 if topk is None else topk, 0)}
    for name, (value, minimum) in sizes.items():
        check.static_int(name, value, minimum=minimum)
    if spec.kv_layout.extra_only:
        raise check.fail(
            f"spec.kv_layout must be that of the first cache; {spec.kv_layout.name} is an extra cache's alone"
        )
    layout = spec.kv_layout if kv_dtype == "fp8" else bf16_layout(spec.kv_layout)
    layout = workspace_layout(layout.qk_dim) if phase == "prefill" else layout
    call = Call(phase, layout, num_q_tokens, num_heads, device, topk, batch_invariant=batch_invariant)
    unable = {name: "not installed" for name in BACKENDS if name != "reference" and name not in installed}
    return plan_call(call, unable=unable, override=override)


def plan_call(call: Call, *, unable: Mapping[str, str], override: str | None = None) -> Plan:
    """The backend and kernel of a call, or of the backend that `override` names. Pure.

    `unable` are backends that cannot be used for reasons that the call does not hold (what is not installed, what the
    tensors do not allow), and why.

    Raises:
      ValueError: an unknown name, or an override that cannot serve the call, with the reason.
    """
    described, order = f"{call.phase} call", _preference(call)
    choice = choose(
        "plan_attention", BACKENDS, call, described=described, unable=unable, order=order, override=override
    )
    kernel, reason = _kernel(choice.backend, call)
    return Plan(choice.backend, kernel, f"{choice.reason}; {reason}", choice.rejected)


def _preference(call: Call) -> tuple[str, ...]:
    """The backends, preferred first."""
    order = tuple(BACKENDS)
    if call.phase != "decode" or call.device.compute_capability != (9, 0) or call.topk is None:
        return order
    blocks = call.num_q_tokens * -(-call.num_heads // 64) * -(-call.topk // 64)
    if blocks > _BLOCKS_PER_SM_BEFORE_FLASHMLA * call.device.sm_count:
        return order
    before = order.index("flashmla")
    others = [name for name in order if name != "triton"]
    return (*others[:before], "triton", *others[before:])


def _kernel(backend: str, call: Call) -> tuple[str, str]:
    """The caches that a call attends to, paged ones or a workspace gathered from them, and why."""
    if call.phase == "prefill":
        return "sparse_prefill", "prefill attends to a bf16 workspace"
    rows, limit = call.num_q_tokens, BACKENDS[backend].most_decode_rows
    if limit is not None and rows > (cap := limit(call.device)):
        return (
            "sparse_prefill",
            f"{rows} query rows are more than the {cap} for which FlashMLA's schedule fits in "
            f"{call.device.shared_memory_optin} bytes of shared memory",
        )
    if call.chunk and rows >= GATHERED_FROM_ROWS:
        return "sparse_prefill", f"a chunk of {GATHERED_FROM_ROWS} rows or more is best gathered, this one has {rows}"
    return "paged_decode", "decode attends to the paged caches"
