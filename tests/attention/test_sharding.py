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
_TEXT = Path(virtual_devices.SUPPORT, "sharded_bodies.py").read_text()
NAMES = re.findall(r"^@body\ndef (\w+)|^    \"(\w+)\": \((?:None|4|128), ", _TEXT, re.MULTILINE)
NAMES = [body or step for body, step in NAMES]


@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    """Every body's traceback, empty where it passed."""
    chosen = virtual_devices.chosen_cases(request, "test_sharded_equals_one_device", "name")
    return virtual_devices.results(virtual_devices.start("sharded_bodies", *chosen, devices=4), timeout=600)


@pytest.mark.always("context_parallel_decode", "heads_and_tokens", "plain_jit", "decode_steps", "decode_steps_of_v4")
@pytest.mark.parametrize("name", NAMES)
def test_sharded_equals_one_device(results, name):
    assert results[name] == "", results[name]
