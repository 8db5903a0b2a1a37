"""Which kernel serves an attention call, and why. Pure: plain data in, plain data out, no JAX arrays.

`plan_attention` is what the attention functions call at trace time and what `jax-sparse-mla doctor` prints. Every
backend gets a line: chosen, or the reason why not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from jax_sparse_mla._checks import ArgumentChecks
from jax_sparse_mla.models import ModelSpec

PHASES = ("decode", "prefill")

# Preferred first; `_preference` has what measurements say otherwise.
BACKENDS = ("hopper", "flashmla", "flashinfer", "triton", "reference")

# Measured on an H200 (docs/routing.md): a decode call of at most so many blocks of 64 heads x 64 indices for each
# multiprocessor is done earlier by the Triton kernel than by FlashMLA with the copies that XLA needs around it.
_BLOCKS_PER_SM_BEFORE_FLASHMLA = 5

# Opt-in shared memory of one block, bytes, by compute capability (CUDA C++ Programming Guide, technical
# specifications, less the 1 KiB that the system keeps): XLA does not report it.
_SHARED_MEMORY_OPTIN = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """What routing needs to know of a device.

    Attributes:
      platform: "cpu" or "cuda".
      compute_capability: such as (9, 0); None on a CPU.
      sm_count: streaming multiprocessors; 0 on a CPU.
      shared_memory_optin: bytes of shared memory that one block may ask for; 0 on a CPU.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 0
    shared_memory_optin: int = 0

    def __post_init__(self) -> None:
        if self.compute_capability is not None:  # JSON has lists
            object.__setattr__(self, "compute_capability", tuple(self.compute_capability))

    @classmethod
    def current(cls) -> DeviceInfo:
        """The first device of JAX's default backend."""
        import jax

        device = jax.devices()[0]
        if device.platform not in ("gpu", "cuda"):
            return cls("cpu")
        major, minor = (int(part) for part in str(device.compute_capability).split("."))
        capability = (major, minor)
        return cls("cuda", capability, int(device.core_count), _SHARED_MEMORY_OPTIN.get(capability, 49_152))


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


@dataclasses.dataclass(frozen=True)
class _Call:
    phase: str
    num_q_tokens: int
    device: DeviceInfo
    kv_dtype: str
    num_heads: int
    topk: int | None


def paged_decode_row_cap(shared_memory_optin: int) -> int:
    """Query rows up to which FlashMLA's own schedule kernel fits in a block's shared memory.

    It keeps 5 int32 per row and one more: `4 · (5 · rows + 1) ≤ shared_memory_optin`. 11,673 at 228 KiB, the
    threshold that SGLang uses; 11,622 on an H200 (227 KiB).
    """
    return (shared_memory_optin // 4 - 1) // 5


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
) -> Plan:
    """Chooses the backend and kernel of an attention call.

    Args:
      phase: "decode" (paged caches) or "prefill" (bf16 workspace).
      spec: the model.
      num_q_tokens: query rows of the call.
      device: what will run it.
      installed: names of the installed backends; "reference" always counts as installed.
      kv_dtype: of the cache, "fp8" or "bf16".
      num_heads: query heads on this rank; the model's by default.
      topk: index columns of the call, both tables together. Without it the amount of work is unknown, and what was
        measured for calls of little work is not applied.
      override: a backend's name that must serve the call.

    Returns:
      The plan, with the reason of every backend that was not chosen.

    Raises:
      TypeError: an argument of another type.
      ValueError: an unknown phase, kv_dtype or backend name, sizes below 1, or an override that cannot run.
    """
    check = ArgumentChecks("plan_attention")
    for name, value, cls in (("spec", spec, ModelSpec), ("device", device, DeviceInfo)):
        if not isinstance(value, cls):
            raise TypeError(f"plan_attention: {name} must be a {cls.__name__}, got {type(value).__name__}")
    if isinstance(installed, str) or not isinstance(installed, Collection):
        raise TypeError(f"plan_attention: installed must be a set of backend names, got {type(installed).__name__}")
    num_heads = spec.num_heads if num_heads is None else num_heads
    _refuse_unknown("phase", phase, PHASES)
    _refuse_unknown("kv_dtype", kv_dtype, ("fp8", "bf16"))
    for name in installed:
        _refuse_unknown("installed backend", name, BACKENDS)
    if override is not None:
        _refuse_unknown("override backend", override, BACKENDS)
    sizes = {"num_q_tokens": (num_q_tokens, 0), "num_heads": (num_heads, 1), "topk": (0 if topk is None else topk, 0)}
    for name, (value, minimum) in sizes.items():
        check.static_int(name, value, minimum=minimum)

    call = _Call(phase, num_q_tokens, device, kv_dtype, num_heads, topk)
    unable = {}
    for name in BACKENDS:
        missing = None if name == "reference" or name in installed else "not installed"
        if reasons := [why for why in (missing, _CANNOT[name](call)) if why is not None]:
            unable[name] = "; ".join(reasons)
    if override is not None and override in unable:
        raise ValueError(f"plan_attention: backend {override!r} cannot serve this {phase} call: {unable[override]}")

    order = _preference(call)
    able = [name for name in order if name not in unable]
    chosen = override or able[0]
    kernel, kernel_reason = _kernel(chosen, call)
    why = "asked for by name" if override else f"the first of {', '.join(order)} that can serve it"
    not_chosen = "not asked for" if override else f"able, but {chosen} is preferred"
    return Plan(
        backend=chosen,
        kernel=kernel,
        reason=f"{why}; {kernel_reason}",
        rejected={name: unable.get(name, not_chosen) for name in BACKENDS if name != chosen},
    )


def _preference(call: _Call) -> tuple[str, ...]:
    """The backends, preferred first."""
    if call.phase != "decode" or call.device.compute_capability != (9, 0) or call.topk is None:
        return BACKENDS
    blocks = call.num_q_tokens * -(-call.num_heads // 64) * -(-call.topk // 64)
    much = blocks > _BLOCKS_PER_SM_BEFORE_FLASHMLA * call.device.sm_count
    return ("hopper", *(("flashmla", "triton") if much else ("triton", "flashmla")), "flashinfer", "reference")


def _refuse_unknown(what: str, value: str, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"plan_attention: {what} must be one of {', '.join(known)}, got {value!r}")


def _kernel(backend: str, call: _Call) -> tuple[str, str]:
    if call.phase == "prefill":
        return "sparse_prefill", "prefill attends to a bf16 workspace"
    cap = paged_decode_row_cap(call.device.shared_memory_optin)
    if backend == "flashmla" and call.num_q_tokens > cap:
        return (
            "sparse_prefill",
            f"{call.num_q_tokens} query rows are more than the {cap} for which FlashMLA's schedule fits in "
            f"{call.device.shared_memory_optin} bytes of shared memory",
        )
    return "paged_decode", "decode attends to the paged caches"


def _needs_cuda(call: _Call, capabilities: Callable[[tuple[int, int]], bool], which: str) -> str | None:
    device = call.device
    if device.platform != "cuda" or device.compute_capability is None:
        return f"needs a CUDA device ({which}), got {device.platform}"
    if not capabilities(device.compute_capability):
        major, minor = device.compute_capability
        return f"serves {which}, got compute capability {major}.{minor}"
    return None


def _needs_fp8_decode(call: _Call) -> str | None:
    if call.phase == "decode" and call.kv_dtype != "fp8":
        return f"its decode reads FP8 caches, got {call.kv_dtype}"
    return None


def _cannot_hopper(call: _Call) -> str | None:
    return _needs_cuda(call, lambda cc: cc == (9, 0), "SM90") or _needs_fp8_decode(call)


def _cannot_flashmla(call: _Call) -> str | None:
    why = _needs_cuda(call, lambda cc: cc == (9, 0) or cc[0] == 10, "SM90 and SM100") or _needs_fp8_decode(call)
    if why is None and call.num_heads > 128:
        why = f"its kernels take up to 128 heads, got {call.num_heads}"
    return why


def _cannot_flashinfer(call: _Call) -> str | None:
    why = _needs_cuda(call, lambda cc: cc[0] == 12, "SM120 and SM121") or _needs_fp8_decode(call)
    if why is None and call.phase == "prefill":
        why = "its sparse MLA reads the packed FP8 caches; it has no bf16 workspace prefill"
    if why is None and call.num_heads > 128:
        why = f"its kernels take up to 128 heads, got {call.num_heads}"
    return why


def _cannot_triton(call: _Call) -> str | None:
    return _needs_cuda(call, lambda cc: cc[0] >= 8, "SM80 and up")


_CANNOT: dict[str, Callable[[_Call], str | None]] = {
    "hopper": _cannot_hopper,
    "flashmla": _cannot_flashmla,
    "flashinfer": _cannot_flashinfer,
    "triton": _cannot_triton,
    "reference": lambda call: None,
}
