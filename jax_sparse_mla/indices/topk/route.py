"""Which kernel serves a top-k, and why. Pure: plain data in, plain data out, as `attention/route.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

# Preferred first: the order of the times on an H200 (`python -m benchmarks.run --op topk`).
TOPK_BACKENDS = ("cuda", "triton", "flashinfer", "xla")

_FLASHINFER_MAX_TOPK = 2048
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9))  # 100 KB a multiprocessor; on 12.x, where it is no more, its CUB kernel serves


@dataclasses.dataclass(frozen=True)
class TopkPlan:
    """The decision for one call.

    Attributes:
      backend: one of `TOPK_BACKENDS`; "xla" is plain JAX.
      reason: why this one.
      rejected: each other backend and why not.
    """

    backend: str
    reason: str
    rejected: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Call:
    rows: int
    columns: int
    topk: int
    capability: tuple[int, int] | None


def plan_topk(
    *,
    rows: int,
    columns: int,
    topk: int,
    capability: tuple[int, int] | None,
    installed: Collection[str],
    override: str | None = None,
) -> TopkPlan:
    """Decides which backend serves a call of these shapes.

    Args:
      rows, columns: of the logits.
      topk: how many indices.
      capability: the CUDA device's compute capability, such as (9, 0); None without one.
      installed: names of the backends that are installed; "xla" always is.
      override: a backend's name, taken if it can serve the call.

    Returns:
      The plan.

    Raises:
      ValueError: an unknown name, or an override that cannot serve the call, with the reason.
    """
    for name in (*installed, *(() if override is None else (override,))):
        if name not in TOPK_BACKENDS:
            raise ValueError(f"plan_topk: a top-k backend is one of {', '.join(TOPK_BACKENDS)}, got {name!r}")
    call = _Call(rows, columns, topk, capability)
    unable = {}
    for name in TOPK_BACKENDS:
        missing = None if name == "xla" or name in installed else "not installed"
        if reasons := [why for why in (missing, _CANNOT[name](call)) if why is not None]:
            unable[name] = "; ".join(reasons)
    if override in unable:
        raise ValueError(f"plan_topk: backend {override!r} cannot serve this call: {unable[override]}")
    chosen = override or next(name for name in TOPK_BACKENDS if name not in unable)
    not_chosen = "not asked for" if override else f"able, but {chosen} is preferred"
    return TopkPlan(
        backend=chosen,
        reason="asked for by name" if override else f"the first of {', '.join(TOPK_BACKENDS)} that can serve it",
        rejected={name: unable.get(name, not_chosen) for name in TOPK_BACKENDS if name != chosen},
    )


def _needs_sm80(call: _Call) -> str | None:
    if call.capability is None:
        return "needs a CUDA device"
    if call.capability < (8, 0):
        return "serves compute capability 8.0 and up, got {}.{}".format(*call.capability)
    if call.rows == 0 or call.columns == 0:
        return "there is nothing to read"
    return None


def _cannot_flashinfer(call: _Call) -> str | None:
    why = _needs_sm80(call)
    most = min(_FLASHINFER_MAX_TOPK, call.columns)
    if why is None and call.topk > most:
        why = f"takes topk up to {most} here, got {call.topk}"
    if why is None and call.capability in _SMALL_SHARED_MEMORY:
        why = "needs 128 KiB of shared memory a multiprocessor"
    return why


_CANNOT: dict[str, Callable[[_Call], str | None]] = {
    "cuda": _needs_sm80,
    "triton": _needs_sm80,
    "flashinfer": _cannot_flashinfer,
    "xla": lambda call: None,
}
