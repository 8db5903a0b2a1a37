"""The whole test suite on this machine, and what ran of it, for benchmarks/results/h200_tests.json.

    python -m benchmarks.suite [--workers 15] [PYTEST ARGUMENTS ...]

Writes how many tests passed, failed and were skipped, why they were skipped, and the names of those that failed.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.record import ROOT, environment, results_folder, write_json

OUTCOMES = ("passed", "failed", "error", "skipped")


def summary(report: Path) -> dict:
    """Of pytest's JUnit report: counts, the reasons of what was skipped with their counts, names of what failed."""
    counts, reasons, failed = collections.Counter(dict.fromkeys(OUTCOMES, 0)), collections.Counter(), []
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag: child for child in case}
        outcome = next((name for name in ("error", "failure", "skipped") if name in found), "passed")
        counts[{"failure": "failed"}.get(outcome, outcome)] += 1
        if outcome == "skipped":
            reasons[re.sub(r"^Skipped: ", "", found["skipped"].get("message") or "no reason given")] += 1
        elif outcome != "passed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return dict(counts) | {"skipped_because": dict(reasons.most_common()), "names_of_failures": sorted(failed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=15)
    args, others = parser.parse_known_args()
    # The checkout's own rules are tested by CI, which has its history.
    rules = ROOT / "tests" / "repository" / "test_repository.py"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(args.workers), "--dist", "worksteal"]
        command += [f"--ignore={rules}", f"--junitxml={report}", *others]
        started = time.monotonic()
        exit_code = subprocess.run(command, cwd=ROOT).returncode
        seconds = round(time.monotonic() - started)
        if not report.exists():
            return exit_code
        found = summary(report)
    write_json(results_folder() / "h200_tests.json", environment() | {"seconds": seconds} | found)
    print({name: found[name] for name in OUTCOMES}, f"in {seconds} s")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
