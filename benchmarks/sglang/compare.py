"""Times SGLang's step of `benchmarks.sglang.step` beside ours, after the guards have compared it with our reference."""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import torch

from benchmarks import peers
from benchmarks.harness import ROOT, NotMeasured, write
from benchmarks.sglang.guards import GuardError, check
from benchmarks.sglang.state import State
from benchmarks.sglang.step import STREAM_ROWS, Graph, Step
from benchmarks.stack import V4_FLASH_RATIOS, Stack
from benchmarks.step import ROOM, decode_start, device_operations, host_us, summary, timed_steps


def times(state: State, graph: Graph, repeats: int, staggered: bool) -> dict:
    """Times `repeats` runs, on ever longer requests as `benchmarks.step` does."""
    count = timed_steps(repeats)
    state.lens.copy_(torch.from_numpy(decode_start(state.stack, staggered)))
    run(graph, 1)
    wall = statistics.median(run(graph, count)[1] for _ in range(repeats))
    return {"steps": count, "wall_us": wall / count * 1e6, "host_us": host_us(functools.partial(run, graph))}


def profiled(graph: Graph, steps: int) -> dict:
    """What the GPU does in one more run."""
    operations = device_operations(lambda: run(graph, steps))
    span = max(operation.end for operation in operations) - operations[0].start
    return {"span_us": span / steps / 1e3, **summary(operations, steps)}


def run(graph: Graph, steps: int) -> tuple[float, float]:
    """Seconds until all steps are enqueued, and until they are done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return enqueued - start, time.perf_counter() - start


def measure_case(case: str, args) -> dict:
    """SGLang's times and what the guards found; why there are no times, where its step is not ours."""
    batch, context = map(int, case.split("x"))
    state = State(Stack(ratios=V4_FLASH_RATIOS[: args.layers], batch=batch, max_len=context))
    step = Step(state, streams=batch <= STREAM_ROWS)
    state.lens.fill_(state.stack.max_len - ROOM)
    graph = step.capture()
    try:
        guards = check(state, step, graph)
    except GuardError as error:
        print(f"{case} IS NOT OUR STEP, no times are taken:\n{error}", flush=True)
        return {"failed": str(error)}
    print(f"{case}: {guards}", flush=True)
    found = times(state, graph, args.repeats, args.staggered) | {"guards": guards._asdict()}
    state.lens.copy_(torch.from_numpy(decode_start(state.stack, args.staggered)))
    return found | profiled(graph, found["steps"])


def measure_ours(arguments: Sequence[str]) -> dict[str, dict]:
    """What `step --ours` finds with these arguments, by its names of cases; a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "step", "--ours", "--long", "", *arguments]
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OUT": out})
        rows = json.loads((Path(out) / "step_ours.json").read_text())["rows"]
    return {row.pop("case"): row for row in rows}


def load() -> None:
    """Imports SGLang's kernels, FlashMLA and DeepGEMM; NotMeasured where one cannot be imported."""
    peers.sglang(), peers.find("deep_gemm"), peers.find("flash_mla")


COLUMNS = ("wall_us", "gpu_us", "span_us", "operations", "host_us")


def table(found: Sequence[dict]) -> str:
    """A line for each case and step; the last column is SGLang's time over ours."""
    lines = [f"{'case':12} {'step':8}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'/ ours':>9}"]
    ours = {row["case"]: row["wall_us"] for row in found if row["step"] == "ours"}
    for row in found:
        cells = "".join(f"{row[c]:12,.0f}" if c in row else f"{'–':>12}" for c in COLUMNS)
        compared = row["step"] != "ours" and "wall_us" in row
        ratio = f"{row['wall_us'] / ours[row['case']]:9.2f}" if compared else ""
        lines.append(f"{row['case']:12} {row['step']:8}{cells}{ratio}")
    return "\n".join(lines)


def main(args) -> int:
    """The command `step` without --ours."""
    jax.config.update("jax_platforms", "cpu")  # the tables, rows and reference: the GPU is SGLang's
    cases, found = args.decode.split(","), []
    size = "--layers", str(args.layers), "--repeats", str(args.repeats), *["--staggered"] * args.staggered
    ours = measure_ours(["--prefill", "", "--decode", args.decode, *size])
    ours = {name.removeprefix("decode ").removesuffix(", staggered"): row for name, row in ours.items()}
    reason = None
    try:
        load()
    except NotMeasured as why:
        reason = str(why)
        print(f"SGLang's step cannot be measured here: {reason}")
    for case in cases:
        own = {key: ours[case][key] for key in ("steps", "gpu_busy", "from_graphs", *COLUMNS) if key in ours[case]}
        found.append({"case": case, "step": "ours", **own})
        if reason is None:
            found.append({"case": case, "step": "SGLang", **measure_case(case, args)})
        gc.collect()
        torch.cuda.empty_cache()
        write("step", found, not_measured=reason)
    print(table(found))
    return int(any("failed" in row for row in found))
