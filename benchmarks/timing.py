"""How the benchmarks time: CUPTI spans with the L2 flushed, cases of one operation, the machine's ceilings.

A module of `benchmarks.ops` offers `cases(rng) -> Iterator[Case]`; `python -m benchmarks.run` times and reports them.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch.profiler import ProfilerActivity, profile

from jax_sparse_mla.serving.bench import busy

__all__ = ["Case", "Operation", "Run", "Timer", "copy_rate", "host_time", "in_place", "kernel_backends", "matmul_rate"]

ATTEMPTS = 4  # where other processes keep the machine busy, CUPTI loses some operations
FLUSH_BYTES = 512 << 20  # several times the 60 MB L2 of an H200
# What empties the L2 before a call: sums over a buffer, which evict kernel code too; a memset, which does not; or a
# product with 300 MB of weights, as stands between the attention of two layers of a model.
READ, WRITE, STEP = FLUSHES = "read", "write", "step"
_STEP_ROWS, _STEP_DIM, _STEP_WIDTH = 64, 4096, 36_864  # 302 MB of bfloat16


class Run(NamedTuple):
    """A callable that launches the operation once, and the framework on whose stream it does: "jax" or "torch"."""

    call: Callable[[], object]
    framework: str


@dataclasses.dataclass
class Case:
    """One operation at one size.

    Attributes:
      name: the operation and its size.
      ours, peers: what to time, by name; peers are other projects' kernels, or plain XLA where nobody has one. A peer
        whose call raises `peers.NotMeasured` is reported with that reason.
      checks: by a peer's name, what compares its results with ours before it is timed: returns the largest difference,
        and raises AssertionError where the two are not the same operation.
      bytes: that must move: each input read once, each output written once.
      flop: that must be done, in the unit whose rate is `flop_unit` ("bf16" or "fp8").
    """

    name: str
    ours: dict[str, Run]
    peers: dict[str, Run]
    bytes: int
    flop: int = 0
    flop_unit: str = "bf16"
    checks: dict[str, Callable[[], float]] = dataclasses.field(default_factory=dict)


class Operation(NamedTuple):
    """A kernel, copy or fill on the device; microseconds since the call's first one began."""

    name: str
    start: float
    duration: float


class Timer:
    """Times calls by CUPTI, from the start of a call's first device operation to the end of its last.

    Flush, marker, call and marker follow each other on one framework's stream without a wait for the host, so the
    GPU neither idles nor slows its clocks before the call.

    Args:
      flush: one of FLUSHES; JAX's calls know READ alone.
    """

    def __init__(self, repeats: int = 15, flush: str = READ):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch allocates on the same GPU
        self.repeats, self.flush = repeats, flush
        if flush == STEP:
            self._rows = torch.randn(_STEP_ROWS, _STEP_DIM, device="cuda", dtype=torch.bfloat16)
            self._weights = torch.randn(_STEP_DIM, _STEP_WIDTH, device="cuda", dtype=torch.bfloat16)
        self.operations: list[Operation] = []
        self.busy: list[float] = []
        self._torch_flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self._torch_mark = torch.zeros(3, device="cuda")
        self._jax_flush = jax.jit(lambda x: x.sum())
        self._jax_buffer = jnp.ones(FLUSH_BYTES // 4)
        self._jax_mark = jax.jit(jnp.cosh)
        self._jax_marked = jnp.zeros(3)

    def __call__(self, run: Run) -> float:
        """The median in microseconds; the device operations of the last repeat stay in `operations`."""
        return self.in_turn([run])[0]

    def in_turn(self, runs: Sequence[Run]) -> list[float]:
        """The median of each in microseconds, of repeats that take turns.

        `operations` are the last call's, `busy` is the median time of each in which the GPU works.

        Raises:
          ValueError: calls of both frameworks: on two streams one call would run while the next one's L2 is flushed.
        """
        if len({run.framework for run in runs}) > 1:
            raise ValueError("calls that take turns must be of one framework, got jax and torch")
        for run in runs:
            for _ in range(3):
                self._once(run)
        self._wait()
        count = self.repeats * len(runs)
        for _ in range(ATTEMPTS):
            spans = self._profiled(runs)
            empty = [i for i, span in enumerate(spans) if not span]
            if len(spans) == count and not empty:
                break
        else:
            raise RuntimeError(f"the profiler saw {len(spans)} calls of {count}, and no operation in those at {empty}")
        first = spans[-1][0][1]
        self.operations = [Operation(name[:90], (s - first) / 1e3, (e - s) / 1e3) for name, s, e in spans[-1]]

        def medians(microseconds: list[float]) -> list[float]:
            return [statistics.median(microseconds[i :: len(runs)]) for i in range(len(runs))]

        self.busy = medians([busy([(start, end) for _, start, end in span]) / 1e3 for span in spans])
        return medians([(max(end for *_, end in span) - span[0][1]) / 1e3 for span in spans])

    def _profiled(self, runs: Sequence[Run]) -> list[list[tuple[str, int, int]]]:
        """Each call's operations that the profiler saw: name, start and end in nanoseconds. Without one of the marks,
        of which there are two for each call, there is a call less."""
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
            for _ in range(self.repeats):
                for run in runs:
                    self._once(run)
            self._wait()
        events = prof.profiler.kineto_results.events()
        events = sorted((e for e in events if "CUDA" in str(e.device_type())), key=lambda e: e.start_ns())
        spans, inside = [], False
        for event in events:
            if "cosh" in event.name():
                inside = not inside
                if inside:
                    spans.append([])
            elif inside:
                spans[-1].append((event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
        return spans[:-1] if inside else spans

    def _once(self, run: Run) -> None:
        if run.framework == "torch":
            self._flush_by_torch()
            self._torch_mark.cosh_()
            run.call()
            self._torch_mark.cosh_()
        elif self.flush != READ:
            raise ValueError(f"a call of JAX is timed behind {READ!r} alone, got {self.flush!r}")
        else:
            for _ in range(3):
                self._jax_flush(self._jax_buffer)
            self._jax_mark(self._jax_marked)
            out = run.call()
            self._jax_mark(self._jax_marked)
            del out

    def _flush_by_torch(self) -> None:
        if self.flush == STEP:
            self._rows @ self._weights
            return
        for _ in range(3):
            self._torch_flush.zero_() if self.flush == WRITE else self._torch_flush.sum()

    def _wait(self) -> None:
        jax.block_until_ready(self._jax_flush(self._jax_buffer))
        torch.cuda.synchronize()


def kernel_backends(phase: str) -> list[str]:
    """The backends that can serve this phase here, but for plain XLA; FlashInfer's attention is for SM120 alone."""
    from jax_sparse_mla import DeviceInfo
    from jax_sparse_mla.attention.machine import installed_for

    elsewhere = set() if (DeviceInfo.current().compute_capability or (0,))[0] == 12 else {"flashinfer"}
    return sorted(installed_for(phase) - {"reference"} - elsewhere)


def in_place(function: Callable, state: object, *args) -> Run:
    """A JAX call of `function(state, *args)` with the state donated: each call takes what the last one returned."""
    jitted = jax.jit(function, donate_argnums=0)
    kept = [state]

    def call():
        kept[0] = jitted(kept[0], *args)
        return kept[0]

    return Run(call, "jax")


def host_time(run: Run, calls: int, times: int = 9) -> float:
    """Microseconds until `calls` calls are enqueued, per call; so few that none waits for the device."""

    def wait(out):
        jax.block_until_ready(out) if run.framework == "jax" else torch.cuda.synchronize()

    wait(run.call())
    enqueued = []
    for _ in range(times):
        start = time.perf_counter()
        for _ in range(calls):
            out = run.call()
        enqueued.append((time.perf_counter() - start) / calls * 1e6)
        wait(out)
    return round(statistics.median(enqueued), 1)


def copy_rate(timer: Timer, moved: int = 2 << 30) -> float:
    """TB/s of a device copy that reads and writes `moved` bytes in all."""
    source = torch.randint(0, 2**31 - 1, (moved // 8,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return moved / timer(Run(lambda: target.copy_(source), "torch")) / 1e6


def matmul_rate(timer: Timer, n: int = 8192, unit: str = "bf16") -> float:
    """TFLOP/s of an n x n x n matrix product of random values through torch, in bf16 or fp8 (e4m3, bf16 result)."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if unit == "bf16":
        return 2 * n**3 / timer(Run(lambda: a @ b, "torch")) / 1e6
    one = torch.ones((), device="cuda")
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
    product = Run(lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), "torch")
    return 2 * n**3 / timer(product) / 1e6
