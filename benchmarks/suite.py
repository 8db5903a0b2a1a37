"""The whole test suite on this machine, and which tests ran of it, for benchmarks/results/h200_tests.json.

python -m benchmarks.suite [--workers 15] [PYTEST ARGUMENTS ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import ROOT, environment, results_folder, write_json

RECORDED = ("machine", "python", "counts", "passed", "failed", "skipped")  # what `pytest --record` writes of a run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=15)
    args, others = parser.parse_known_args()
    # The checkout's own rules are tested by CI, which has its history.
    rules = ROOT / "tests" / "repository" / "test_repository.py"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(args.workers),
            "--dist",
            "worksteal",
            "-m",
            "not soak",
        ]
        started = time.monotonic()
        exit_code = subprocess.run([*command, f"--ignore={rules}", f"--record={path}", *others], cwd=ROOT).returncode
        seconds = round(time.monotonic() - started)
        if not path.exists():
            return exit_code or 1
        found = json.loads(path.read_text())
    content = environment() | {"seconds": seconds} | {name: found[name] for name in RECORDED if name in found}
    write_json(results_folder() / "h200_tests.json", content)
    print(found["counts"], f"in {seconds} s")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
