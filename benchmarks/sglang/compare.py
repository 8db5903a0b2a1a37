"""Times SGLang's step of `benchmarks.sglang.step` beside ours, after the guards have compared it with our reference."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import torch

from benchmarks import peers
from benchmarks.harness import ROOT, NotMeasured, attempt, status, write
from benchmarks.sglang.guards import check
from benchmarks.sglang.state import State
from benchmarks.sglang.step import STREAM_ROWS, Step
from benchmarks.stack import V4_FLASH_RATIOS, Stack
from benchmarks.step import ROOM, TorchSteps, decode_start, measure, timed_steps


def measure_case(case: str, args) -> dict:
    """SGLang's times and the guards' report; a `GuardError` where its step is not ours."""
    batch, context = map(int, case.split("x"))
    state = State(Stack(ratios=V4_FLASH_RATIOS[: args.layers], batch=batch, max_len=context))
    step = Step(state, streams=batch <= STREAM_ROWS)
    state.lens.fill_(state.stack.max_len - ROOM)
    graph = step.capture()
    guards = check(state, step, graph)
    print(f"{case}: {guards}", flush=True)
    start, count = decode_start(state.stack, args.staggered), timed_steps(args.repeats)
    row, _ = measure(TorchSteps(graph.replay, state.lens), start, count, args.repeats, rewind=False)
    return row | {"guards": guards._asdict()}


def measure_ours(arguments: Sequence[str]) -> dict[str, dict]:
    """The rows of `step --ours` with these arguments, by its names of cases; in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "step", "--ours", "--long", "", *arguments]
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OUT": out})
        rows = json.loads((Path(out) / "step_ours.json").read_text())["rows"]
    return {row.pop("case"): row for row in rows}


def load() -> None:
    """Imports SGLang's kernels, FlashMLA and DeepGEMM; NotMeasured where one cannot be imported."""
    peers.sglang(), peers.find("deep_gemm"), peers.find("flash_mla")


COLUMNS = ("wall_us", "gpu_us", "span_us", "operations", "host_us")


def table(rows: Sequence[dict]) -> str:
    """A line for each case and step; the last column is SGLang's time over ours."""
    lines = [f"{'case':12} {'step':8}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'/ ours':>9}"]
    ours = {row["case"]: row["wall_us"] for row in rows if row["step"] == "ours"}
    for row in rows:
        cells = "".join(f"{row[c]:12,.0f}" if c in row else f"{'–':>12}" for c in COLUMNS)
        compared = row["step"] != "ours" and "wall_us" in row
        ratio = f"{row['wall_us'] / ours[row['case']]:9.2f}" if compared else ""
        lines.append(f"{row['case']:12} {row['step']:8}{cells}{ratio}")
    return "\n".join(lines)


def main(args) -> int:
    """The command `step` without --ours."""
    jax.config.update("jax_platforms", "cpu")  # the tables, rows and reference: the GPU is SGLang's
    cases, rows = args.decode.split(","), []
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
        times = {key: ours[case][key] for key in ("steps", "gpu_busy", "from_graphs", *COLUMNS)}
        rows.append({"case": case, "step": "ours", **times})
        if reason is None:
            rows.append({"case": case, "step": "SGLang", **attempt(lambda case=case: measure_case(case, args))})
            if "failed" in rows[-1]:
                print(f"{case}: SGLang's step has no times: {rows[-1]['failed']}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        write("step", rows, not_measured=reason)
    print(table(rows))
    return status(rows)
