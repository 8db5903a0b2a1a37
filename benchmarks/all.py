"""Makes every file of benchmarks/results that a GPU makes, and every plot, of one code; goes on where it stopped.

    python -m benchmarks.all --list                  # the parts, how long each takes, what is there already
    python -m benchmarks.all --budget-seconds 560    # as many of those that are left as fit; call again for the rest
    python -m benchmarks.all --part topk "suite rest"    # these, even where this code has made them

Needs an NVIDIA GPU. Each part is a command of its own, in the order of its worth; all.json remembers which are made, by
which code. A part is left while its file is missing or of other code, so that one folder ends up being of one code;
files of other code that stand in $OUT are only replaced with --replace. A copy of the checkout without its history
takes the commit from $COMMIT. On a machine with several GPUs parts run beside each other, each with as many GPUs as it
uses, one or two, and their share of the cores: first those that time a GPU or the host, then those of many processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from benchmarks import plots
from benchmarks.record import (
    RESULTS,
    ROOT,
    code_digest,
    commit,
    earlier,
    environment,
    gpu_names,
    is_own,
    latest,
    own_rows,
    results_folder,
    write_json,
)
from benchmarks.sglang import kit
from benchmarks.vllm.rows import problem

LEDGER = "all.json"
MARGIN = 5  # seconds that stay for writing what was made
PIECE = 30  # seconds that are worth while for a part that goes on case by case


class Part(NamedTuple):
    """A command that makes `file`.

    Attributes:
      module: of `benchmarks`, with its arguments; {left} stands for the seconds that it may take.
      seconds: it takes about so many on one H200 with 16 cores; a recorded run's count instead.
      whole: of a part that goes on where it was stopped, whether its file is complete.
      by_case: it goes on case by case: any time is enough for some.
      gpus: it uses so many, or the only one.
      processes: it has many of them, and runs beside no part that times the host.
      preallocates: JAX takes most of its GPU's memory at once, since neither torch nor another process needs any.
    """

    name: str
    file: str
    module: str
    seconds: int
    whole: Callable[[dict], bool] | None = None
    by_case: bool = False
    gpus: int = 1
    processes: bool = False
    preallocates: bool = False


def _step(name: str, count: int, arguments: str, seconds: int) -> Part:
    def whole(found: dict) -> bool:
        return sum(case.startswith(name) for case in found["results"]) >= count

    return Part(f"step {name}", "step.json", f"step {arguments}", seconds, whole)


def _cases(backend: str, least: int, seconds: int) -> Part:
    def whole(found: dict) -> bool:
        return sum(count for table in found["tables"].values() for count in table.values()) >= least

    command = f"cases --backend {backend} --limit {least} --workers {_WORKERS} --budget-seconds {{left}}"
    return Part(f"cases {backend}", f"cases_{backend}.json", command, seconds, whole, by_case=True, processes=True)


def _serving(preset: str, count: int, seconds: int) -> Part:
    def whole(found: dict) -> bool:
        return sum(run["preset"] == preset and run["code"] == found["code"] for run in found["runs"]) >= count

    return Part(f"serving {preset}", "serving.json", f"serving --presets {preset}", seconds, whole)


def _sglang(part: str, count: int, seconds: int) -> Part:
    def whole(found: dict) -> bool:
        own = [row for row in found["rows"] if is_own(row) and kit.part_of(row["case"]) == part]
        return sum(not kit.problem(row) for row in own) >= count

    return Part(f"sglang {part}", "engines_sglang.json", f"engines_sglang --part {part}", seconds, whole)


def _vllm_whole(found: dict) -> bool:
    return sum(is_own(row) and not problem(row) for row in found["rows"]) >= 48


def _maxtext(model: str, count: int, arguments: str, seconds: int) -> Part:
    def whole(found: dict) -> bool:
        return sum(case.split()[1] == model for case in found["results"]) >= count

    command, limits = f"maxtext_step --models {model}{arguments}", {"by_case": True, "preallocates": True}
    return Part(f"maxtext_step {model}", "maxtext_step.json", command, seconds, whole, **limits)


def _measured(found: dict) -> bool:
    return "results" in found  # not why there are none


def _suite(half: str, seconds: int) -> Part:
    def whole(found: dict) -> bool:
        return half in found.get("halves", ())

    return Part(f"suite {half}", "h200_tests.json", f"suite --half {half}", seconds, whole, gpus=2, processes=True)


def _two_gpus(name: str, section: str, module: str, count: int, seconds: int) -> Part:
    def whole(found: dict) -> bool:
        made = found.get(section, {})
        return made.get("code") == found["code"] and len(own_rows(made["rows"])) >= count

    return Part(name, "two_gpus.json", module, seconds, whole, gpus=2)


def _memcheck_whole(found: dict) -> bool:
    from benchmarks.memcheck import groups

    return set(groups()) == {name for name, group in found["groups"].items() if group.get("exit_code", 0) is not None}


_WORKERS = max(1, min(14, (os.cpu_count() or 1) - 2))
_GRAPHS = (
    "8x8192,8x8192@xla_gpu_graph_min_graph_size=1,8x8192@xla_gpu_command_buffer_scheduling_mode=CONCURRENT,"
    "8x8192@xla_gpu_graph_min_graph_size=1000000"
)
_SIX_LAYERS = "--layers 6 --prefill '' --long ''"
PARTS = (
    Part("hopper_decode", "hopper_decode.json", "hopper_decode", 100),
    Part("v41_decode", "v41_decode.json", "v41_decode", 35),
    Part("bf16_decode", "bf16_decode.json", "bf16_decode", 50),
    Part("counters", "counters.json", "counters", 300),
    Part("backward", "backward.json", "backward", 90),
    Part("peer_backward", "peer_backward.json", "peer_backward", 130),
    Part("attention", "attention.json", "run --op attention", 150),
    Part("indexer", "indexer.json", "run --op indexer", 110),
    Part("topk", "topk.json", "run --op topk", 50),
    Part("kv_cache", "kv_cache.json", "run --op kv_cache", 35),
    Part("indices", "indices.json", "run --op indices", 30),
    Part("metadata", "metadata.json", "run --op metadata", 60),
    _step("decode", 8, "--prefill '' --long '' --workers 8", 110),
    _suite("operations", 480),
    _suite("rest", 250),
    Part("memcheck", "memcheck.json", "memcheck --limit-seconds {left}", 240, _memcheck_whole, processes=True),
    _cases("hopper", 5201, 250),
    _cases("triton", 600, 50),
    _cases("drop_in", 1400, 50),
    _cases("flashmla", 800, 50),
    Part("drop_in", "drop_in.json", "drop_in", 40),
    _sglang("kit", 49, 160),
    _sglang("graph", 18, 110),
    _sglang("served", 14, 240),
    Part("vllm", "engines_vllm.json", "engines_vllm", 120, _vllm_whole),
    _step("long", 2, "--decode '' --prefill ''", 70),
    _step("prefill", 6, "--decode '' --long '' --workers 8", 60),
    Part("extend", "extend.json", "run --op extend", 60),
    Part("flashmla_from_jit", "flashmla_from_jit.json", "flashmla_from_jit", 110),
    Part(
        "cuda_graphs",
        "cuda_graphs.json",
        f"step --record cuda_graphs --layers 6 --decode {_GRAPHS} --prefill '' --long ''",
        60,
    ),
    Part("arguments", "arguments.json", "arguments", 30),
    _serving("v4", 4, 250),
    _serving("v4-flash-slice", 3, 420),
    Part("attention_part", "attention_part.json", "attention_part", 110),
    Part("peer_step", "peer_step.json", "peer_step", 180, _measured),
    Part("torch_step", "torch_step.json", "torch_step", 180),
    Part("peer_prefill", "peer_prefill.json", "peer_prefill", 140, _measured),
    _maxtext("v4", 5, "", 1500),
    _maxtext("v32", 2, " --parts forward", 150),  # its training step compiles for as long as V4's, and is the same code
    # These fail by name where there is one GPU.
    _two_gpus("two_gpus", "step_over_requests", "two_gpus", 6, 300),
    _two_gpus(
        "two_gpus processes",
        "step_over_requests_by_processes",
        "two_gpus --processes --cases 1x8192,8x8192,8x131072",
        3,
        110,
    ),
    _two_gpus("context_parallel", "context_parallel", "context_parallel", 6, 50),
    _two_gpus("serving_mesh", "serving v4-flash-slice bfloat16, 64 x 512", "serving_mesh --layouts 1x2", 2, 300),
    _two_gpus(
        "serving_mesh float32", "serving v4 float32, 64 x 512", "serving_mesh --preset v4 --dtype float32", 4, 330
    ),
    _two_gpus("mesh_processes", "faults", "mesh_processes", 2, 300),
)


class Ledger:
    """What this code has made, by part."""

    def __init__(self):
        found = earlier(LEDGER)
        self.parts: dict[str, dict] = found.get("parts", {})
        self.stopped: list[str] = found.get("stopped", [])
        self.seconds: dict[str, float] = {}  # what parts took when they ended well, whichever code they ran
        for path in (RESULTS / LEDGER, results_folder() / LEDGER):
            known = json.loads(path.read_text()) if path.exists() else {}
            self.seconds |= known.get("seconds", {})
            self.seconds |= {name: p["seconds"] for name, p in known.get("parts", {}).items() if p["exit_code"] == 0}

    def takes(self, part: Part) -> float:
        return part.seconds if part.by_case else self.seconds.get(part.name, part.seconds)

    def made(self, part: Part) -> bool:
        found = earlier(part.file)
        return bool(found) and part.name in self.parts and (part.whole is None or part.whole(found))

    def add(self, part: Part, seconds: float, exit_code: int | None) -> None:
        """Of a part that has ended; None: that was stopped."""
        if exit_code is not None or part.whole is not None:
            code = -1 if exit_code is None else exit_code
            self.parts[part.name] = {"file": part.file, "seconds": round(seconds, 1), "exit_code": code}
        if exit_code is None and part.name not in self.stopped:
            self.stopped.append(part.name)
        content = {"parts": self.parts, "stopped": self.stopped, "seconds": self.seconds}
        write_json(results_folder() / LEDGER, environment() | content)

    def status(self, part: Part) -> str:
        if self.made(part):
            exit_code = self.parts[part.name]["exit_code"]
            return f"made, but exit code {exit_code}: something in it failed" if exit_code else "made"
        if part.name in self.parts and part.whole is not None:
            return "begun"
        return f"of other code, {found['commit']}" if (found := latest(part.file)).get("commit") else "left"


_running: set[subprocess.Popen] = set()


def stop(process: subprocess.Popen) -> None:
    """Ends it with the processes that it started, if it has not ended by itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(part: Part, limit: float, gpu: str | None = None, cores: Sequence[int] = ()) -> tuple[int | None, float]:
    """The exit code, None where the part had to be stopped, and the seconds that it took; output goes to a log.

    Args:
      gpu: the only ones that the part sees, as CUDA_VISIBLE_DEVICES names them; None: all.
      cores: the only ones that it runs on; none: all.
    """
    command = shlex.split(part.module.format(left=int(limit - MARGIN)))
    path = results_folder() / f"all_{part.name.replace(' ', '_')}.log"
    started = time.monotonic()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "interop"), *_python_path()])}
    environ |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", str(part.preallocates).lower())
    with path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", f"benchmarks.{command[0]}", *command[1:]],
            cwd=ROOT,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        if cores:
            os.sched_setaffinity(process.pid, cores)
        try:
            exit_code = process.wait(limit)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            stop(process)
            _running.discard(process)
    if exit_code == 0:
        path.unlink()
    else:
        print("    " + "\n    ".join(path.read_text(errors="replace").splitlines()[-12:]))
    return exit_code, time.monotonic() - started


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def table(ledger: Ledger) -> str:
    lines = [f"{'part':20} {'file':26} {'takes':>6}  status"]
    lines += [f"{part.name:20} {part.file:26} {ledger.takes(part):4.0f} s  {ledger.status(part)}" for part in PARTS]
    left = sum(ledger.takes(part) for part in PARTS if not ledger.made(part))
    return "\n".join([*lines, f"left: about {left / 60:.0f} minutes; commit {commit()}, code {code_digest()}"])


def draw() -> None:
    """All plots, of the files that stand in $OUT or else in benchmarks/results."""
    for path in plots.draw(results_folder(), [RESULTS]):
        print(f"drawn: {path}")


def foreign() -> list[str]:
    """Files of other code in $OUT; benchmarks/results always has some until all parts are made."""
    folder = results_folder()
    if folder == RESULTS:
        return []
    return [part.file for part in PARTS if (folder / part.file).exists() and not earlier(part.file)]


def make(parts: Sequence[Part], ledger: Ledger, deadline: float, gpus: Sequence[str], first: Part | None) -> None:
    """Runs the parts that fit before the deadline: beside each other on several GPUs, or one after the other.

    Each part has its GPUs' share of the cores: one part's compilations take none of those on which another times the
    host. No two write one file at the same time. Where others have GPUs left, parts that use two come first.

    Args:
      first: the part that runs in any case, so that none is put off for ever.
    """
    waiting = sorted(parts, key=lambda part: part.gpus < 2) if len(gpus) > 2 else list(parts)
    names = list(gpus) if len(gpus) > 1 else [None]  # None: whatever there is, with all cores
    cores = sorted(os.sched_getaffinity(0)) if len(gpus) > 1 else []
    each = len(cores) // max(1, min(len(names), sum(part.gpus for part in parts)))
    free, running = {name: cores[i * each : (i + 1) * each] for i, name in enumerate(names)}, {}

    def next_part() -> Part | None:
        files = {part.file for part, _ in running.values()}
        able = (part for part in waiting if part.file not in files and min(part.gpus, len(names)) <= len(free))
        return next(able, None)

    def start(part: Part) -> None:
        waiting.remove(part)
        left, takes = deadline - time.monotonic() - MARGIN, ledger.takes(part)
        if left < (PIECE if part.by_case else takes) and (part is not first or left < PIECE):
            needs = f"takes about {takes:.0f} s, {max(0, left):.0f} s are left"
            print(f"{part.name}: {needs}: the next call runs it")
            return
        print(f"{part.name}: about {takes:.0f} s ...", flush=True)
        taken = {gpu: free.pop(gpu) for gpu in [name for name in names if name in free][: part.gpus]}
        seen = None if None in taken else ",".join(taken)
        future = pool.submit(run, part, min(left, 86_400), seen, [core for share in taken.values() for core in share])
        running[future] = part, taken

    def end(future: Future) -> None:
        part, taken = running.pop(future)
        exit_code, seconds = future.result()
        word = "stopped" if exit_code is None else f"exit code {exit_code}"
        print(f"{part.name}: {word} after {seconds:.0f} s", flush=True)
        ledger.add(part, seconds, exit_code)
        free.update(taken)

    with ThreadPoolExecutor(len(names)) as pool:
        try:
            while waiting or running:
                while part := next_part():
                    start(part)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    end(future)
        except BaseException:
            for process in list(_running):  # whose sessions are their own
                stop(process)
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the parts and what there is, and run nothing")
    parser.add_argument("--part", nargs="+", choices=[part.name for part in PARTS], help="only these, and anew")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="no part runs beyond")
    parser.add_argument("--replace", action="store_true", help="replace files of other code in $OUT")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget_seconds
    ledger = Ledger()
    if args.list:
        print(table(ledger))
        return 0
    if commit() is None:
        print("There is no git history here: set COMMIT to the commit that this checkout is of.")
        return 2
    if (others := foreign()) and not args.replace:
        print(f"{results_folder()} has files of other code: {', '.join(others)}. Name another folder or add --replace.")
        return 2
    chosen = [part for part in PARTS if (part.name in args.part if args.part else not ledger.made(part))]
    chosen.sort(key=lambda part: part.name in ledger.stopped)  # such a part may take longer than a call
    first = chosen[0] if chosen else None
    for processes in (False, True):
        make([part for part in chosen if part.processes == processes], ledger, deadline, gpu_names(), first)
    draw()
    print(table(ledger))
    return int(not all(ledger.made(part) for part in PARTS))


if __name__ == "__main__":
    sys.exit(main())
