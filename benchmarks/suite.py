"""The whole test suite on this machine, and which tests ran of it, for benchmarks/results/h200_tests.json (or h100_).

python -m benchmarks.suite [--workers 15] [PYTEST ARGUMENTS ...]    # workers for each GPU, by its memory without it
python -m benchmarks.suite --half operations|rest       # joins the record of the other half, if this very code made it
python -m benchmarks.suite --merge RECORD RECORD ...    # of runs over different test files of one code
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import ROOT, earlier, environment, gpu_memory, gpu_names, results_folder, write_json

INTERRUPTED = 2  # pytest's exit code
OPERATIONS = ("attention", "compressor", "contract", "indexer", "indices", "kv_cache", "metadata")  # folders of tests/
HALVES = ("operations", "rest")
RULES = "tests/repository/test_repository.py"  # the checkout's own, which CI tests, for it has the history
SOAK = "tests/serving/test_soak.py"  # hours, by its own command
RAN = ("passed", "failed")
RECORDED = ("machine", "python", "counts", "passed", "failed", "skipped")  # what `pytest --record` writes of a run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, help="for each GPU; by default 15 on an H200 and 8 on an H100")
    parser.add_argument("--half", choices=HALVES, help="of the folders of tests")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RECORD")
    args, others = parser.parse_known_args()
    if args.merge:
        total = merged([json.loads(path.read_text()) for path in args.merge])
        total |= {"halves": [half for half in HALVES if covers(total, half)]}
        write_json(results_folder() / record_of(total["device"]), total)
        return 0
    gpus = gpu_names()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            str((args.workers or workers_a_gpu(gpu_memory())) * max(1, len(gpus))),
            "--dist",
            "worksteal",
            "-m",
            "not soak",
        ]
        started = time.monotonic()
        before = signal.signal(signal.SIGINT, lambda *_: None)  # it ends pytest: what ran until then is recorded
        command += [f"--ignore={ROOT / RULES}", f"--record={path}", *others, *(folders(args.half) if args.half else ())]
        try:
            exit_code = subprocess.run(command, cwd=ROOT, env=os.environ | {"GPUS_OF_TESTS": ",".join(gpus)}).returncode
        finally:
            signal.signal(signal.SIGINT, before)
        seconds = round(time.monotonic() - started)
        if not path.exists() or (args.half and exit_code == INTERRUPTED):
            return exit_code or 1
        found = json.loads(path.read_text())
    content = environment() | {"gpus": len(gpus), "seconds": seconds, "interrupted": exit_code == INTERRUPTED}
    content |= {name: found[name] for name in RECORDED if name in found}
    name = record_of(content["device"])
    if args.half:
        content |= {"halves": [args.half]}
        if (before := earlier(name)) and set(before.get("halves", ())) == set(HALVES) - {args.half}:
            content = merged([before, content])
    write_json(results_folder() / name, content)
    print(found["counts"], f"in {seconds} s")
    return exit_code


def folders(half: str) -> list[str]:
    """The folders of tests that are a half of the suite."""
    names = sorted({path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")})
    return [f"tests/{name}" for name in names if (name in OPERATIONS) == (half == HALVES[0])]


def record_of(device: str | None) -> str:
    """The name of the record of runs on such a device."""
    return "h100_tests.json" if "H100" in (device or "") else "h200_tests.json"


def workers_a_gpu(memory: int | None) -> int:
    """How many test processes fit a GPU of so many MiB: contexts of torch and JAX, and tests that take gigabytes."""
    return 15 if memory is None else max(1, min(15, memory // 9_500))


def merged(runs: list[dict]) -> dict:
    """The record of several runs as if they were one. A test file that failed may be in a later run again, once mended.

    Raises:
      ValueError: they are of different code, devices or versions, or share a test file that did not fail.
    """
    first, *others = runs
    total = first | {"skipped": {reason: list(nodes) for reason, nodes in first["skipped"].items()}}
    for run in others:
        if different := [name for name in ("device", "versions", "code", "python") if run[name] != first[name]]:
            raise ValueError(f"the runs differ in {', '.join(different)}")
        total = without(total, total["failed"].keys() & files(run))
        if both := files(total) & files(run):
            raise ValueError(f"more than one run has {', '.join(sorted(both))}")
        for reason, nodes in run["skipped"].items():
            total["skipped"].setdefault(reason, []).extend(nodes)
        total |= {name: total[name] | run[name] for name in RAN}
        if halves := total.get("halves", []) + run.get("halves", []):
            total |= {"halves": halves}
        total |= {"seconds": total["seconds"] + run["seconds"], "command": f"{total['command']} && {run['command']}"}
    ran = {name: sum(len(some) for tests in total[name].values() for some in tests.values()) for name in RAN}
    return total | {"counts": ran | {"skipped": sum(map(len, total["skipped"].values()))}}


def covers(run: dict, half: str) -> bool:
    """Whether a run had all test files of a half of the suite."""
    paths = {
        path.relative_to(ROOT).as_posix() for folder in folders(half) for path in (ROOT / folder).glob("test_*.py")
    }
    skipped = {node.split("::")[0] for nodes in run["skipped"].values() for node in nodes}
    return paths - {RULES, SOAK} <= files(run) | skipped


def files(run: dict) -> set[str]:
    """The test files of which something passed or failed."""
    return set().union(*(run[name] for name in RAN))


def without(run: dict, left_out: set[str]) -> dict:
    """The record of a run as if it had not had these test files."""
    kept = {name: {file: tests for file, tests in run[name].items() if file not in left_out} for name in RAN}
    skipped = {
        reason: [x for x in nodes if x.split("::")[0] not in left_out] for reason, nodes in run["skipped"].items()
    }
    return run | kept | {"skipped": {reason: nodes for reason, nodes in skipped.items() if nodes}}


if __name__ == "__main__":
    sys.exit(main())
