"""Which tests of a run passed, failed or were skipped and why, as a file; and which run nowhere.

`pytest --record=FILE` writes the file (with the `=`: pytest takes a FILE that exists for a test otherwise). On an H200
that is `benchmarks/results/h200_tests.json`, `GPU_RUN`; `OTHER_RUNS` are of other machines:
`long_tests.json` of the tests marked `long`, and those of the clients' tests, each in the client's environment (vLLM's,
SGLang's, MaxText's). README's command compares the tests that it skips or leaves out with the ones that passed there:
what no run ran must be what `UNRUN` lists, with the reason, or the command fails. Until `GPU_RUN` names tests, those
marked `gpu` count as run there. Where a tool is missing that CI has, nothing is compared.
"""

from __future__ import annotations

import collections
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU_RUN = ROOT / "benchmarks" / "results" / "h200_tests.json"
OTHER_RUNS = tuple(sorted(path for path in GPU_RUN.parent.glob("*_tests.json") if path != GPU_RUN))
UNRUN = ROOT / "tests" / "unrun.json"
# Without one of these, tests are skipped that do run elsewhere.
TOOLS = ("nvcc", "g++")
MODULES = ("torch", "transformers", "triton", "tvm_ffi")
PACKAGES = ("jax", "jaxlib", "torch", "triton", "jax-triton", "apache-tvm-ffi", "transformers")
PACKAGES += ("sgl-flash-mla", "flashinfer-python", "vllm", "sglang", "maxtext", "tokamax")


def names(nodes) -> dict[str, dict[str, list[str]]]:
    """Node ids by file and function, with the parameters of each."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for node in sorted(nodes):
        file, _, function = node.partition("::")
        function, bracket, parameters = function.partition("[")
        found[file][function].append(bracket + parameters)
    return {file: dict(functions) for file, functions in found.items()}


def nodes(names: dict[str, dict[str, list[str]]]) -> set[str]:
    """The node ids of `names`."""
    return {
        f"{file}::{function}{parameters}" if function else file
        for file, functions in names.items()
        for function, some in functions.items()
        for parameters in some
    }


def by_reason(skipped: dict[str, str]) -> dict[str, list[str]]:
    found = collections.defaultdict(list)
    for node, reason in sorted(skipped.items()):
        found[reason].append(node)
    return dict(sorted(found.items()))


def run_nowhere(skipped: dict[str, str], marked_gpu: set[str], *records: dict) -> dict[str, str]:
    """Of the tests that a run skipped or left out, by reason, those that passed in none of the recorded runs either.

    The first record is that of the run on a GPU. A module that is skipped as a whole has run where any test of it has.
    A test that another run was to run, and skipped, has the reason of that.
    """
    gpu_run, *others = records
    passed = set[str]().union(*(nodes(record.get("passed", {})) for record in records))
    if "passed" not in gpu_run:
        passed |= marked_gpu
    modules = {file for record in records for file in record.get("passed", {})}
    reasons = {node: why for record in others for why, some in record.get("skipped", {}).items() for node in some}
    return {
        node: reasons.get(node, reason)
        for node, reason in skipped.items()
        if node not in passed and not ("::" not in node and node in modules)
    }


def differences(unrun: dict[str, str], listed: dict[str, list[str]]) -> list[str]:
    """What `unrun` has and the list has not, and the reverse. A name without parameters stands for all of its."""
    entries = {entry for some in listed.values() for entry in some}
    matches = {node: {node, node.partition("[")[0]} & entries for node in unrun}
    found = [f"{node} runs nowhere ({unrun[node]})" for node, of in matches.items() if not of]
    idle = entries.difference(*matches.values())
    return sorted(found) + sorted(f"{entry} is listed as run nowhere, and is not" for entry in idle)


def missing_tools() -> list[str]:
    found = [name for name in TOOLS if shutil.which(name) is None]
    return found + [name for name in MODULES if importlib.util.find_spec(name) is None]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """$COMMIT, for a copy of the checkout whose history is not its own."""
    if given := os.environ.get("COMMIT"):
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or None


class RunRecord:
    """A plugin of the process that starts the tests and of each of xdist's workers."""

    def __init__(
        self,
        config: pytest.Config,
        device: str,
        *,
        gpu_run: Path = GPU_RUN,
        other_runs: Sequence[Path] = OTHER_RUNS,
        unrun: Path = UNRUN,
    ):
        self.config, self.device, self.unrun = config, device, unrun
        self.records = gpu_run, *other_runs
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.left_out: set[str] = set()  # for being marked `long`
        self.marked_gpu: set[str] = set()
        self.wrong: list[str] = []

    # --- what the tests say ---

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
            if self.config.getoption("--record"):  # a run may be cut off before its summary
                self.config.get_terminal_writer().line(f"\nFAILED {report.nodeid}")
        elif report.skipped:
            self._skip(report.nodeid, report.longrepr)
        elif report.when == "call":
            self.passed.add(report.nodeid)
        if "gpu" in report.keywords:
            self.marked_gpu.add(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.skipped:
            self._skip(report.nodeid, report.longrepr)

    def pytest_deselected(self, items) -> None:
        # By markers, not by keywords, among which are the names of folders.
        long = [item for item in items if item.get_closest_marker("long") and not item.get_closest_marker("soak")]
        self.left_out |= {item.nodeid for item in long}

    def _skip(self, node: str, longrepr) -> None:
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        self.skipped[node] = reason.removeprefix("Skipped: ")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        """xdist forwards reports of tests, not those of modules that are skipped and of tests that are left out."""
        found = getattr(node, "workeroutput", {})
        self.skipped |= found.get("skipped_modules", {})
        self.left_out |= set(found.get("left_out", ()))

    # --- at the end ---

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["skipped_modules"] = {n: why for n, why in self.skipped.items() if "::" not in n}
            self.config.workeroutput["left_out"] = sorted(self.left_out)
            return
        if path := self.config.getoption("--record"):
            Path(path).write_text(self.as_json())
        if self._is_the_whole_suite() and self.device == "cpu" and not missing_tools():
            records = [json.loads(path.read_text()) if path.exists() else {} for path in self.records]
            not_run = self.skipped | dict.fromkeys(self.left_out, "takes long")
            unrun = run_nowhere(not_run, self.marked_gpu, *records)
            self.wrong = differences(unrun, json.loads(self.unrun.read_text()))
            if self.wrong and exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.left_out:
            commits = [str(json.loads(path.read_text()).get("commit")) for path in self.records if path.exists()]
            commits = ", ".join(dict.fromkeys(commits))
            line = f"{len(self.left_out)} tests marked long were left out; recorded runs: commits {commits}"
            terminalreporter.line(line)
        if self.wrong:
            title = f"{self.unrun.name} is not what neither this run nor a recorded one ran"
            terminalreporter.section(title, red=True)
            for line in self.wrong:
                terminalreporter.line(line)

    def _is_the_whole_suite(self) -> bool:
        chosen = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly")
        given = any(self.config.getoption(name, None) for name in chosen)
        # Without marks on the command line pyproject.toml's own leave out what takes long.
        given |= self.config.getoption("markexpr", "") not in ("", *self.config.getini("addopts"))
        whole = self.config.args_source is not pytest.Config.ArgsSource.ARGS
        return whole and not given and bool(self.passed)

    def as_json(self) -> str:
        """A file of few lines, one for each test module."""
        passed = self.passed - self.failed
        facts = {
            "device": self.device,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in PACKAGES},
            "commit": _commit(),
            "counts": {"passed": len(passed), "failed": len(self.failed), "skipped": len(self.skipped)},
        }
        parts = {
            "passed": names(passed),
            "failed": names(self.failed),
            "skipped": by_reason(self.skipped),
        }
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()]
        for part, of in parts.items():
            inner = [f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in of.items()]
            lines.append(f" {json.dumps(part)}: {{\n" + ",\n".join(inner) + "\n }")
        return "{\n" + ",\n".join(lines) + "\n}\n"
