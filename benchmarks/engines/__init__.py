"""Attention layers of SGLang and vLLM, of DeepSeek-V4 and V3.2, with FlashMLA and with ours, on one GPU.

    python -m benchmarks engines sglang [--part kit|graph|served] [--only TEXT]   # needs an H200, SGLang 0.5.23
    python -m benchmarks engines vllm [--only TEXT]                             # needs docs/guides/engines.md lists
    python -m benchmarks engines sglang --no-gpu      # ours with the stand-ins of tests/engines: no times

The engine's backends, metadata, caches, index conversions and Triton kernels are its own. Each side is a process that
makes the same inputs: `theirs` is the engine alone, `ours` is the engine with our plugin, which is asked first and may
leave a call to FlashMLA. SGLang's layers run through its own test kit. No row has a model, a scheduler, a server, an
indexer or the engine's graph runner itself. Rows have:

    error            of each side against attention in torch: SGLang's kit over rows that were not quantised, vLLM's
                     over the cache rows as numbers
    apart            of the two sides' outputs; all are relative, root mean square
    served           how often our plugin served, or left or refused, a function in the case's first call
    *_us             one call of the layer's attention by CUPTI, L2 flushed: `eager`, and `graph`, replayed from a CUDA
                     graph where the engine has one; busy_us leaves out what an eager call waits for the host, and
                     host_us is what it takes the host
    worst            the way of emptying the L2 in which ours does worst, and both sides' microseconds with it, from a
                     graph or, eager, those in which the GPU works
    graph_error      the replayed output against the eager one

SGLang's rows that begin with "graph:" follow its graph runner: metadata before and inside of the capture, another
batch put in, and a replay; their times are of metadata, projections and the layer together. Rows with "served" have
sizes of serving. The exit code is 1 where a case failed, was skipped or has too large an error.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import ROOT, gpu_names, parser, torch, write

sys.path.insert(0, str(ROOT / "tests" / "engines"))

SIDES = ("theirs", "ours")
TIMES = ("graph_us", "busy_us", "eager_us", "host_us")
ROW = ("error", "graph_error", *TIMES)
NOTHING = {"results": {}, "said": [], "exit_status": 0}
HOST_CALLS = 10
VLLM_ERROR = GRAPH_ERROR = 0.004  # of a bfloat16 result: 0.0017 is measured


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square, relative."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def served() -> dict[str, int]:
    """How often our plugin served, left or refused each function since its counts were cleared."""
    from sparse_mla_torch.plugins import calls

    return {" ".join(key): count for key, count in calls.counts.items()}


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def lines_of(engine: str) -> list[str]:
    """The list that gets each line which our plugin logs from now on ("sglang", "vllm")."""
    log, lines = logging.getLogger(f"{engine}.jax_sparse_mla"), []
    log.addHandler(_Lines(lines))
    log.setLevel(logging.INFO)
    return lines


# --- in the process of a side ----------------------------------------------------------------------


class Captured:
    """A call in a CUDA graph; on the CPU, a call that is made again."""

    def __init__(self, call: Callable[[], torch.Tensor], gpu: bool):
        self._call, self._graph = call, None
        if gpu:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # JAX is here too
                self.output = call()
        else:
            self.output = call().clone()

    def replay(self) -> None:
        if self._graph is None:
            self.output.copy_(self._call())
        else:
            self._graph.replay()


def timers() -> list:
    """One for each way of emptying the L2; the first one's times are the rows'."""
    from benchmarks.harness import FLUSHES, Timer

    return [Timer(flush=flush) for flush in FLUSHES]


def timed(call: Callable[[], torch.Tensor], output: torch.Tensor, timers: list, in_graph: bool) -> dict:
    """A layer's call, whose output is known: its times, and from a graph its kernels and its error too."""
    from benchmarks.harness import Run, host_time

    timer, *others = timers
    result = {"eager_us": timer(Run(call, "torch"))}  # with what the GPU waits for the host
    result["busy_us"] = timer.busy[0]
    result["host_us"] = host_time(Run(call, "torch"), HOST_CALLS)
    if in_graph:
        graph = Captured(call, gpu=True)
        graph.output.zero_()
        graph.replay()
        result["graph_error"] = difference(graph.output, output)
        result["graph_us"] = timer(Run(graph.replay, "torch"))
        result["kernels"] = [operation.name for operation in timer.operations]
    result["flushed"] = {timer.flush: result["graph_us" if in_graph else "busy_us"]}
    for other in others:
        us = other(Run(graph.replay if in_graph else call, "torch"))
        result["flushed"][other.flush] = us if in_graph else other.busy[0]
    return result


# --- both sides ------------------------------------------------------------------------------------


class Engine(NamedTuple):
    """How an engine's side is run, and the most that an error of one of its cases may be.

    Attributes:
      arguments, switches: of the side's process `python -m benchmarks.engines.NAME`, and its environment.
    """

    arguments: Callable[[str], list[str]]
    switches: Callable[[str], Mapping[str, str]]
    most_error: Callable[[str], float]


def engine(name: str) -> Engine:
    from sglang_cases import most_error

    if name == "sglang":
        return Engine(lambda side: [], lambda side: {"JAX_SPARSE_MLA_SGLANG": str(int(side == "ours"))}, most_error)
    return Engine(lambda side: ["--side", side], lambda side: {}, lambda case: VLLM_ERROR)


def run(name: str, side: str, file: Path, arguments: list[str]) -> dict:
    """The results of this side's process, on the first GPU; those before its death, if it died."""
    switches = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **engine(name).switches(side)}
    switches |= {"CUDA_VISIBLE_DEVICES": "".join(gpu_names()[:1])}  # of several GPUs, JAX makes the last one current
    switches["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "interop"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"benchmarks.engines.{name}", "--results", str(file)]
    print(f"--- {side}", flush=True)
    process = subprocess.run([*command, *engine(name).arguments(side), *arguments], cwd=ROOT, env=os.environ | switches)
    record = torch.load(file) if file.exists() else NOTHING
    return record | {"exit_status": process.returncode}


def rows(theirs: dict[str, dict], ours: dict[str, dict]) -> list[dict]:
    """A row for each case of either side."""
    return [_row(name, theirs.get(name, {}), ours.get(name, {})) for name in theirs | ours]


def _row(name: str, theirs: dict, ours: dict) -> dict:
    row = {"case": name, "served": ours.get("served", {})}
    for key in ROW:
        values = {side: result[key] for side, result in (("theirs", theirs), ("ours", ours)) if key in result}
        if values:
            row[key] = {side: float(f"{value:.4g}") for side, value in values.items()}
    if "flushed" in theirs and "flushed" in ours:
        us = {way: {"theirs": theirs["flushed"][way], "ours": ours["flushed"][way]} for way in ours["flushed"]}
        way = max(us, key=lambda way: us[way]["ours"] / us[way]["theirs"])
        row["worst"] = {"flush": way} | {side: float(f"{value:.4g}") for side, value in us[way].items()}
    if "output" in theirs and "output" in ours:
        row["apart"] = float(f"{difference(ours['output'], theirs['output']):.4g}")
    for why in ("skipped", "failed"):
        values = {side: result[why] for side, result in (("theirs", theirs), ("ours", ours)) if why in result}
        if values:
            row[why] = values
    return row


def table(result: list[dict]) -> str:
    """A line for each row: errors, and the time in a CUDA graph or, eager, of the GPU's operations."""
    lines = [f"{'case':58} {'error theirs':>12} {'ours':>8} {'apart':>8} {'us theirs':>10} {'ours':>8}  served"]
    for row in result:
        time = next((row[key] for key in TIMES if key in row), {})
        cells = [row.get("error", {}).get("theirs"), row.get("error", {}).get("ours"), row.get("apart")]
        cells = [f"{value:.4f}" if value is not None else "–" for value in cells]
        cells += [f"{time[side]:.1f}" if side in time else "–" for side in SIDES]
        why = str(row.get("failed") or row.get("skipped") or row["served"])[:120]
        lines.append(f"{row['case']:58} {cells[0]:>12} {cells[1]:>8} {cells[2]:>8} {cells[3]:>10} {cells[4]:>8}  {why}")
    return "\n".join(lines)


def problem(row: dict, most: float) -> str | None:
    """Why a row of a GPU's run shows nothing, or something wrong; None if all is well."""
    for key in ("failed", "skipped"):
        if key in row:
            return f"{key}: {row[key]}"
    for key, bound in (("error", most), ("graph_error", GRAPH_ERROR)):
        if wrong := {side: error for side, error in row.get(key, {}).items() if not error <= bound}:  # nor is NaN
            return f"{key} is above {bound}: {wrong}"
    return None if len(row.get("error", {})) == 2 else "a side has no error"


def slower(result: list[dict]) -> list[str]:
    """The rows in which ours served and took more than the engine's by 2%, by the worst way of emptying the L2."""
    taken = [row for row in result if "worst" in row and any(name.endswith(" ours") for name in row["served"])]
    return [row["case"] for row in taken if row["worst"]["ours"] > 1.02 * row["worst"]["theirs"]]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("engine", choices=("sglang", "vllm"))
    made.add_argument("--part", choices=("kit", "graph", "served"), action="append", default=[], help="of SGLang's")
    made.add_argument("--no-gpu", action="store_true", help="ours with the stand-ins of tests/engines")
    args = made.parse_args()
    if args.dry_run:
        print(f"{args.engine}: the cases are made by the engine; each side runs benchmarks.engines.{args.engine}")
        return 0
    arguments = [*(f"--part={part}" for part in args.part), *["--no-gpu"] * args.no_gpu]
    arguments += [f"--only={text}" for text in args.only if text]
    sides = ["ours"] if args.no_gpu else SIDES  # FlashMLA has no kernel for a CPU
    with tempfile.TemporaryDirectory() as folder:
        ran = {side: run(args.engine, side, Path(folder, f"{side}.pt"), arguments) for side in sides}
    outcome = {side: ran.get(side, NOTHING) for side in SIDES}
    result = rows(outcome["theirs"]["results"], outcome["ours"]["results"])
    print(table(result))
    if not args.no_gpu:
        write(f"engines_{args.engine}", result, said=outcome["ours"]["said"], slower=slower(result))
        print(*(f"slower with ours: {case}" for case in slower(result)), sep="\n")
    most = engine(args.engine).most_error
    bad = [f"{side}: exit status {status}" for side in SIDES if (status := outcome[side]["exit_status"])]
    problems = ((row, row.get("failed") if args.no_gpu else problem(row, most(row["case"]))) for row in result)
    bad += [f"{row['case']}: {why}" for row, why in problems if why]
    print("\n".join(bad))
    return int(bool(bad) or not result)
