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
from benchmarks.sglang.step import STREAM_ROWS, VARIANTS, Graph, Step
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


def measure_case(case: str, args) -> dict[str, dict]:
    """By variant, its times and what the guards found."""
    batch, context = map(int, case.split("x"))
    state = State(Stack(ratios=V4_FLASH_RATIOS[: args.layers], batch=batch, max_len=context))
    found, graphs, repeats, staggered = {}, {}, args.repeats, args.staggered
    for name in args.variants.split(","):
        if VARIANTS[name].streams and batch > STREAM_ROWS:
            continue
        step = Step(state, VARIANTS[name])
        state.lens.fill_(state.stack.max_len - ROOM)
        graph = step.capture()
        try:
            guards = check(state, step, graph)
        except GuardError as error:
            print(f"{case} {name} IS NOT OUR STEP, no times are taken:\n{error}", flush=True)
            found[name] = {"failed": str(error)}
            continue
        print(f"{case} {name}: {guards}", flush=True)
        graphs[name] = graph
        found[name] = times(state, graph, repeats, staggered) | {"guards": guards._asdict()}
    for name, graph in graphs.items():  # after all are timed: a profiler may leave something behind
        state.lens.copy_(torch.from_numpy(decode_start(state.stack, staggered)))
        found[name] |= profiled(graph, found[name]["steps"])
    return found


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


def rows(case: str, steps: dict[str, dict]) -> list[dict]:
    """Our step and then SGLang's variants; what failed the guards has no times."""
    return [{"case": case, "step": name if name == "ours" else f"SGLang {name}", **x} for name, x in steps.items()]


def table(found: Sequence[dict]) -> str:
    """A line for each case and variant; the last column is theirs over ours in wall time."""
    lines = [f"{'case':12} {'step':12}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'/ ours':>9}"]
    ours = {row["case"]: row["wall_us"] for row in found if row["step"] == "ours"}
    for row in found:
        cells = "".join(f"{row[c]:12,.0f}" if c in row else f"{'–':>12}" for c in COLUMNS)
        compared = row["step"] not in ("ours", "SGLang C") and row["case"] in ours and "wall_us" in row
        ratio = f"{row['wall_us'] / ours[row['case']]:9.2f}" if compared else ""
        lines.append(f"{row['case']:12} {row['step']:12}{cells}{ratio}")
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
        theirs = {} if reason else measure_case(case, args)
        found += rows(case, {"ours": own} | theirs)
        gc.collect()
        torch.cuda.empty_cache()
        write("step", found, not_measured=reason)
    print(table(found))
    return int(any("failed" in row for row in found))
