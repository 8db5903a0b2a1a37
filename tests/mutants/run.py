"""Plants small faults in the Python product, one at a time, and runs the tests of their area: do they notice?

    python tests/mutants/run.py                   # all faults: about an hour on one core
    python tests/mutants/run.py topk window       # those whose names contain one of the words
    python tests/mutants/run.py --jobs 2          # two at a time, each in its own copy of the project
    python tests/mutants/run.py --check           # plants nothing: each text occurs once, each test file exists

It works on a copy in a temporary folder; the checkout is not touched. Each fault gives a line: whether the tests caught
it, the seconds they took and the first test that failed. The tests must pass without a fault. The exit status is 1
where a fault that is listed as caught passed, where a fault cannot be planted, and where tests cannot be collected.

It is run by hand, before and after the tests or much of the product change; pytest collects nothing here.
JAX_COMPILATION_CACHE_DIR, a folder for compiled programs, makes it faster.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import faults_serving  # noqa: F401  adds its faults to `FAULTS`
from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("jax_sparse_mla", "interop", "kernels_cuda", "tests", "benchmarks", "docs", "examples", "pyproject.toml")
TIMEOUT_S = 240  # a fault may make a loop endless: its tests count as failed
TIMES = itertools.count(1)


def copy_project(folder: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results*"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    code = "import jax_sparse_mla, sparse_mla_torch; print(jax_sparse_mla.__file__, sparse_mla_torch.__file__)"
    options = {"cwd": folder, "env": environment(folder), "capture_output": True, "text": True}
    imported = subprocess.run([sys.executable, "-c", code], **options)
    if imported.stdout.count(str(folder)) != 2:
        raise SystemExit(f"Python does not import the copy in {folder}: {imported.stdout}{imported.stderr}")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Imports come from the copy; bytecode is kept, for else each run compiles that of JAX and torch anew."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if sys.dont_write_bytecode:
        kept.setdefault("PYTHONPYCACHEPREFIX", str(folder.parent / "bytecode"))
    return kept | {"PYTHONPATH": os.pathsep.join([str(folder), str(folder / "interop")])}


def planted(fault: Fault, root: Path) -> str:
    """The file's text with the fault; ValueError where it cannot be planted."""
    if missing := [name for name in (fault.file, *fault.tests) if not (root / name).exists()]:
        raise ValueError(f"there is no {missing[0]}")
    text = (root / fault.file).read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.old!r} occurs {count} times in {fault.file}")
    return text.replace(fault.old, fault.new)


def write(path: Path, text: str) -> None:
    """With a time of its own: by its time and size Python knows whether the bytecode is that of a file."""
    path.write_text(text, encoding="utf-8")
    os.utime(path, (next(TIMES),) * 2)


def tested(fault: Fault, folder: Path) -> tuple[str, str]:
    """Whether it is "caught", "passed" or an "error", and the test that failed or what went wrong."""
    path = folder / fault.file
    whole, mutated = path.read_text(encoding="utf-8"), planted(fault, folder)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *fault.tests]
    options = {"cwd": folder, "env": environment(folder), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        write(path, mutated)
        done = subprocess.run(command, **options, text=True, errors="replace", timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "caught", f"no end within {TIMEOUT_S} s"
    finally:
        write(path, whole)
    if done.returncode == 5:
        return "passed", "none of these tests is quick"
    if done.returncode > 1:
        return "error", f"pytest ended with status {done.returncode}: {done.stdout[-300:]}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return ("caught" if done.returncode else "passed"), failed[1] if failed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="words of the faults' names; none: all faults")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults at a time")
    parser.add_argument("--check", action="store_true", help="whether each fault can be planted, without running tests")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if not options.names or any(word in fault.name for word in options.names)]
    wrong, copies = 0, queue.Queue()

    def result(fault: Fault) -> tuple[Fault, str, str, float]:
        start, copy = time.perf_counter(), copies.get()
        try:
            found = ("", planted(fault, ROOT)) if options.check else tested(fault, copy)
        except ValueError as error:
            found = "error", str(error)
        copies.put(copy)
        return fault, *found, time.perf_counter() - start

    with tempfile.TemporaryDirectory(prefix="mutants_") as scratch:
        for _ in range(options.jobs):
            copies.put(None if options.check else copy_project(Path(tempfile.mkdtemp(dir=scratch))))
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for fault, found, detail, seconds in pool.map(result, faults):
                wrong += found == "error" or (found == "passed" and not fault.why)
                other = " (listed otherwise)" if found and (found == "caught") == bool(fault.why) else ""
                if found:
                    print(f"{found}{other}  {seconds:5.1f} s  {fault.name}  {detail}", flush=True)
    print(f"{len(faults)} faults, {wrong} not as listed")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
