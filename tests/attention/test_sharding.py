"""Attention, caches and whole steps over several devices, by jax.shard_map, over explicit axes and under plain jit:
heads and tokens without a collective, keys merged by lse.

The bodies run in another process, which has four virtual CPU devices; this one keeps its own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import virtual_devices

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
    "decode_steps_of_v4",
    "decode_steps_of_ratio_128",
    "chunks_of_v32",
)


@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    """Every body's traceback, empty where it passed."""
    chosen = virtual_devices.chosen_cases(request, "test_sharded_equals_one_device", "name")
    return virtual_devices.results(virtual_devices.start("sharded_bodies", *chosen, devices=4), timeout=600)


@pytest.mark.always("context_parallel_decode", "prefill_over_tokens", "plain_jit", "decode_steps", "decode_steps_of_v4")
@pytest.mark.parametrize("name", NAMES)
def test_sharded_equals_one_device(results, name):
    assert results[name] == "", results[name]


def test_every_body_is_named():
    text = Path(virtual_devices.SUPPORT, "sharded_bodies.py").read_text()
    assert tuple(re.findall(r"^@body\ndef (\w+)", text, re.MULTILINE)) == NAMES
