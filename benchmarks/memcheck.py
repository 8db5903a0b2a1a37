"""compute-sanitizer over small, hostile shapes of every kernel: its memcheck, or another of its tools.

    python -m benchmarks memcheck [--only GROUP ...] [--tool racecheck] [--tests wide] [--limit-seconds 500]

A group is a test file that launches its kernels on the GPU, or a part of one, most of it through torch, some through
`jax.jit`, or the short list of cases that such a file runs as a script; a control has errors that must be found. Each
runs in a sanitised process of its own, all at once, in turn on each GPU. For memcheck memory is allocated one array at
a time, so that a step past an array's end is outside of every allocation. racecheck sees shared memory alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import ROOT, gpu_names, parser, write

TESTS = ROOT / "tests"
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
ERRORS_EXIT = 77

# Caches of gigabytes are tested for what they hold, not here; compilation touches no GPU; a captured graph
# launches the same kernels.
_SKIPPED = "not gib and not compile and not graph"
_FILES = (
    "test_triton_*.py",
    "test_flashmla_sanitise.py",
    "test_hopper_memory.py",
    "test_sm90_*.py",
    "test_merge.py",
    "test_gradient.py",
    "test_context_parallel.py",
)
# The groups of a file that has another choice of tests, or is several groups so that each ends within minutes.
_SEEDS = " or ".join(f"random_steps[{seed}]" for seed in range(6))  # each ratio with both kinds of lengths
_CHOSEN = {
    # The gradient's kernels run in Triton's interpreter in the other tests of its file; production sizes take minutes.
    "test_gradient.py": {"gradient": "TestOnTheGPU and not production"},
    "test_triton_compressor.py": {
        "compressor": f"{_SKIPPED} and not jax_compresses",
        "compressor_from_jax": f"{_SKIPPED} and jax_compresses",
    },
    # One seed of ratio 128 takes up to 50 seconds.
    "test_triton_layer.py": {
        "layer": f"{_SKIPPED} and not random_steps",
        "layer_random_steps": f"{_SKIPPED} and ({_SEEDS})",
    },
}
# Their long tests take 6 and over 14 minutes under the sanitizer, or compile a kernel for each of many examples; the
# quick ones launch the same kernels.
_QUICK = ("test_triton_compressor.py", "test_triton_layer.py", "test_context_parallel.py")
# Run as scripts, which take a short list of cases: all their tests would not end under the sanitizer within minutes.
_SCRIPTS = {
    "attention": "triton_attention_cases.py",
    "metadata": "test_triton_metadata.py",
    "topk_kernels": "test_topk_kernels.py",
}
CONTROL = "control "  # groups that step over an array's end, and have to be found
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def groups(tests: str | None = None) -> dict[str, list[str]]:
    """Python's arguments by group; `tests` chooses among the tests of a group, as pytest's -k does."""
    control = str(Path(__file__).with_name("memcheck_control.py"))
    commands = {CONTROL + kind: [control, kind] for kind in ("read", "write")}
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for path in sorted(path for pattern in _FILES for path in TESTS.rglob(pattern)):
        group = path.stem.removeprefix("test_").removeprefix("triton_")
        # With the long tests, which pyproject.toml leaves out.
        marked = "not soak and not long" if path.name in _QUICK else "not soak"
        for name, chosen in _CHOSEN.get(path.name, {group: _SKIPPED}).items():
            chosen = f"({chosen}) and ({tests})" if tests else chosen
            commands[name] = [*options, "-m", marked, "-k", chosen, str(path)]
    return commands | {group: [str(next(TESTS.rglob(name)))] for group, name in _SCRIPTS.items()}


class Sanitizer(NamedTuple):
    program: str
    tool: str
    logs: Path

    def log(self, group: str) -> Path:
        return self.logs / f"{self.tool}_{group.replace(' ', '_')}.log"


def start(group: str, arguments: list[str], sanitizer: Sanitizer, gpu: str) -> subprocess.Popen:
    # XLA's and torch's pools would hide a step over an array's end.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    alone = alone if sanitizer.tool == "memcheck" else {}
    paths = [str(TESTS / "support"), str(ROOT), str(ROOT / "interop"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": gpu}
    # Python may take longer than the sanitizer waits by default, where many start at once.
    command = [sanitizer.program, "--tool", sanitizer.tool, "--target-processes", "application-only"]
    command += ["--launch-timeout", "120", "--print-limit", "0"]  # 0: no limit
    command += ["--error-exitcode", str(ERRORS_EXIT), sys.executable, *arguments]
    log = sanitizer.log(group).open("w")
    options = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT, "start_new_session": True}
    return subprocess.Popen(command, env=os.environ | alone | variables, **options)


def stop(process: subprocess.Popen) -> None:
    """Ends the sanitizer and the program under it, which outlives the sanitizer alone and holds the GPU's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(log: str, exit_code: int | None) -> dict:
    """The sanitizer's and the tests' results; no exit code is a process that had to be stopped."""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", log)
    ran = re.findall(r"(\d+ (?:passed|checks passed).*)", log)
    wanted = exit_code == 0 and bool(summary) and int(summary[-1]) == 0 and bool(ran)
    return {
        "as_wanted": wanted,
        "errors": int(summary[-1]) if summary else None,
        "tests": ran[-1].strip("= ") if ran else None,
        "exit_code": exit_code,
    }


def control_verdict(log: str, group: str) -> dict:
    """Whether the control's step out of bounds was found."""
    errors = log.count(f"Invalid __global__ {group.removeprefix(CONTROL)} of size 4 bytes")
    return {"as_wanted": errors > 0, "errors": errors}


def run(chosen: dict[str, list[str]], sanitizer: Sanitizer, limit: float) -> Iterator[tuple[str, dict]]:
    """Each group's verdict when its process ends; what has not ended within the limit is stopped."""
    started = time.monotonic()
    running: dict[str, subprocess.Popen] = {}
    try:
        for (group, arguments), gpu in zip(chosen.items(), itertools.cycle(gpu_names() or [""])):
            running[group] = start(group, arguments, sanitizer, gpu)
        while running:
            time.sleep(0.2)
            late = time.monotonic() - started > limit
            for group, process in list(running.items()):
                exit_code = process.poll()
                if exit_code is None and not late:
                    continue
                if exit_code is None:
                    stop(process)
                del running[group]
                yield group, judged(group, sanitizer, exit_code) | {"seconds": round(time.monotonic() - started, 1)}
    finally:
        for process in running.values():
            stop(process)


def judged(group: str, sanitizer: Sanitizer, exit_code: int | None) -> dict:
    """The verdict of the group's log, which stays where something is to be read in it."""
    path = sanitizer.log(group)
    log = path.read_text(errors="replace")
    result = control_verdict(log, group) if group.startswith(CONTROL) else verdict(log, exit_code)
    if result["as_wanted"]:
        path.unlink()
    return result


def main() -> int:
    made = parser(__doc__, "groups whose names begin so")
    made.add_argument("--tool", choices=TOOLS, default="memcheck")
    made.add_argument("--tests", help="of each group those alone that pytest's -k finds by this")
    made.add_argument("--limit-seconds", type=float, default=500)
    args = made.parse_args()
    left_out = () if args.tool == "memcheck" else (CONTROL,)
    chosen = groups(args.tests)
    names = [group for group in chosen if group.startswith(tuple(args.only)) and not group.startswith(left_out)]
    chosen = {group: chosen[group] for group in names}
    if args.dry_run:
        print(*(f"{group:24} {' '.join(arguments)}" for group, arguments in chosen.items()), sep="\n")
        return 0
    program = shutil.which("compute-sanitizer") or SANITIZER
    if not Path(program).exists():
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit")
        return 2
    rows, logs = [], Path(tempfile.mkdtemp(prefix="sanitizer_"))
    for group, result in run(chosen, Sanitizer(program, args.tool, logs), args.limit_seconds):
        rows.append({"case": group, **result})
        word = "as wanted" if result["as_wanted"] else f"NOT CLEAN, see {logs}"
        tests, seconds = result.get("tests"), result["seconds"]
        print(f"{group:18} {word:10} {result['errors']} errors, {tests}, {seconds:.0f} s", flush=True)
        write(args.tool, rows)
    return int(len(rows) < len(chosen) or not all(row["as_wanted"] for row in rows))
