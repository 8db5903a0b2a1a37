"""FlashMLA's own test files, as they are, with the drop-in in the place of its module.

    git clone --depth 1 https://github.com/deepseek-ai/FlashMLA
    python -m benchmarks flashmla_tests FlashMLA/tests [--decode 310] [--prefill 40]

Each file runs as a script, of whose list of cases so many are taken, evenly spread; nothing is timed. Prints what the
files print about failures, how many passed by which backend, and ends with status 1 where one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import runpy
import sys
import types
from collections import Counter
from pathlib import Path
from unittest import mock

from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import call_cache

from benchmarks.harness import write

FILES = {"decode": "test_flash_mla_sparse_decoding.py", "prefill": "test_flash_mla_sparse_prefill.py"}


def spread(cases: list, count: int) -> list:
    """So many of the cases, the first and the last among them."""
    count = min(count, len(cases))
    return [cases[i * (len(cases) - 1) // max(count - 1, 1)] for i in range(count)]


class Cases:
    """In the place of a function that both files call once they have made their list `testcases`."""

    def __init__(self, count: int):
        self.count, self.taken, self.of = count, 0, 0

    def __call__(self) -> bool:
        caller = sys._getframe(1)
        cases = caller.f_locals["testcases"]
        self.of = len(cases)
        cases[:] = spread(cases, self.count)
        for case in cases:
            case.num_runs = 0  # of timing, which looks for the names of FlashMLA's kernels
        self.taken = len(cases)
        return True


def run(folder: Path, phase: str, count: int) -> dict:
    """A row: how many cases the file had, took and passed, and which backends served them."""
    call_cache.forget()
    cases, said, failed = Cases(count), io.StringIO(), False
    lib = importlib.import_module("lib")
    try:
        with mock.patch.object(lib, "is_no_cooldown", cases), contextlib.redirect_stdout(said):
            runpy.run_path(str(folder / FILES[phase]), run_name="__main__")
    except SystemExit as status:
        failed = bool(status.code)
    lines = said.getvalue().splitlines()
    if failed:
        print(*lines[-40:], sep="\n")
    backends = Counter(call.plan.backend for call in call_cache.calls.values() if call.plan)
    row = {"case": phase, "cases": cases.of, "taken": cases.taken, "shapes": dict(backends)}
    row |= {"said": next((x for x in reversed(lines) if "passed" in x or "failed" in x), "")}
    return row | ({"failed": lines[-1] if lines else ""} if failed or not cases.taken else {})


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("folder", type=Path, nargs="?", help="FlashMLA's tests/")
    made.add_argument("--decode", type=int, default=310, metavar="CASES")
    made.add_argument("--prefill", type=int, default=40, metavar="CASES")
    made.add_argument("--dry-run", action="store_true", help="list the files; needs no GPU")
    args = made.parse_args()
    if args.dry_run or args.folder is None:
        print(*FILES.values(), sep="\n")
        return int(not args.dry_run)
    sys.modules["flash_mla"] = flash_mla
    for name in ("rich", "rich.console", "rich.table"):  # of a table of times
        if name not in sys.modules and importlib.util.find_spec("rich") is None:
            sys.modules[name] = mock.MagicMock(spec=types.ModuleType)
    sys.path.insert(0, str(args.folder.resolve()))
    rows = []
    for phase in FILES:
        rows.append(run(args.folder, phase, getattr(args, phase)))
        print(rows[-1], flush=True)
        write("flashmla_tests", rows)
    return int(any("failed" in row for row in rows))
