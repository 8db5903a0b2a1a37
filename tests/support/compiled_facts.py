"""Facts about kernels that `compile_triton.py` compiles for GPUs that are not at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# Bytes of shared memory that one block may have, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
LEAST_SHARED_MEMORY = min(SHARED_MEMORY.values())

# Every run compiles for the generation without e4m3 and for the one with wgmma. The others take the branches of one of
# the two, or tiles for less shared memory: a long test compiles for them, also on a machine with a GPU.
ARCHITECTURES = pytest.mark.parametrize(
    "capabilities",
    [
        pytest.param((80, 90), marks=pytest.mark.no_gpu, id="sm80-sm90"),
        pytest.param((89, 120), marks=pytest.mark.long, id="sm89-sm120"),
        pytest.param((100,), marks=pytest.mark.long, id="sm100"),
    ],
)


def compiled_facts(name: str, cache: Path, capabilities: Sequence[int]) -> list[dict]:
    """The facts about the kernels of this name for these capabilities, compiled in a process of its own.

    Triton's interpreter, once on, replaces the compiler.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # What debuggers read of a kernel takes a tenth of the time.
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1", "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        str(Path(__file__).with_name("compile_triton.py")),
        name,
        ",".join(map(str, capabilities)),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert {fact["capability"] for fact in facts} == set(capabilities)
    return facts
