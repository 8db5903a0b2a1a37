"""A decode step of DeepSeek-V4-Flash's attention beside SGLang's own, both 43 layers in a CUDA graph, on one GPU.

    python -m benchmarks.peer_step --prepare FOLDER --wheel sglang-0.5.23-*.whl  # needs nvcc and no GPU
    python -m benchmarks.peer_step --prepared FOLDER                             # needs an H200

SGLang's kernels are imported from the part of its wheel that FOLDER holds, FlashMLA's from sgl-flash-mla 1.0.0 and
DeepGEMM's from sgl-deep-gemm 0.1.5.post1; apache-tvm-ffi and msgspec must be installed, and CUDA_HOME must be the root
of the toolkit. Where SGLang itself is installed, --prepared may be left out: it then compiles its modules. Both steps
have the ratios, tables, cache bytes, rows and parameters of `benchmarks.stack`, take their slots from the request
table, add one to the lengths, make their metadata, and give each layer's keys one head of the output below.

    A  SGLang's kernels on one stream
    B  on the side streams that its model takes for up to 64 rows: what it does, and what ours is compared with
    C  B with the norm and rope of the query and the rope taken back from the output, which ours leaves out

Of each variant a case is only timed after `benchmarks.sglang.guards` has compared it with our reference; what fails has
no times, and the exit code is 1. A step of theirs also normalises and rotates the key and rotates the index query. Ours
is measured by `python -m benchmarks.step` in a process of its own, before. Per case: wall time of a step among up to 50
that are launched back to back, the time in which the GPU is busy, from the first operation to the last, operations, and
what one takes the host, of ten behind an idle GPU. Prints a table and writes peer_step.json to $OUT or
benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import torch

from benchmarks import peers
from benchmarks.record import ROOT, environment, results_folder, write_json
from benchmarks.sglang.guards import GuardError, check
from benchmarks.sglang.prepare import modules, prepare, use_compiled
from benchmarks.sglang.state import State
from benchmarks.sglang.step import STREAM_ROWS, VARIANTS, Graph, Step
from benchmarks.stack import V4_FLASH_RATIOS, Stack
from benchmarks.step import ROOM, decode_start, device_operations, host_us, summary, timed_steps

DECODE = "1x8192,8x8192,64x8192,64x131072"


class Case(NamedTuple):
    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        batch, _, context = text.partition("x")
        return cls(int(batch), int(context))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"

    def stack(self, layers: int) -> Stack:
        return Stack(ratios=V4_FLASH_RATIOS[:layers], batch=self.batch, max_len=self.context)


# --- time ------------------------------------------------------------------------------------------


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


def measure_case(case: Case, variants: Sequence[str], layers: int, repeats: int, staggered: bool) -> dict[str, dict]:
    """By variant, its times and what the guards found."""
    state, found, graphs = State(case.stack(layers)), {}, {}
    for name in variants:
        if VARIANTS[name].streams and case.batch > STREAM_ROWS:
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
    """What `benchmarks.step` finds with these arguments, by its names of cases; a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step", "--long", "", *arguments]
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OUT": out})
        return json.loads((Path(out) / "step.json").read_text())["results"]


def load(prepared: Path | None) -> list[str]:
    """Imports SGLang, out of the folder if one is given, FlashMLA and DeepGEMM.

    Returns:
      The names of the modules that are compiled here, which grows as they are used.

    Raises:
      NotMeasured: one of them cannot be imported.
    """
    if prepared is not None:
        sys.path.insert(0, str(prepared.resolve()))
        importlib.invalidate_caches()
    modules(), peers.find("deep_gemm"), peers.find("flash_mla")
    return [] if prepared is None else use_compiled(prepared.resolve())


def not_measured(file: str, reason: peers.NotMeasured) -> int:
    """Leaves the reason in the results' place."""
    print(f"SGLang's step cannot be measured here: {reason}")
    write_json(results_folder() / file, environment() | {"not_measured": str(reason)})
    return 0


# --- report ----------------------------------------------------------------------------------------

COLUMNS = ("wall_us", "gpu_us", "span_us", "operations", "host_us")


def table(results: dict[str, dict[str, dict]]) -> str:
    """A line for each case and variant; `ours` stands beside, and the last column is theirs over ours in wall time.

    What failed the guards has no times.
    """
    lines = [f"{'case':12} {'step':40}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'/ ours':>9}"]
    for case, steps in results.items():
        for name, result in steps.items():
            cells = "".join(f"{result[c]:12,.0f}" if c in result else f"{'–':>12}" for c in COLUMNS)
            ratio = ""
            if name in VARIANTS and not VARIANTS[name].query and "ours" in steps and "failed" not in result:
                ratio = f"{result['wall_us'] / steps['ours']['wall_us']:9.2f}"
            lines.append(f"{case:12} {'SGLang ' * (name in VARIANTS) + name:40}{cells}{ratio}")
    return "\n".join(lines)


def with_ours(results: dict[str, dict[str, dict]], ours: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """By case, our step and then SGLang's."""
    for named, result in ours.items():
        case, _, options = named.partition("@")
        name = f"ours, {options}" if options else "ours"
        wanted = {key: result[key] for key in ("steps", "gpu_busy", "from_graphs", *COLUMNS) if key in result}
        results[case] = {name: wanted} | results.get(case, {}) if name == "ours" else results[case] | {name: wanted}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make the folder, and measure nothing")
    parser.add_argument("--wheel", type=Path, help="SGLang's, for --prepare")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="where SGLang's compiled modules lie")
    parser.add_argument("--decode", default=DECODE, help="cases, BATCHxCONTEXT")
    parser.add_argument("--variants", default="A,B,C")
    parser.add_argument("--layers", type=int, default=len(V4_FLASH_RATIOS), help="only the first, at least 3")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--options", default="", help="measure ours with these options of benchmarks.step as well")
    parser.add_argument("--staggered", action="store_true", help="lengths that differ, as in benchmarks.step")
    parser.add_argument("--record", default="peer_step", help="the results' file, without .json")
    parser.add_argument("--no-ours", action="store_true", help="leave our own step out")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # the tables, rows and reference: the GPU is SGLang's
    if arguments.prepare:
        if arguments.wheel is None:
            parser.error("--prepare needs --wheel")
        for path in prepare(arguments.prepare, arguments.wheel):
            print(f"{path.stat().st_size:10,} {path}")
        return 0

    try:
        missing = load(arguments.prepared)
    except peers.NotMeasured as reason:
        return not_measured(f"{arguments.record}.json", reason)
    cases, ours = arguments.decode.split(","), {}
    if not arguments.no_ours:
        named = [*cases, *(f"{case}@{arguments.options}" for case in cases if arguments.options)]
        size = "--layers", str(arguments.layers), "--repeats", str(arguments.repeats)
        ours = measure_ours(
            ["--prefill", "", "--decode", ",".join(named), *size, *["--staggered"] * arguments.staggered]
        )
        ours = {name.removeprefix("decode ").removesuffix(", staggered"): result for name, result in ours.items()}
    results: dict[str, dict[str, dict]] = {}
    where = environment()
    for text in cases:
        variants = arguments.variants.split(",")
        results[text] = measure_case(
            Case.parse(text), variants, arguments.layers, arguments.repeats, arguments.staggered
        )
        gc.collect()
        torch.cuda.empty_cache()
        found = with_ours({text: results[text]}, {k: v for k, v in ours.items() if k.partition("@")[0] == text})
        results |= found
        print(table(found), flush=True)
        write_json(
            results_folder() / f"{arguments.record}.json", where | {"compiled_here": missing, "results": results}
        )
    print(table(results))
    return int(any("failed" in result for steps in results.values() for result in steps.values()))


if __name__ == "__main__":
    sys.exit(main())
