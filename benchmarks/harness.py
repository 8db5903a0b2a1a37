"""Times cases beside other projects' kernels, prints a table and writes the rows as JSON.

An operation's cases are data: a `Spec` has a name and makes its `Case` when its turn comes. Peer and ours run in one
process on the same inputs, and a peer's result is compared with ours before it is timed. Times are CUPTI's, with the L2
flushed. The ceiling is the larger of bytes over the rate of a device copy and operations over the rate of a matrix
product, both measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

try:
    import torch
except ImportError:  # the benchmarks in JAX alone do without it
    torch = None

ROOT = Path(__file__).resolve().parents[1]

_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "apache-tvm-ffi")
_PACKAGES += ("sgl-flash-mla", "sgl-deep-gemm", "sglang", "sglang-kernel", "flashinfer-python", "vllm")
_PACKAGES += ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "tilelang", "transformers", "maxtext")
ATTEMPTS = 4  # where other processes keep the machine busy, CUPTI loses some operations
FLUSH_BYTES = 512 << 20  # several times the 60 MB L2 of an H200
# What empties the L2 before a call: sums over a buffer, which evict kernel code too; a memset, which does not; or a
# product with 300 MB of weights, as stands between the attention of two layers of a model.
READ, WRITE, STEP = FLUSHES = "read", "write", "step"
_STEP_ROWS, _STEP_DIM, _STEP_WIDTH = 64, 4096, 36_864  # 302 MB of bfloat16


class NotMeasured(Exception):
    """A peer that cannot be loaded or called here; the message says why."""


# --- what stands beside the rows -------------------------------------------------------------------


def environment() -> dict:
    """Device, driver, versions, commit and command."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    device, _, driver = (gpu or "").splitlines()[0].partition(", ") if gpu else (None, None, None)
    changed = "-dirty" if _output("git", "-C", str(ROOT), "status", "--porcelain") else ""
    commit = os.environ.get("COMMIT") or f"{_output('git', '-C', str(ROOT), 'log', '-1', '--format=%h') or ''}{changed}"
    versions = {name: number for name in _PACKAGES if (number := version(name))}
    command = " ".join(["python", *sys.orig_argv[1:]])
    return {"device": device, "driver": driver, "versions": versions, "commit": commit, "command": command}


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_names() -> list[str]:
    """The GPUs that programs see, as CUDA_VISIBLE_DEVICES calls them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(len((_output("nvidia-smi", "-L") or "").splitlines()))]


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(name: str, rows: Sequence[dict], **more: object) -> None:
    """Writes NAME.json into $OUT or benchmarks/out, whole or not at all: a run may be stopped at any time."""
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "out")
    folder.mkdir(parents=True, exist_ok=True)
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in (environment() | more).items())
    partial = folder / f"{name}.partial"
    partial.write_text("{\n" + head + ' "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n")
    partial.replace(folder / f"{name}.json")


def parser(description: str, only: str | None = "cases whose names begin so") -> argparse.ArgumentParser:
    """A benchmark's arguments: which cases, where `only` says how they are named, and whether only to list them."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    if only:
        made.add_argument("--only", nargs="*", default=[""], metavar="NAME", help=only)
    made.add_argument("--dry-run", action="store_true", help="list the cases; needs no GPU")
    return made


def show(row: dict) -> None:
    """Prints a row as it comes."""
    print("  ".join(str(value) if key == "case" else f"{key} {value}" for key, value in row.items()), flush=True)


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def attempt(measure: Callable[[], dict]) -> dict:
    """The result of `measure`, or why it was not measured or failed, which costs only itself."""
    try:
        return measure()
    except NotMeasured as reason:
        return {"not_measured": str(reason)}
    except Exception as error:
        return {"failed": described(error)}


def run_cases(name: str, cases: Iterable[tuple[str, Callable[[], dict]]], **more: object) -> list[dict]:
    """A row for each case's name and `measure`, printed as it comes and written to NAME.json."""
    rows = []
    for case, measure in cases:
        rows.append({"case": case, **attempt(measure)})
        show(rows[-1])
        write(name, rows, **more)
        gc.collect()  # an engine may be part of a cycle, and holds its caches
        if torch is not None:
            torch.cuda.empty_cache()
    return rows


def status(rows: Iterable[dict]) -> int:
    """A benchmark's exit status: 1 where a case failed."""
    return int(any("failed" in row for row in rows))


# --- time ------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A callable that launches the operation once, and the framework on whose stream it does: "jax" or "torch"."""

    call: Callable[[], object]
    framework: str


class Operation(NamedTuple):
    """A kernel, copy or fill on a device; nanoseconds. All that one launch of a CUDA graph runs has its id."""

    name: str
    start: int
    end: int
    launch: int
    device: int


def device_operations(run: Callable[[], object]) -> list[Operation]:
    """The operations of all GPUs while `run()` runs, which must wait for them; in order of start."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
    operations = [
        Operation(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.correlation_id(), e.device_index())
        for e in profiler.profiler.kineto_results.events()
        if "CUDA" in str(e.device_type())
    ]
    return sorted(operations, key=lambda operation: operation.start)


def busy(operations: Iterable[Operation]) -> int:
    """Nanoseconds in which at least one of these operations runs."""
    covered = last = 0
    for start, end in sorted((operation.start, operation.end) for operation in operations):
        covered += max(0, end - max(start, last))
        last = max(last, end)
    return covered


def busy_by_gpu(run: Callable[[], object]) -> list[int]:
    """Nanoseconds that each GPU works while `run()` runs, which must wait for them."""
    operations = device_operations(run)
    devices = sorted({operation.device for operation in operations})
    return [busy(operation for operation in operations if operation.device == device) for device in devices]


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

    @functools.cached_property
    def _jax(self) -> tuple:
        """JAX's flush and mark, each behind with its array; not every process of an engine has JAX."""
        import jax
        import jax.numpy as jnp

        return jax.jit(lambda x: x.sum()), jnp.ones(FLUSH_BYTES // 4), jax.jit(jnp.cosh), jnp.zeros(3)

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
        self.operations = spans[-1]

        def medians(microseconds: list[float]) -> list[float]:
            return [statistics.median(microseconds[i :: len(runs)]) for i in range(len(runs))]

        self.busy = medians([busy(span) / 1e3 for span in spans])
        return medians([(max(operation.end for operation in span) - span[0].start) / 1e3 for span in spans])

    def _profiled(self, runs: Sequence[Run]) -> list[list[Operation]]:
        """Each call's operations that the profiler saw. Without one of the marks, of which there are two for each call,
        there is a call less."""

        def turns() -> None:
            for _ in range(self.repeats):
                for run in runs:
                    self._once(run)
            self._wait()

        spans, inside = [], False
        for operation in device_operations(turns):
            if "cosh" in operation.name:
                inside = not inside
                if inside:
                    spans.append([])
            elif inside:
                spans[-1].append(operation)
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
            flush, buffer, mark, marked = self._jax
            for _ in range(3):
                flush(buffer)
            mark(marked)
            out = run.call()
            mark(marked)
            del out

    def _flush_by_torch(self) -> None:
        if self.flush == STEP:
            self._rows @ self._weights
            return
        for _ in range(3):
            self._torch_flush.zero_() if self.flush == WRITE else self._torch_flush.sum()

    def _wait(self) -> None:
        if "_jax" in vars(self):  # a call of JAX was made
            flush, buffer, *_ = self._jax
            flush(buffer).block_until_ready()
        torch.cuda.synchronize()


def kernel_backends(phase: str) -> list[str]:
    """The backends that can serve this phase here, but for plain XLA; FlashInfer's attention is for SM120 alone."""
    from jax_sparse_mla import DeviceInfo
    from jax_sparse_mla.attention.machine import installed_for

    elsewhere = set() if (DeviceInfo.current().compute_capability or (0,))[0] == 12 else {"flashinfer"}
    return sorted(installed_for(phase) - {"reference"} - elsewhere)


def in_place(function: Callable, state: object, *args) -> Run:
    """A JAX call of `function(state, *args)` with the state donated: each call takes what the last one returned."""
    import jax

    jitted = jax.jit(function, donate_argnums=0)
    states = [state]

    def call():
        states[0] = jitted(states[0], *args)
        return states[0]

    return Run(call, "jax")


def host_time(run: Run, calls: int) -> float:
    """Microseconds until `calls` calls are enqueued, per call; so few that none waits for the device."""

    def wait(out):
        if run.framework == "torch":
            return torch.cuda.synchronize()
        import jax

        return jax.block_until_ready(out)

    wait(run.call())
    enqueued = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(calls):
            out = run.call()
        enqueued.append((time.perf_counter() - start) / calls * 1e6)
        wait(out)
    return round(statistics.median(enqueued), 1)


def copy_rate(timer: Timer) -> float:
    """TB/s of a device copy that reads and writes 2 GiB in all."""
    moved = 2 << 30
    source = torch.randint(0, 2**31 - 1, (moved // 8,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return moved / timer(Run(lambda: target.copy_(source), "torch")) / 1e6


def matmul_rate(timer: Timer, unit: str) -> float:
    """TFLOP/s of a square matrix product of random values through torch, in bf16 or fp8 (e4m3, bf16 result)."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if unit == "bf16":
        return 2 * n**3 / timer(Run(lambda: a @ b, "torch")) / 1e6
    one = torch.ones((), device="cuda")
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
    product = Run(lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), "torch")
    return 2 * n**3 / timer(product) / 1e6


# --- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """One operation at one size.

    Attributes:
      ours, peers: what to time, by name; peers are other projects' kernels, or plain XLA where nobody has one. A peer
        whose call raises `NotMeasured` is reported with that reason.
      checks: by a peer's name, what compares its results with ours before it is timed: returns the largest difference,
        and raises AssertionError where the two are not the same operation.
      bytes: that must move: each input read once, each output written once.
      flop: that must be done, in the unit whose rate is `flop_unit` ("bf16" or "fp8").
    """

    ours: dict[str, Run]
    peers: dict[str, Run]
    bytes: int
    flop: int = 0
    flop_unit: str = "bf16"
    checks: dict[str, Callable[[], float]] = dataclasses.field(default_factory=dict)


class Spec(NamedTuple):
    """A case's name, and what makes the case on the GPU."""

    name: str
    make: Callable[[np.random.Generator], Case]


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates that the machine reached in this process: TB/s of a copy, TFLOP/s of matrix products by unit."""

    copy: float
    matmul: dict[str, float]

    @classmethod
    def measure(cls, timer: Timer) -> Ceilings:
        return cls(copy_rate(timer), {unit: matmul_rate(timer, unit) for unit in ("bf16", "fp8")})

    def microseconds(self, case: Case) -> float:
        """The least time that the case can take."""
        compute = case.flop / self.matmul[case.flop_unit] / 1e6 if case.flop else 0.0
        return max(case.bytes / self.copy / 1e6, compute)


def measure(name: str, case: Case, timer: Timer, ceilings: Ceilings) -> dict:
    """A row: microseconds of ours and of the peers by name, what was compared, what is missing or failed and why."""
    times: dict[str, dict[str, float]] = {"ours": {}, "peers": {}}
    differences, failed, missing = {}, {}, {}
    for group, runs in (("ours", case.ours), ("peers", case.peers)):
        for label, run in runs.items():
            try:
                if label in case.checks:
                    differences[label] = float(f"{case.checks[label]():.3g}")
                times[group][label] = round(timer(run), 2)
            except NotMeasured as reason:
                missing[label] = str(reason)
            except Exception as error:
                failed[label] = described(error)
    row = {"case": name, **times, "ceiling_us": round(ceilings.microseconds(case), 3)}
    more = {"difference": differences, "not_measured": missing, "failed": failed}
    return row | {key: value for key, value in more.items() if value}


_HEADER = f"{'case':52} {'peer':>12} {'us':>9} {'ours':>16} {'us':>9} {'ratio':>6} {'ceiling':>9} {'share':>6}"


def lines(row: dict) -> list[str]:
    """One line for each way to launch ours beside the best peer, and for what failed."""
    peer, ceiling = min(row["peers"], key=row["peers"].get, default=None), row["ceiling_us"]
    beside = f"{peer:>12} {row['peers'][peer]:9.1f}" if peer else f"{'-':>12} {'-':>9}"
    text = []
    for name, us in row["ours"].items():
        ratio = f"{row['peers'][peer] / us:6.2f}" if peer else f"{'-':>6}"
        text.append(f"{row['case']:52} {beside} {name:>16} {us:9.1f} {ratio} {ceiling:9.1f} {ceiling / us:6.0%}")
    for key in ("not_measured", "failed"):
        text += [f"{row['case']:52} {name} {key.replace('_', ' ')}: {why}" for name, why in row.get(key, {}).items()]
    return text


def compare(operation: str, description: str, specs: Iterable[Spec]) -> int:
    """The command of an operation: times its cases, prints the table and writes OPERATION.json.

    What fails is reported and costs only itself; the exit code is 1 then.
    """
    made = parser(description)
    made.add_argument("--repeats", type=int, default=15, help="calls of which the median counts")
    args = made.parse_args()
    specs = [spec for spec in specs if spec.name.startswith(tuple(args.only))]
    if args.dry_run:
        print(*(spec.name for spec in specs), sep="\n")
        return 0
    timer, rows = Timer(args.repeats), []
    ceilings = Ceilings.measure(timer)
    rates = ", ".join(f"{rate:.0f} TFLOP/s {unit}" for unit, rate in ceilings.matmul.items())
    print(f"ceilings: copy {ceilings.copy:.2f} TB/s, matrix product {rates}\n{_HEADER}")
    for spec in specs:
        try:
            rows.append(measure(spec.name, spec.make(np.random.default_rng(0)), timer, ceilings))
        except Exception as error:  # of what makes the case
            rows.append({"case": spec.name, "ours": {}, "peers": {}, "ceiling_us": 0, "failed": {"": described(error)}})
        print(*lines(rows[-1]), sep="\n", flush=True)
        write(operation, rows, copy_tb_s=ceilings.copy, matmul_tflops=ceilings.matmul)
        gc.collect()
        torch.cuda.synchronize()  # ends here where a case has broken the GPU's context
    return status(rows)


def operation(name: str, description: str, specs: Callable[[], Iterable[Spec]]) -> Callable[[], int]:
    """`compare` as the `main` of a module."""
    return lambda: compare(name, description, specs())
