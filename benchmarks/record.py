"""Where results are written, and what stands beside every number: device, versions, commit, command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "sgl-flash-mla", "sglang-kernel", "flashinfer-python")


def results_folder() -> Path:
    """$OUT, or benchmarks/results."""
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment() -> dict:
    """Device, driver, versions, commit ($COMMIT where there is no git) and command."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    device, _, driver = (gpu or "").splitlines()[0].partition(", ") if gpu else (None, None, None)
    return {
        "device": device,
        "driver": driver,
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": os.environ.get("COMMIT") or _output("git", "describe", "--always", "--dirty"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def earlier(name: str) -> dict:
    """What earlier runs wrote under this name, where results go now or else in benchmarks/results; {} if none did."""
    paths = [folder / name for folder in (results_folder(), RESULTS) if (folder / name).exists()]
    return json.loads(paths[0].read_text()) if paths else {}


def write_json(path: Path, content: dict) -> None:
    """One line for each row or case; whole or not at all, since a run may be stopped at any time."""
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(f" {json.dumps(k)}: {_lines(v)}" for k, v in content.items()) + "\n}\n")
    partial.replace(path)


def _lines(value: object) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(x)}" for x in value) + "\n ]"
    return json.dumps(value)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
