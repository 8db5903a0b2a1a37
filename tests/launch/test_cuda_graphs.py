"""Every kernel of ours is recorded into CUDA graphs: a decode step and a prefill chunk on a GPU, as XLA runs them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla import (
    DEEPSEEK_V4_FLASH,
    KVLayout,
    PagedKV,
    combine_swa_extra_indices,
    combine_topk_swa_indices,
    gather_kv,
    split_pages,
    write_kv,
)

pytest.importorskip("torch")  # its profiler
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

REPEATS = 6  # XLA makes a graph of at least 5 operations in a row


def launches(function, *args) -> dict[str, tuple[int, int]]:
    """By name, how many of a compiled function's kernels ran, and how many of these came out of a graph."""
    from benchmarks.harness import device_operations
    from benchmarks.step import from_graphs

    compiled = jax.jit(function).lower(*args).compile()
    for _ in range(3):  # the first run of a graph only warms up
        jax.block_until_ready(compiled(*args))
    operations = device_operations(lambda: jax.block_until_ready(compiled(*args)))
    captured = [operation.name for operation in from_graphs(operations)]
    names = [operation.name for operation in operations]
    return {name: (names.count(name), captured.count(name)) for name in names}


def is_ours(name: str) -> bool:
    """Triton's kernels have their function's name, the CUDA ones a C++ one."""
    return name.endswith("_kernel") or "::topk_kernel" in name or "::index_logits_kernel" in name


def assert_captured(found: dict[str, tuple[int, int]], *kernels: str) -> None:
    ours = {name: counts for name, counts in found.items() if is_ours(name)}
    assert set(kernels) <= set(ours), found
    assert all(ran == captured for ran, captured in ours.values()), ours


def some_cache():
    return PagedKV.zeros(KVLayout.V4_FP8, 5, 256)


SLOTS = jnp.arange(256, 320, dtype=jnp.int32)
INDICES = jnp.tile(jnp.arange(128, dtype=jnp.int32), (8, 1))
ROWS = jnp.full(8, 128, jnp.int32)


def write():
    return write_kv, (some_cache(), SLOTS, jnp.ones((64, 512), jnp.bfloat16)), ("write_kv_kernel",)


def gather():
    return gather_kv, (some_cache(), SLOTS), ("gather_kv_kernel",)


def split():
    def function(cache, slots):
        return split_pages(cache, 64, slots=slots)

    return function, (some_cache(), SLOTS), ("touched_pages_kernel", "split_pages_kernel")


def merge_two():
    return combine_swa_extra_indices, (INDICES, ROWS, INDICES, ROWS, 500), ("combine_swa_extra_kernel",)


def merge_topk():
    def function(topk, starts, positions, one):
        return combine_topk_swa_indices(
            topk, starts, positions, one, one, one, one, window=128, compress_ratio=4, topk=128
        )

    one = jnp.full(1, 500, jnp.int32)
    return function, (INDICES, jnp.asarray([0, 8]), ROWS, one), ("combine_topk_swa_kernel",)


@pytest.mark.parametrize("call", [write, gather, split, merge_two, merge_topk], ids=lambda call: call.__name__)
def test_kernels_are_captured(call):
    function, (first, second, *rest), kernels = call()

    def repeated(first, second, *rest):
        return [function(first, second + i, *rest) for i in range(REPEATS)]

    assert_captured(launches(repeated, first, second, *rest), *kernels)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_is_captured(phase):
    """By the kernels that every GPU has: another backend's calls are not ours to record."""
    from benchmarks.harness import device_operations
    from benchmarks.stack import Stack, fill
    from benchmarks.step import Program, Steps, from_graphs

    spec = dataclasses.replace(DEEPSEEK_V4_FLASH, index_topk=64)
    rows = 2 if phase == "decode" else 256
    stack = Stack(spec=spec, ratios=(0, 0, 4, 128, 4), batch=rows if phase == "decode" else 1, max_len=1024)
    program = Program(stack, phase, rows).lower().compile()
    assert " conditional(" not in program.compiled.as_text()
    end = () if phase == "decode" else (jnp.int32(1024),)
    steps = Steps(program, fill(stack.empty_caches()), *end)
    steps.start(256)
    steps(1)
    operations = device_operations(lambda: steps(2))
    captured = set(from_graphs(operations))
    ours = [operation for operation in operations if is_ours(operation.name)]
    missed = sorted({operation.name for operation in ours} - {operation.name for operation in captured})
    assert ours and not missed
    assert np.isfinite(np.asarray(steps.state[2], np.float32)).all()
