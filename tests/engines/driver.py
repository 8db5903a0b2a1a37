"""Runs an engine's code in a process of its own, where it takes itself for one on an H200; reads what it reports."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def skip_without(engine: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(engine) is None
    return pytest.mark.skipif(absent, reason=f"{engine} is not installed: docs/contributing.md has the commands")


@functools.cache
def reported(script: str, *arguments: str) -> dict[str, dict]:
    """The script's lines of JSON, by case; under "log" what it said on stderr."""
    ours = map(str, (ROOT, ROOT / "interop", ROOT / "tests/support"))
    paths = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines} | {"log": done.stderr}
