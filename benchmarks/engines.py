"""What the benchmarks of engines share: a process for each side, how a layer's call is timed, a row for each case."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.record import ROOT, earlier, environment, gpu_names, results_folder, write_json

SIDES = ("theirs", "ours")
TIMES = ("graph_us", "busy_us", "eager_us", "host_us")
ROW = ("error", "graph_error", *TIMES)
NOTHING = {"results": {}, "said": [], "stand_ins": [], "exit_status": 0}
HOST_CALLS = 10


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square, relative."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def served() -> dict[str, int]:
    """How often our plugin served, left or refused each function since its counts were cleared."""
    from sparse_mla_torch.plugins import calls

    return {" ".join(key): count for key, count in calls.counts.items()}


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


def timed(call: Callable[[], torch.Tensor], output: torch.Tensor, timer: Callable, in_graph: bool) -> dict:
    """A layer's call, whose output is known: its times, and from a graph its kernels and its error too."""
    from benchmarks.timing import Run, host_time

    found = {"eager_us": timer(Run(call, "torch"))}  # with what the GPU waits for the host
    found["busy_us"] = timer.busy[0]
    found["host_us"] = host_time(Run(call, "torch"), HOST_CALLS)
    if in_graph:
        graph = Captured(call, gpu=True)
        graph.output.zero_()
        graph.replay()
        found["graph_error"] = difference(graph.output, output)
        found["graph_us"] = timer(Run(graph.replay, "torch"))
        found["kernels"] = [operation.name for operation in timer.operations]
    return found


# --- both sides ------------------------------------------------------------------------------------


def run(module: str, side: str, file: Path, arguments: Iterable[str], switches: Mapping[str, str]) -> dict:
    """What a process of this side found, on the first GPU; what it had found before it died, if it did.

    Args:
      module: runs as `python -m module --results file *arguments`.
      switches: environment variables.
    """
    switches = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **switches}
    switches |= {"CUDA_VISIBLE_DEVICES": "".join(gpu_names()[:1])}  # of several GPUs, JAX makes the last one current
    paths = os.pathsep.join([str(ROOT), str(ROOT / "interop"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", module, "--results", str(file), *arguments]
    print(f"--- {side}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env=os.environ | switches | {"PYTHONPATH": paths}).returncode
    found = torch.load(file) if file.exists() else NOTHING
    return found | {"exit_status": status}


def rows(theirs: dict[str, dict], ours: dict[str, dict]) -> list[dict]:
    """A row for each case of either side."""
    return [_row(name, theirs.get(name, {}), ours.get(name, {})) for name in theirs | ours]


def _row(name: str, theirs: dict, ours: dict) -> dict:
    row = {"case": name, "served": ours.get("served", {})}
    for key in ROW:
        found = {side: result[key] for side, result in (("theirs", theirs), ("ours", ours)) if key in result}
        if found:
            row[key] = {side: float(f"{value:.4g}") for side, value in found.items()}
    if "output" in theirs and "output" in ours:
        row["apart"] = float(f"{difference(ours['output'], theirs['output']):.4g}")
    for why in ("skipped", "failed"):
        found = {side: result[why] for side, result in (("theirs", theirs), ("ours", ours)) if why in result}
        if found:
            row[why] = found
    if ours.get("kernels"):
        row["kernels"] = {"theirs": theirs.get("kernels", []), "ours": ours["kernels"]}
    return row


def table(found: list[dict]) -> str:
    """A line for each row: errors, and the time in a CUDA graph or, eager, of the GPU's operations."""
    lines = [f"{'case':58} {'error theirs':>12} {'ours':>8} {'apart':>8} {'us theirs':>10} {'ours':>8}  served"]
    for row in found:
        time = next((row[key] for key in TIMES if key in row), {})
        cells = [row.get("error", {}).get("theirs"), row.get("error", {}).get("ours"), row.get("apart")]
        cells = [f"{value:.4f}" if value is not None else "–" for value in cells]
        cells += [f"{time[side]:.1f}" if side in time else "–" for side in SIDES]
        why = str(row.get("failed") or row.get("skipped") or row["served"])[:120]
        lines.append(f"{row['case']:58} {cells[0]:>12} {cells[1]:>8} {cells[2]:>8} {cells[3]:>10} {cells[4]:>8}  {why}")
    return "\n".join(lines)


def main(
    description: str,
    record: str,
    run_side: Callable[[str, Path, list[str]], dict],
    problem: Callable[[dict], str | None],
    about: Mapping[str, object],
    parts: Sequence[str] = (),
) -> int:
    """Runs both sides, or ours alone without a GPU, and prints their rows; with a GPU it writes them to the record.

    Args:
      description: of the command.
      record: the file, in which other rows of this very code stay.
      run_side: `(side, folder, arguments)`, as `run`.
      problem: why a row of a GPU's run shows nothing, or something wrong.
      about: what else the record has.
      parts: the cases' parts that may be chosen.

    Returns:
      1 where a side failed, or a row has a problem, or there is no row.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", default=[], help="cases with this text in their names")
    if parts:
        parser.add_argument("--part", choices=parts, action="append", default=[], help="some of the cases")
    parser.add_argument("--no-gpu", action="store_true", help="with the stand-ins of tests/engines; writes no record")
    gpu, arguments = not parser.parse_args().no_gpu, sys.argv[1:]  # the sides take the same arguments
    with tempfile.TemporaryDirectory() as folder:
        sides = SIDES if gpu else ["ours"]  # FlashMLA has no kernel for a CPU
        found = {side: run_side(side, Path(folder), arguments) if side in sides else NOTHING for side in SIDES}
    result = rows(found["theirs"]["results"], found["ours"]["results"])
    print(table(result))
    statuses = {side: found[side]["exit_status"] for side in SIDES}
    if gpu:
        seen = {"said": found["ours"]["said"], "stand_ins": found["ours"]["stand_ins"], "exit_status": statuses}
        before = [row for row in earlier(record).get("rows", []) if row["case"] not in {row["case"] for row in result}]
        write_json(results_folder() / record, environment() | about | seen | {"rows": before + result})
    bad = [f"{side}: exit status {status}" for side, status in statuses.items() if status]
    bad += problems(result, problem if gpu else lambda row: row.get("failed"))
    print("\n".join(bad))
    return int(bool(bad) or not result)


def problems(found: list[dict], problem: Callable[[dict], str | None]) -> list[str]:
    return [f"{row['case']}: {why}" for row in found if (why := problem(row))]
