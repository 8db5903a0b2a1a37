"""Attention, caches and whole steps over several devices, by jax.shard_map, over explicit axes and under plain jit:
heads and tokens without a collective, keys merged by lse.

The bodies run in another process, which has four virtual CPU devices; this one keeps its own.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

DEVICES = 4
SUPPORT = str(pathlib.Path(__file__).parents[1] / "support")

# The functions of `sharded_bodies`, which is not imported here: it needs four devices.
NAMES = (
    "decode_over_heads",
    "decode_over_tokens",
    "prefill_over_heads",
    "prefill_over_tokens",
    "bfloat16_over_both",
    "gradients_over_tokens",
    "gradients_through_kernels",
    "context_parallel",
    "context_parallel_decode",
    "context_parallel_prefill",
    "plain_jit",
    "plain_jit_of_a_kernel",
    "caches_under_plain_jit",
    "explicit_axes",
    "chunks_of_a_selection",
    "decode_steps",
    "chunks",
)


def run_bodies(*arguments: str) -> dict[str, str]:
    """Every body's traceback, empty where it passed: one process for all, as starting one costs seconds."""
    # No accelerator, and no backend that a caller's environment asks for.
    dropped = (
        "JAX_SPARSE_MLA_BACKEND",
        "JAX_SPARSE_MLA_DECODE_BACKEND",
        "JAX_SPARSE_MLA_PREFILL_BACKEND",
    )
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), SUPPORT])
    environment |= {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "sharded_bodies", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS")]
    assert done.returncode == 0 and lines, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(lines[-1].removeprefix("RESULTS"))


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return run_bodies()


@pytest.mark.long
def test_steps_of_the_other_model():
    failures = {name: error for name, error in run_bodies("long").items() if error}
    assert not failures, "\n".join(failures.values())


@pytest.mark.parametrize("name", NAMES)
def test_sharded_equals_one_device(results, name):
    assert results[name] == "", results[name]


def test_every_body_is_named(results):
    assert list(results) == list(NAMES)
