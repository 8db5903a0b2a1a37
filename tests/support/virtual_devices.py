"""Test functions over several virtual CPU devices, in a process of their own: what starts it, and what it runs.

A process reports on a line RESULTS with JSON behind it.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

SUPPORT = pathlib.Path(__file__).parent


def start(module: str, *arguments: object, devices: int) -> subprocess.Popen:
    """A module of this folder in a process of so many devices; no backend that a caller's environment asks for."""
    dropped = [f"JAX_SPARSE_MLA_{name}BACKEND" for name in ("", "DECODE_", "PREFILL_")]
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(SUPPORT / f"{module}.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process: subprocess.Popen, timeout: float = 900) -> Any:
    """What a process reports, once it has ended."""
    try:
        out, error = process.communicate(timeout=timeout)
    finally:
        process.kill()
    lines = [line for line in out.splitlines() if line.startswith("RESULTS")]
    assert process.returncode == 0 and lines, f"exit {process.returncode}\n{out}\n{error}"
    return json.loads(lines[-1].removeprefix("RESULTS"))


def chosen_cases(request: pytest.FixtureRequest, test: str, parameter: str) -> list[str]:
    """The cases of a module's test that are in this run: one process has them all, as starting one takes seconds."""
    items = [item for item in request.session.items if item.path == request.path and item.originalname == test]
    return [item.callspec.params[parameter] for item in items]


def report(found: Any) -> None:
    """Prints, in the process, what `results` returns."""
    print("RESULTS" + json.dumps(found), flush=True)


def run_cases(cases: Mapping[str, Callable[[], None]], names: Iterable[str]) -> None:
    """Runs these cases in the process and reports each one's traceback, empty where it passed."""
    errors = {}
    for name in names:
        try:
            cases[name]()
        except Exception:
            errors[name] = traceback.format_exc()
        else:
            errors[name] = ""
        print(name, errors[name] or "passed", file=sys.stderr, flush=True)
    report(errors)


def assert_refused(call: Callable[[], Any], words: str) -> None:
    """The call must raise a ValueError with these words."""
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
