"""The Triton kernels of metadata and schedules, bit by bit against the plain JAX functions.

Without a GPU they run in Triton's interpreter through the torch launchers, and are compiled for the architectures
that they serve. On a GPU the same tests launch them for real, and those marked `gpu` go through JAX's dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_facts import ARCHITECTURES, compiled_facts
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_cases import DRAFTS, MAX_LEN, MODES, TINY_V4, make_batch, make_tables, to_jax
from on_the_cpu import on_the_cpu

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from metadata_tensors import DEVICE, INT_MAX, INT_MIN, POISON, assert_same, poison, tensor
from sparse_mla_torch.operations import metadata as torch_metadata
from torch_graphs import capture

from jax_sparse_mla.indices.window import (
    swa_gather_plan,
    swa_gather_plan_reference,
    swa_slots_reference,
)
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables, build_v4_metadata
from jax_sparse_mla.metadata.schedules import (
    flashmla_schedule,
    flashmla_schedule_reference,
    paged_mqa_schedule,
    paged_mqa_schedule_reference,
)
from jax_sparse_mla.metadata.v4 import build_v4_reference, has_v4_kernel
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO

pytestmark = pytest.mark.torch

DRAFT_LAYER = dataclasses.replace(TINY_V4, name="draft layer", compress_ratios=(0,))
INDEXED_ONLY = dataclasses.replace(TINY_V4, name="indexed only", compress_ratios=(0, 4))
PROPERTY = settings(max_examples=10, deadline=None)

_SCHEDULE = ("topk", "extra_topk", "num_sm_parts")
plain_v4 = on_the_cpu(build_v4_reference, static_argnums=0)
plain_schedule = on_the_cpu(flashmla_schedule_reference, static_argnames=_SCHEDULE)
plain_indexer_schedule = on_the_cpu(paged_mqa_schedule_reference, static_argnums=(1, 2))
plain_slots = on_the_cpu(swa_slots_reference, static_argnames="window")
plain_gather = on_the_cpu(swa_gather_plan_reference, static_argnames=("window", "capacity"))


def array(x) -> jax.Array:
    return jnp.asarray(np.array(x, np.int64).astype(np.int32))


# ---- schedules ----

COLUMNS = ((128, 0), (128, 512), (100, 1000))
# (batch, columns of both tables, partitions); 132 are a whole H200, more than a warp has lanes. Each is a program.
SCHEDULES = (
    (1, 128, 0, 1),
    (1, 128, 512, 33),
    (5, 100, 1000, 7),
    (74, 128, 512, 33),
    (74, 128, 0, 132),
    (256, 100, 1000, 12),
    (257, 128, 512, 9),
    (2050, 100, 1000, 33),
)
LENGTHS = {
    "any": lambda rng, n: rng.integers(-3, 1100, n),
    "short": lambda rng, n: rng.integers(0, 3, n),
    "one long": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 1000, 1),
    "hostile": lambda rng, n: rng.choice([INT_MIN, -7, 0, 1, 63, 64, 65, INT_MAX], n),
}


def schedule_lengths(seed, batch, main, extra):
    rng = np.random.default_rng(seed)
    return [LENGTHS[kind](rng, batch) for kind in (main, extra)]


def contexts_of(seed, rows):
    rng = np.random.default_rng(seed)
    contexts = rng.integers(-5, rng.choice([2, 700, 40_000]), rows)
    contexts[rng.random(rows) < 0.05] = rng.choice([INT_MIN, INT_MAX])
    return contexts


def torch_schedule(main, extra, topk, extra_topk, num_sm_parts):
    """By the torch launcher into poisoned buffers."""
    empty = functools.partial(torch.empty, dtype=torch.int32, device=DEVICE)
    out = poison((empty((num_sm_parts, 8)), empty(len(main) + 1)))
    sizes = {"topk": topk, "extra_topk": extra_topk, "num_sm_parts": num_sm_parts}
    extra = tensor(extra) if extra_topk else None
    made = torch_metadata.flashmla_schedule(tensor(main), extra_topk_length=extra, **sizes, out=out)
    assert all(x is given for x, given in zip(made, out, strict=True))
    return out


def plain_schedule_of(main, extra, *sizes):
    return plain_schedule(array(main), array(extra), **dict(zip(_SCHEDULE, sizes)))


@pytest.mark.long
@PROPERTY
@given(
    shape=st.sampled_from(SCHEDULES),
    main=st.sampled_from(sorted(LENGTHS)),
    extra=st.sampled_from(sorted(LENGTHS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_schedule_equals_plain_jax(shape, main, extra, seed):
    batch, *sizes = shape
    lengths = schedule_lengths(seed, batch, main, extra)
    assert_same(torch_schedule(*lengths, *sizes), plain_schedule_of(*lengths, *sizes))


@pytest.mark.always(4)
@pytest.mark.parametrize("split_kv", [256, 1])
@pytest.mark.parametrize(
    "contexts",
    [[0] * 9, [INT_MIN, -1], [1], [0, 70_000, 0, 3], [INT_MAX] * 40, [5] * 700],
    ids=["none", "negative", "one", "one long", "more than int32 counts", "two chunks"],
)
def test_the_indexers_schedule_alone(contexts, split_kv):
    out = torch.full((34, 2), POISON, dtype=torch.int32, device=DEVICE)
    torch_metadata.paged_mqa_schedule(tensor(contexts), num_sms=33, split_kv=split_kv, out=out)
    assert_same(out, plain_indexer_schedule(array(contexts), 33, split_kv))


# ---- V4 metadata ----


def torch_v4(spec, batch, tables):
    """By the torch launcher into poisoned buffers; arrays of the JAX batch and tables."""
    to_torch = functools.partial(jax.tree.map, lambda x: torch.from_numpy(np.array(x)).to(DEVICE))
    out = poison(to_torch(plain_v4(spec, batch, tables)))
    assert torch_metadata.build_v4_metadata(spec, to_torch(batch), to_torch(tables), out=out) is out
    return out


@pytest.mark.always("ForwardMode.DECODE")
@PROPERTY
@given(
    model=st.sampled_from([(TINY_V4, 37), (TINY_V4, 1000), (DRAFT_LAYER, MAX_LEN), (INDEXED_ONLY, MAX_LEN)]),
    hostile=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("mode", MODES)
def test_v4_metadata_equals_plain_jax(mode, model, hostile, seed):
    """Every pair of a model and its longest sequence is a program of its own to compile."""
    spec, max_seq_len = model
    rng = np.random.default_rng(seed)
    table, to_swa = make_tables(rng, page_size=TINY_V4.page_size, holes=hostile)
    fields = make_batch(rng, mode, hostile=hostile)
    batch, tables = to_jax(mode, fields, table, to_swa, max_seq_len=max_seq_len)
    assert_same(torch_v4(spec, batch, tables), plain_v4(spec, batch, tables))


def v4_step(rng, mode, requests, rows, *, spec=DEEPSEEK_V4_FLASH, columns=2050, drafts=None):
    """A step of a real model: a table wider than one block of pages, padding requests and hostile values among it."""
    table, to_swa = rng.integers(-1, 1 << 20, (requests, columns)), rng.integers(-1, 1 << 20, 1 << 20)
    seq_lens = rng.integers(0, columns + 10, requests)
    seq_lens[rng.random(requests) < 0.1] = 0
    pool = rng.permutation(requests)
    pool[rng.random(requests) < 0.05] = rng.choice([-1, INT_MAX, requests])
    fields = {
        "req_pool_indices": pool,
        "seq_lens": seq_lens,
        "out_cache_loc": rng.choice([-1, INT_MIN, INT_MAX, *rng.integers(0, 1 << 20, 50)], rows),
        "extend_lens": rng.multinomial(rows, np.full(requests, 1 / requests)) - rng.integers(0, 2, requests),
    }
    batch, tables = to_jax(mode, fields, table, to_swa, max_seq_len=columns)
    if drafts:
        batch = dataclasses.replace(batch, num_draft_tokens=drafts)
    return spec, batch, tables


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
def test_a_model_whose_pages_take_several_programs(mode):
    rng = np.random.default_rng(3)
    requests, rows = 3, {ForwardMode.DECODE: 3, ForwardMode.TARGET_VERIFY: 3 * DRAFTS}.get(mode, 11)
    columns = 256 * 300 + 7  # 301 pages: two programs, the second one's last columns are padding
    step = v4_step(rng, mode, requests, rows, spec=DEEPSEEK_V4_PRO, columns=columns)
    assert_same(torch_v4(*step), plain_v4(*step))


def test_which_models_have_a_kernel():
    ratios = {(): True, (0,): True, (0, 4): True, (0, 4, 128): True, (0, 128): False, (0, 2, 4, 8): False}
    ratios |= {(0, 1): False, (0, 2): False, (2, 4): False}  # of V4.1
    for given_ratios, expected in ratios.items():
        assert has_v4_kernel(dataclasses.replace(DEEPSEEK_V4_FLASH, compress_ratios=given_ratios)) == expected


# ---- the window ----


def window_case(seed, requests, rows):
    rng = np.random.default_rng(seed)
    table, to_swa = make_tables(rng, page_size=16, holes=True)
    hostile = [INT_MIN, -1, INT_MAX, MAX_LEN, 7]

    def some(low, high, n):
        values = rng.integers(low, high, n)
        bad = rng.random(n) < 0.15
        return np.where(bad, rng.choice(hostile, n), values)

    return {
        "tables": (table, to_swa),
        "rows": (some(-1, MAX_LEN, rows), some(0, 6, rows)),
        "requests": (some(0, MAX_LEN, requests), some(0, 20, requests), some(0, 6, requests)),
    }


@PROPERTY
@given(seed=st.integers(0, 2**32 - 1), window=st.sampled_from([1, 5, 128]))
def test_swa_slots_equal_plain_jax(seed, window):
    case = window_case(seed, 1, 9)
    tables = RequestTables(req_to_token=tensor(case["tables"][0]), full_to_swa=tensor(case["tables"][1]))
    out = torch.full((9, window), POISON, dtype=torch.int32, device=DEVICE)
    torch_metadata.swa_slots(*map(tensor, case["rows"]), tables, window=window, out=out)
    assert_same(out, plain_slots(*map(array, (*case["rows"], *case["tables"])), window=window))


@PROPERTY
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 5, 40), (4, 5, 300), (4, 1, 0), (33, 128, 600), (1030, 3, 100)]),
)
def test_swa_gather_plan_equals_plain_jax(seed, shape):
    requests, window, capacity = shape
    case = window_case(seed, requests, 1)
    tables = RequestTables(req_to_token=tensor(case["tables"][0]), full_to_swa=tensor(case["tables"][1]))
    plan = torch_metadata.swa_gather_plan(*map(tensor, case["requests"]), tables, window=window, capacity=capacity)
    args = map(array, (*case["requests"], *case["tables"]))
    assert_same(plan, plain_gather(*args, window=window, capacity=capacity))


# ---- arguments, compilation ----


def test_bad_tensors_are_refused_by_name():
    lengths, wide = tensor([1, 2]), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    schedule = functools.partial(torch_metadata.flashmla_schedule, topk=64, num_sm_parts=4)
    with pytest.raises(TypeError, match=r"topk_length must be a torch\.Tensor, int32"):
        schedule(wide)
    with pytest.raises(ValueError, match="extra_topk_length with extra_topk"):
        schedule(lengths, extra_topk_length=lengths)
    with pytest.raises(ValueError, match="needs a row"):
        schedule(lengths[:0])
    with pytest.raises(ValueError, match=r"out\[1\] must have shape"):
        schedule(lengths, out=(torch.zeros((4, 8), dtype=torch.int32, device=DEVICE), lengths))
    with pytest.raises(ValueError, match="paged_mqa_schedule: context_lens must have at least one row"):
        torch_metadata.paged_mqa_schedule(lengths[:0], num_sms=4)
    batch = ForwardBatch(
        mode=ForwardMode.DECODE, max_seq_len=64, req_pool_indices=lengths, seq_lens=lengths, out_cache_loc=lengths
    )
    tables = RequestTables(req_to_token=tensor(np.zeros((2, 64))), full_to_swa=lengths)
    build = functools.partial(torch_metadata.build_v4_metadata, TINY_V4)
    with pytest.raises(TypeError, match=r"batch.seq_lens must be a torch.Tensor, int32"):
        build(dataclasses.replace(batch, seq_lens=wide), tables)
    with pytest.raises(ValueError, match="num_draft_tokens must be given in TARGET_VERIFY"):
        build(dataclasses.replace(batch, mode=ForwardMode.TARGET_VERIFY), tables)
    with pytest.raises(ValueError, match=r"out_cache_loc must have one entry per request in DECODE, \[2\], got \[3\]"):
        build(dataclasses.replace(batch, out_cache_loc=tensor([1, 2, 3])), tables)
    with pytest.raises(ValueError, match=r"V4's compress ratios \(none, 4, or 4 and one more\)"):
        spec = dataclasses.replace(TINY_V4, compress_ratios=(0, 8))
        torch_metadata.build_v4_metadata(spec, batch, tables)
    with pytest.raises(ValueError, match=r"out.page_table must have shape"):
        build(batch, tables, out=dataclasses.replace(build(batch, tables), page_table=tables.req_to_token))


@pytest.mark.long
@ARCHITECTURES
def test_kernels_compile_for_every_architecture_without_a_gpu(capabilities, tmp_path):
    facts = compiled_facts("metadata", tmp_path, capabilities)
    for fact in facts:
        # However large the batch: its lengths stay in device memory.
        assert fact["shared"] <= 8192, fact
    # What makes a step of the walk short.
    assert all(fact["redux"] for fact in facts if fact["kernel"].startswith("flashmla schedule"))


# ---- on a GPU ----


def assert_runs_kernels(function, *args):
    """Jitted; returns the result. The platform is chosen at compilation."""
    lowered = jax.jit(function).lower(*args)
    assert re.search(r"@jax_sparse_mla\.\w+_kernel\.", lowered.as_text())
    compiled = lowered.compile()
    assert "conditional" not in compiled.as_text()
    return compiled(*args)


GPU_STEPS = [
    (ForwardMode.DECODE, 64, 64, None, 131_072),
    (ForwardMode.DECODE, 4096, 4096, None, 2050),
    (ForwardMode.TARGET_VERIFY, 700, 2800, 4, 3000),
    (ForwardMode.DRAFT_EXTEND, 70, 210, 3, 3000),
    (ForwardMode.EXTEND, 1100, 16_384, None, 1000),
    (ForwardMode.EXTEND, 3, 5000, None, 70_000),
    (ForwardMode.IDLE, 3, 7, None, 3000),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "requests", "rows", "drafts", "columns"), GPU_STEPS)
def test_jax_builds_v4_metadata_with_the_kernels(mode, requests, rows, drafts, columns):
    rng = np.random.default_rng(rows)
    spec, batch, tables = v4_step(rng, mode, requests, rows, columns=columns, drafts=drafts)
    batch = dataclasses.replace(  # what the mode does not read selects no kernel
        batch,
        num_draft_tokens=drafts,
        extend_lens=batch.extend_lens if mode is ForwardMode.EXTEND else None,
    )
    made = assert_runs_kernels(functools.partial(build_v4_metadata, spec), batch, tables)
    assert_same(made, plain_v4(spec, batch, tables))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64, 1024, 1025, 4096, 16_384, 65_536])
@pytest.mark.parametrize("parts", [132, 66])
def test_jax_makes_schedules_with_the_kernels(batch, parts):
    for seed, kind in enumerate(LENGTHS):
        for topk, extra_topk in COLUMNS:
            main, extra = schedule_lengths(seed, batch, kind, "any")
            sizes = {"batch": batch, "topk": topk, "extra_topk": extra_topk, "num_sm_parts": parts}
            made = flashmla_schedule(array(main), extra_topk_length=array(extra) if extra_topk else None, **sizes)
            assert_same(made, plain_schedule_of(main, extra, topk, extra_topk, parts))
        contexts = array(contexts_of(seed, batch + 3))
        assert_same(paged_mqa_schedule(contexts, num_sms=132), plain_indexer_schedule(contexts, 132, 256))


@pytest.mark.gpu
def test_jax_plans_the_windows_gather_with_the_kernels_and_plain_code_under_vmap():
    case = window_case(1, 700, 1)
    requests, tables = ([*map(array, case[name])] for name in ("requests", "tables"))
    plan = functools.partial(swa_gather_plan, window=5, capacity=20_000)
    expected = plain_gather(*requests, *tables, window=5, capacity=20_000)
    assert_same(assert_runs_kernels(plan, *requests, *tables), expected)
    batched = jax.vmap(lambda *x: plan(*x, *tables))(*(jnp.stack([x, x]) for x in requests))
    assert_same([x[1] for x in batched], [*expected])


@pytest.mark.gpu
def test_a_decode_steps_metadata_is_one_launch():
    """No copy to the host, and nothing beside it."""
    spec, batch, tables = v4_step(np.random.default_rng(0), ForwardMode.DECODE, 64, 64, columns=131_072)
    batch = dataclasses.replace(batch, num_draft_tokens=None, extend_lens=None)
    build = jax.jit(functools.partial(build_v4_metadata, spec))
    text = build.lower(batch, tables).compile().as_text()
    assert text.count("custom-call(") == 1 and "fusion(" not in text, text


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
def test_torch_captures_a_steps_metadata_in_a_cuda_graph(mode):
    drafts = 3 if mode is ForwardMode.TARGET_VERIFY else None
    rows = {ForwardMode.DECODE: 20, ForwardMode.TARGET_VERIFY: 60}.get(mode, 100)
    steps = [v4_step(np.random.default_rng(seed), mode, 20, rows, drafts=drafts) for seed in range(3)]
    spec = steps[0][0]
    to_torch = functools.partial(jax.tree.map, lambda x: torch.from_numpy(np.array(x)).to(DEVICE))
    batch, tables = to_torch(steps[0][1]), to_torch(steps[0][2])
    sizes = {"topk": 128, "extra_topk": 512, "num_sm_parts": 132}

    def step():
        made = torch_metadata.build_v4_metadata(spec, batch, tables, out=out)
        lengths = {"extra_topk_length": made.c4_topk_lengths, "out": schedule}
        torch_metadata.flashmla_schedule(made.swa_topk_lengths, **sizes, **lengths)
        torch_metadata.paged_mqa_schedule(made.c4_lengths, num_sms=132, out=indexer)

    out = to_torch(plain_v4(*steps[0]))
    empty = functools.partial(torch.empty, dtype=torch.int32, device=DEVICE)
    schedule, indexer = (empty((132, 8)), empty(rows + 1)), empty((133, 2))
    step()  # compiles
    graph, _ = capture(step)
    for _, new_batch, new_tables in steps[1:]:
        poison((out.page_table, out.compressed, schedule, indexer))
        for old, new in zip(jax.tree.leaves((batch, tables)), jax.tree.leaves((new_batch, new_tables))):
            old.copy_(torch.from_numpy(np.array(new)))
        graph.replay()
        expected = plain_v4(spec, new_batch, new_tables)
        assert_same(out, expected)
        assert_same(schedule, plain_schedule(expected.swa_topk_lengths, expected.c4_topk_lengths, **sizes))
        assert_same(indexer, plain_indexer_schedule(expected.c4_lengths, 132, 256))


def small_cases() -> None:
    """Every kernel once on small shapes, results compared: what compute-sanitizer watches.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python tests/metadata/test_triton_metadata.py

    Under `jax.default_device` of a CPU: what XLA compiles for a GPU, the sanitizer would have to instrument.
    """
    for batch, parts in ((1, 1), (74, 33), (300, 12), (1100, 132)):
        lengths, contexts = schedule_lengths(batch, batch, "hostile", "any"), contexts_of(batch, batch + 3)
        for columns in COLUMNS:
            assert_same(torch_schedule(*lengths, *columns, parts), plain_schedule_of(*lengths, *columns, parts))
        alone = torch_metadata.paged_mqa_schedule(tensor(contexts), num_sms=20)
        assert_same(alone, plain_indexer_schedule(array(contexts), 20, 256))
    every_mode = [(mode, TINY_V4) for mode in MODES]
    for mode, spec in [*every_mode, (ForwardMode.EXTEND, DRAFT_LAYER), (ForwardMode.EXTEND, INDEXED_ONLY)]:
        rng = np.random.default_rng(4)
        table, to_swa = make_tables(rng, page_size=TINY_V4.page_size, holes=True)
        batch, tables = to_jax(mode, make_batch(rng, mode, hostile=True), table, to_swa)
        assert_same(torch_v4(spec, batch, tables), plain_v4(spec, batch, tables))
    case = window_case(5, 33, 9)
    on_device, on_jax = ([*map(face, case["tables"])] for face in (tensor, array))
    tables = RequestTables(req_to_token=on_device[0], full_to_swa=on_device[1])
    slots = torch_metadata.swa_slots(*map(tensor, case["rows"]), tables, window=5)
    assert_same(slots, plain_slots(*map(array, case["rows"]), *on_jax, window=5))
    static = {"window": 5, "capacity": 300}
    plan = torch_metadata.swa_gather_plan(*map(tensor, case["requests"]), tables, **static)
    assert_same(plan, plain_gather(*map(array, case["requests"]), *on_jax, **static))


if __name__ == "__main__":
    with jax.default_device(jax.devices("cpu")[0]):
        small_cases()
    print("4 checks passed: schedules, V4 metadata, window slots, the window's gather")
