"""compute-sanitizer's memcheck over small, hostile shapes of every kernel.

    python -m benchmarks.memcheck [GROUP ...] [--limit-seconds 120]

A group is a test file that launches its kernels on the GPU, most of it through torch, some through `jax.jit`. Each
runs in a sanitised process of its own, all at once, with memory allocated one array at a time, so that a read or write
past an array's end is outside of every allocation. Writes memcheck.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import environment, results_folder, write_json

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
ERRORS_EXIT = 77

# Caches of gigabytes are tested for what they hold, not here; compilation touches no GPU; a captured graph
# launches the same kernels.
_SKIPPED = "not gib and not compile and not graph"


def _pytest(name: str, *options: str) -> list[str]:
    return ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", _SKIPPED, str(TESTS / name), *options]


# What python runs, by group. A file that is not there is skipped, by name.
GROUPS = {
    "attention": [str(TESTS / "triton_attention_cases.py")],
    "kv_cache": _pytest("test_triton_kv.py"),
    "topk": _pytest("test_triton_topk.py"),
    "indexer": _pytest("test_triton_indexer.py"),
    "metadata": _pytest("test_triton_metadata.py"),
    "compressor": _pytest("test_triton_compressor.py"),
}


def present(group: str) -> bool:
    return all(Path(word).exists() for word in GROUPS[group] if word.endswith(".py"))


def start(group: str, sanitizer: str, folder: Path) -> subprocess.Popen:
    # XLA's and torch's pools would hide a step over an array's end.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    paths = [str(TESTS), str(ROOT), str(ROOT / "interop"), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | alone | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    command = [sanitizer, "--tool", "memcheck", "--target-processes", "application-only"]
    command += ["--error-exitcode", str(ERRORS_EXIT), sys.executable, *GROUPS[group]]
    log = (folder / f"memcheck_{group}.log").open("w")
    return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def verdict(log: str, exit_code: int | None) -> dict:
    """What the sanitizer and the tests say; no exit code is a process that had to be stopped."""
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    ran = re.findall(r"(\d+ (?:passed|checks passed).*)", log)
    clean = exit_code == 0 and bool(summary) and int(summary[-1]) == 0 and bool(ran)
    return {
        "clean": clean,
        "errors": int(summary[-1]) if summary else None,
        "tests": ran[-1].strip("= ") if ran else None,
        "exit_code": exit_code,
    }


def run(groups: list[str], sanitizer: str, limit: float) -> dict[str, dict]:
    folder = results_folder()
    started = time.monotonic()
    processes = {group: start(group, sanitizer, folder) for group in groups}
    verdicts = {}
    for group, process in processes.items():
        try:
            exit_code = process.wait(max(0.1, limit - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            exit_code = None
        path = folder / f"memcheck_{group}.log"
        log = path.read_text(errors="replace")
        verdicts[group] = verdict(log, exit_code) | {"seconds": round(time.monotonic() - started, 1)}
        if verdicts[group]["clean"]:
            path.unlink()
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", nargs="*", help=f"all by default: {', '.join(GROUPS)}")
    parser.add_argument("--limit-seconds", type=float, default=120)
    args = parser.parse_args()
    if unknown := set(args.group) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    sanitizer = shutil.which("compute-sanitizer") or SANITIZER
    if not Path(sanitizer).exists():
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit")
        return 2
    groups = args.group or list(GROUPS)
    missing = [group for group in groups if not present(group)]
    verdicts = run([group for group in groups if group not in missing], sanitizer, args.limit_seconds)
    for group, result in verdicts.items():
        word = "clean" if result["clean"] else "NOT CLEAN"
        print(f"{group:12} {word:10} {result['errors']} errors, {result['tests']}, {result['seconds']:.0f} s")
    if missing:
        print("no such test file: " + ", ".join(missing))
    write_json(results_folder() / "memcheck.json", environment() | {"groups": verdicts, "missing": missing})
    return int(not all(result["clean"] for result in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
