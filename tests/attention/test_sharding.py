"""Attention, caches and whole steps over several devices, by jax.shard_map, over explicit axes and under plain jit:
heads and tokens without a collective, keys merged by lse.

The bodies run in another process, which has four virtual CPU devices; this one keeps its own.
"""

from __future__ import annotations

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
)


def run_bodies(*names: str) -> dict[str, str]:
    """Every body's traceback, empty where it passed: one process for all, as starting one costs seconds."""
    return virtual_devices.results(virtual_devices.start("sharded_bodies", *names, devices=4), timeout=600)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return run_bodies()


@pytest.mark.long
def test_steps_of_the_other_model():
    failures = {name: error for name, error in run_bodies("decode_steps_of_v4", "chunks_of_v32").items() if error}
    assert not failures, "\n".join(failures.values())


@pytest.mark.parametrize("name", NAMES)
def test_sharded_equals_one_device(results, name):
    assert results[name] == "", results[name]


def test_every_body_is_named(results):
    assert list(results) == list(NAMES)
