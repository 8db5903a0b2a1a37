"""Where results are written, and what stands beside every number: device, versions, commit, code, command.

Two runs are of the same code when their digests of the packages, the CUDA sources and the benchmarks agree; commits
that touch nothing else leave the digest as it is. Results of other code are never continued.

    python -m benchmarks.record     # this checkout's commit and digest
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch")
_PEERS = ("sgl-flash-mla", "sgl-deep-gemm", "sglang", "sglang-kernel", "flashinfer-python", "apache-tvm-ffi")
_CODE = ("jax_sparse_mla", "interop", "kernels_cuda", "benchmarks")
_SUFFIXES = frozenset((".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h"))
# Of benchmarks: they run the others or show what these measured.
_NOT_MEASURING = ("all.py", "plots.py", "table_rows.py", "tables.py")


def results_folder() -> Path:
    """$OUT, or benchmarks/results."""
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment() -> dict:
    """Device, driver, versions, commit, digest of the code, and command."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    device, _, driver = (gpu or "").splitlines()[0].partition(", ") if gpu else (None, None, None)
    return {
        "device": device,
        "driver": driver,
        "versions": {name: version(name) for name in _PACKAGES + _PEERS},
        "commit": commit(),
        "code": code_digest(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def gpu_names() -> list[str]:
    """Of the GPUs that programs see, what CUDA_VISIBLE_DEVICES calls each."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(number) for number in range(len((_output("nvidia-smi", "-L") or "").splitlines()))]


def gpu_memory() -> int | None:
    """MiB of the machine's smallest GPU; None without one, or where the driver does not tell."""
    found = _output("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    return min((int(line) for line in found.splitlines() if line.strip().isdigit()), default=None)


@functools.cache
def commit() -> str | None:
    """$COMMIT, for a copy of the checkout without its history; else the last commit that touched the code."""
    if given := os.environ.get("COMMIT"):
        return given
    folders = [*_CODE, ":(exclude)benchmarks/results", *(f":(exclude)benchmarks/{name}" for name in _NOT_MEASURING)]
    last = _output("git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", *folders)
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *folders)
    return f"{last}-dirty" if last and changed else last or None


@functools.cache
def code_digest() -> str:
    """Twelve hex digits of the SHA-256 of all that is measured or measures, by path and content."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (ROOT / folder).rglob("*") if path.suffix in _SUFFIXES):
        if path.parent.name == "benchmarks" and path.name in _NOT_MEASURING:
            continue
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def latest(name: str) -> dict:
    """What stands under this name where results go now, or else in benchmarks/results; {} if nothing does."""
    paths = [folder / name for folder in (results_folder(), RESULTS) if (folder / name).exists()]
    return json.loads(paths[0].read_text()) if paths else {}


def earlier(name: str) -> dict:
    """What a run of this very code left under this name; {} if none did, or if other code made it."""
    found = latest(name)
    return found if found.get("code") == code_digest() else {}


def section(name: str, title: str) -> dict:
    """The rows of a section of a file of results, as far as this very code made them on such a device."""
    found = latest(name).get(title, {})
    own = all(found.get(key) == value for key, value in _made_by().items())
    return own_rows(found["rows"]) if own else {}


def own_rows(rows: dict[str, dict]) -> dict[str, dict]:
    return {case: row for case, row in rows.items() if is_own(row)}


def is_own(row: dict) -> bool:
    """Whether a row is of its file's own run: one of an earlier run names its commit."""
    return "commit" not in row


def write_section(name: str, title: str, rows: dict) -> None:
    """Writes a section beside the others of a file; each says of which device, commit and command it is."""
    made = _made_by() | {"commit": commit(), "command": environment()["command"]}
    write_json(results_folder() / name, latest(name) | environment() | {title: made | {"rows": rows}})


def _made_by() -> dict:
    return {key: value for key, value in environment().items() if key in ("device", "versions", "code")}


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


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(commit(), code_digest())
