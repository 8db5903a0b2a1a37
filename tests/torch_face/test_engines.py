"""Engine-shaped batches as metadata: equal to the JAX builders field by field, on the shapes that engines reported.

On a GPU `build_metadata` launches kernels; without one it goes through JAX, and the same kernels are called by hand in
Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from enum import IntEnum, auto

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_cases import DRAFTS, MAX_LEN, MODES, TINY_V4, TINY_V32, i32, make_batch, make_tables, to_jax

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from metadata_tensors import DEVICE, INT_MAX, INT_MIN, assert_same, poison
from sparse_mla_torch import engines
from sparse_mla_torch.engines import build_metadata, draft_step, sglang_step, vllm_step
from torch_graphs import capture

from jax_sparse_mla import metadata, topk_transform
from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables, draft_step_batch

pytestmark = pytest.mark.torch

DRAFT_V4 = dataclasses.replace(TINY_V4, name="draft layer", compress_ratios=(0,))
OPTIONS = {"fp8_kv_cache": True, "prefill_backend": "flashmla_sparse"}
BUCKETS = (1, 2, 4, 8, 12, 16)


def long(x) -> torch.Tensor:
    return torch.from_numpy(np.array(x, np.int64)).to(DEVICE)


def int32(x) -> torch.Tensor:
    return long(x).to(torch.int32)


def by_jax(spec, batch, tables):
    if spec.window is not None:
        return metadata.build_v4_metadata(spec, batch, tables)
    return metadata.build_v32_metadata(spec, batch, tables, **OPTIONS)


def launch(spec, step, out=None):
    """The kernels, whatever the device."""
    return engines._launch(spec, step, **OPTIONS, out=out)


# A workspace also for few rows, which by the plan attend to the pages.
BUILDS = {"build_metadata": functools.partial(build_metadata, prefill_backend="flashmla_sparse"), "kernels": launch}


class SglangMode(IntEnum):
    """As SGLang's enum: other values, more names."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()


def sglang(mode, fields, table, to_swa, **changes):
    """A step from numpy fields, of the dtypes that SGLang has."""
    tensors = {
        "req_pool_indices": long(fields["req_pool_indices"]),
        "seq_lens": long(fields["seq_lens"]),
        "out_cache_loc": long(fields["out_cache_loc"]),
        "extend_seq_lens": int32(fields["extend_lens"]),
        "req_to_token": int32(table),
        "full_to_swa": None if to_swa is None else long(to_swa),
        "num_draft_tokens": DRAFTS,
    }
    return sglang_step(mode, **{**tensors, **changes})


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(
    spec=st.sampled_from([TINY_V4, TINY_V32]),
    build=st.sampled_from(sorted(BUILDS)),
    hostile=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("mode", MODES)
def test_sglang_steps_equal_the_jax_builders(mode, spec, build, hostile, seed):
    rng = np.random.default_rng(seed)
    table, to_swa = make_tables(rng, page_size=spec.page_size, holes=hostile)
    fields = make_batch(rng, mode, hostile=hostile)
    expected = by_jax(spec, *to_jax(mode, fields, table, to_swa))
    made = BUILDS[build](spec, sglang(mode, fields, table, to_swa))
    assert_same(made, expected)
    again = BUILDS[build](spec, sglang(mode, fields, table, to_swa), out=poison(made))
    assert again is made
    assert_same(again, expected)


def test_modes_by_any_of_their_names():
    fields, (table, to_swa) = make_batch(np.random.default_rng(0), ForwardMode.DECODE), tiny_tables()
    names = {
        ForwardMode.EXTEND: [SglangMode.EXTEND, SglangMode.MIXED, "SPLIT_PREFILL", ForwardMode.EXTEND],
        ForwardMode.DECODE: [SglangMode.DECODE, "DECODE"],
        ForwardMode.TARGET_VERIFY: [SglangMode.TARGET_VERIFY],
        ForwardMode.DRAFT_EXTEND: [SglangMode.DRAFT_EXTEND_V2, ForwardMode.DRAFT_EXTEND],
        ForwardMode.IDLE: [SglangMode.IDLE],
    }
    for mode, aliases in names.items():
        assert {sglang(alias, fields, table, to_swa).batch.mode for alias in aliases} == {mode}
    for unknown in ("PREBUILT", 3, None):
        with pytest.raises(ValueError, match="forward_mode must be one of DECODE"):
            sglang(unknown, fields, table, to_swa)


def tiny_tables(page_size=TINY_V4.page_size):
    return make_tables(np.random.default_rng(1), page_size=page_size)


def test_int64_saturates_and_everything_else_is_refused_by_name():
    fields, (table, to_swa) = make_batch(np.random.default_rng(0), ForwardMode.EXTEND), tiny_tables()
    fields["out_cache_loc"][:4] = [2**32 + 5, -(2**32) + 5, 2**31, 2**63 - 1]
    step = sglang("EXTEND", fields, table, to_swa)
    assert step.batch.out_cache_loc[:4].tolist() == [INT_MAX, INT_MIN, INT_MAX, INT_MAX]
    tensors = [x for x in jax.tree.leaves(step)]
    assert len(tensors) == 6 and all(x.dtype == torch.int32 and x.is_contiguous() for x in tensors)
    # What is int32 already is not copied.
    to_swa32 = int32(to_swa)
    step = sglang("EXTEND", fields, table, None, req_to_token=(kept := int32(table)), full_to_swa=to_swa32)
    assert step.tables.req_to_token is kept and step.tables.full_to_swa is to_swa32

    refused = functools.partial(sglang, "EXTEND", fields, table, to_swa)
    for name, value, error, message in [
        ("req_to_token", long(table), TypeError, r"req_to_token must be a .*int32 \[any, any\], got torch.int64"),
        ("req_to_token", int32(table).to(torch.int16), TypeError, r"req_to_token .*got torch.int16"),
        ("req_to_token", int32(table).T, ValueError, "req_to_token must be contiguous"),
        ("req_to_token", int32(table)[0], ValueError, r"req_to_token must have shape \[any, any\]"),
        ("seq_lens", [1, 2], TypeError, "seq_lens must be a torch.Tensor, .*got list"),
        ("seq_lens", long([1]).float(), TypeError, "seq_lens must be a torch.Tensor, int32 or int64"),
        ("out_cache_loc", int32([[1]]), ValueError, r"out_cache_loc must have shape \[any\]"),
        ("full_to_swa", int32([1, 2]).to(torch.uint8), TypeError, "full_to_swa must be"),
        ("extend_seq_lens", None, TypeError, "extend_seq_lens must be a torch.Tensor.*got NoneType"),
        (
            "req_pool_indices",
            torch.empty(4, dtype=torch.int64, device="meta"),
            ValueError,
            f"req_pool_indices must be on {long([0]).device}, got meta",
        ),
    ]:
        with pytest.raises(error, match=f"sglang_step: {message}"):
            refused(**{name: value})
    with pytest.raises(ValueError, match=r"tiny V4 has a window, and the step no full_to_swa"):
        build_metadata(TINY_V4, refused(full_to_swa=None))


def test_buffers_of_another_step_are_refused():
    (table, to_swa), rng = tiny_tables(), np.random.default_rng(0)
    steps = {mode: sglang(mode, make_batch(rng, mode), table, to_swa) for mode in MODES}
    out = build_metadata(TINY_V4, steps[ForwardMode.DECODE])
    # JAX's tree names the field and its dtype, the launcher the field and its shape.
    with pytest.raises(ValueError, match=r"out\.\w+ must (be torch\.int32|have shape) \[19\]"):
        build_metadata(TINY_V4, steps[ForwardMode.EXTEND], out=out)
    out = build_metadata(TINY_V32, steps[ForwardMode.DECODE])
    with pytest.raises(ValueError, match=r"build_.*metadata: out"):
        build_metadata(TINY_V32, steps[ForwardMode.EXTEND], out=out)


@pytest.mark.parametrize("rows, transform", [(255, TopkTransform.PAGED), (256, TopkTransform.RAGGED)])
def test_the_plan_decides_what_an_extend_step_attends_to(rows, transform):
    """From the crossover on (docs/reference/routing.md) it gathers, where the engine leaves the choice to the plan."""
    step = sglang_step(
        "EXTEND",
        req_to_token=torch.zeros((1, 64), dtype=torch.int32),
        req_pool_indices=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.full((1,), 5, dtype=torch.int32),
        out_cache_loc=torch.zeros(rows, dtype=torch.int32),
        extend_seq_lens=torch.full((1,), 5, dtype=torch.int32),
    )
    assert build_metadata(TINY_V32, step).topk_transform is transform


@pytest.mark.parametrize("build", sorted(BUILDS))
def test_fp8_cache_with_sparse_prefill_in_decode_mode(build):
    """A decode step reads the paged cache whatever prefills: its top-k must not ask for the workspace's offsets."""
    rng = np.random.default_rng(3)
    table, _ = make_tables(rng, page_size=TINY_V32.page_size)
    for mode, transform in ((ForwardMode.DECODE, TopkTransform.PAGED), (ForwardMode.EXTEND, TopkTransform.RAGGED)):
        fields = make_batch(rng, mode)
        made = BUILDS[build](TINY_V32, sglang(mode, fields, table, None))
        assert made.topk_transform is transform
        assert (made.topk_indices_offset is None) == (made.kv_slots is None) == (transform is TopkTransform.PAGED)
        lengths = made.seqlens_expanded.cpu().numpy()
        logits = rng.standard_normal((len(lengths), MAX_LEN)).astype(np.float32)
        arrays = jax.tree.map(lambda x: jax.numpy.asarray(x.cpu().numpy()), made)
        where = {"topk_indices_offset": arrays.topk_indices_offset}
        if transform is TopkTransform.PAGED:
            where = {"page_table": arrays.page_table, "page_size": 8, "row_to_request": arrays.row_to_request}
        slots = np.asarray(topk_transform(logits, arrays.seqlens_expanded, 6, method=transform, **where))
        if transform is TopkTransform.RAGGED:
            slots = np.where(slots >= 0, np.asarray(arrays.kv_slots)[slots], -1)
        for row, length in enumerate(lengths):
            owner = fields["req_pool_indices"][int(made.row_to_request[row])]
            best = np.argsort(-logits[row, :length])[:6]
            assert set(slots[row]) - {-1} == set(table[owner][best])


# Multi-step drafts, and buckets of requests.


def draft_fields(rng, requests, num_steps):
    return {
        "req_pool_indices": rng.permutation(16)[:requests],
        "seq_lens": rng.integers(1, MAX_LEN - num_steps, requests),
        "out_cache_loc": rng.integers(1, 500, requests * num_steps),
        "extend_lens": np.zeros(requests),
    }


def draft_tables(spec):
    rng = np.random.default_rng(2)
    table, to_swa = make_tables(rng, page_size=spec.page_size)
    return np.resize(table, (16, MAX_LEN)), None if spec.window is None else to_swa


@pytest.mark.parametrize("build", sorted(BUILDS))
@pytest.mark.parametrize("spec", [DRAFT_V4, TINY_V32], ids=lambda spec: spec.name)
def test_an_eagle_draft_of_two_requests_and_three_steps(spec, build):
    table, to_swa = draft_tables(spec)
    fields = draft_fields(np.random.default_rng(5), 2, 3)
    fields["out_cache_loc"] = np.arange(100, 106)
    draft = sglang(SglangMode.DECODE, fields, table, to_swa)
    whole, tables = to_jax(ForwardMode.DECODE, fields, table, to_swa)
    for index, slots in enumerate([[100, 103], [101, 104], [102, 105]]):
        step = draft_step(draft, index, 3)
        made = BUILDS[build](spec, step)
        assert made.out_cache_loc.tolist() == slots
        lengths = made.seq_lens_causal if spec.window is not None else made.seqlens_expanded
        assert lengths.tolist() == (fields["seq_lens"] + index + 1).tolist()
        assert_same(made, by_jax(spec, draft_step_batch(whole, index, 3), tables))
    with pytest.raises(ValueError, match="out_cache_loc must have"):
        BUILDS[build](spec, draft)  # not cut


@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from([(1, 1, 1), (2, 1, 3), (3, 2, 2)]), shift=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_draft_steps_equal_jax(shape, shift, seed):
    requests, topk, num_steps = shape
    rng = np.random.default_rng(seed)
    fields = {
        "req_pool_indices": rng.choice([0, 3, -7, INT_MAX, INT_MIN], requests),
        "seq_lens": rng.choice([0, 5, 300, -4, INT_MIN, INT_MAX, INT_MAX - 1], requests),
        "out_cache_loc": rng.choice([-1, INT_MAX, INT_MIN, *range(100)], requests * topk * num_steps),
        "extend_lens": np.zeros(requests),
    }
    (table, to_swa), options = tiny_tables(), {"topk": topk, "shift_seq_lens": shift}
    step = sglang("DECODE", fields, table, to_swa)
    batch, _ = to_jax(ForwardMode.DECODE, fields, table, to_swa)
    for index in range(num_steps):
        made = draft_step(step, index, num_steps, **options).batch
        want = draft_step_batch(batch, index, num_steps, **options)
        assert_same(jax.tree.leaves(made), jax.tree.leaves(dataclasses.replace(want, max_seq_len=MAX_LEN)))


def test_what_draft_step_refuses():
    fields, (table, to_swa) = draft_fields(np.random.default_rng(0), 2, 3), tiny_tables()
    step = sglang("DECODE", fields, table, to_swa)
    with pytest.raises(ValueError, match=r"B \* topk \* num_steps = 2 \* 1 \* 2 entries, got 6"):
        draft_step(step, 0, 2)
    for index in (-1, 3):
        with pytest.raises(ValueError, match="0 <= index < num_steps"):
            draft_step(step, index, 3)
    with pytest.raises(ValueError, match="step must be in DECODE, got IDLE"):
        draft_step(sglang("IDLE", fields, table, to_swa), 0, 3)


class Bucket:
    """The input tensors of an engine's graph for so many requests; the engine's own, int64, refilled every step."""

    def __init__(self, spec, size, num_steps):
        table, to_swa = draft_tables(spec)
        self.spec, self.num_steps = spec, num_steps
        self.fixed = {"req_to_token": int32(table), "full_to_swa": None if to_swa is None else long(to_swa)}
        self.inputs = {name: long(np.zeros(size)) for name in ("req_pool_indices", "seq_lens")}
        self.inputs["out_cache_loc"] = long(np.zeros(size * num_steps))

    def fill(self, fields):
        """With padding requests of length 0 behind the real ones."""
        for name, x in self.inputs.items():
            x.zero_()
            x[: len(fields[name])] = long(fields[name])

    def build(self, build, outs):
        """The metadata of every step of the draft."""
        whole = sglang_step("DECODE", **self.fixed, **self.inputs)
        steps = [draft_step(whole, i, self.num_steps) for i in range(self.num_steps)]
        return [build(self.spec, step, out=out) for step, out in zip(steps, outs)]


def assert_eager(outs, spec, fields) -> None:
    """What a bucket's metadata has of a smaller batch is that of each of its steps by JAX."""
    whole, tables = to_jax(ForwardMode.DECODE, fields, *draft_tables(spec))
    for index, made in enumerate(outs):
        expected = by_jax(spec, draft_step_batch(whole, index, 3), tables)
        cut = jax.tree.map(lambda x, want: x[tuple(slice(n) for n in want.shape)], made, expected)
        cut = dataclasses.replace(cut, overflow=made.overflow) if hasattr(cut, "cu_seqlens_q") else cut
        assert_same(cut, expected)


def assert_rest_is_padding(made, requests, spec):
    rows = [made.seq_lens_causal, made.swa_topk_lengths] if spec.window is not None else [made.seqlens_expanded]
    indices = [made.swa_page_indices] if spec.window is not None else []
    assert not any(x[requests:].any() for x in (*rows, made.out_cache_loc))
    assert all((x[requests:] == -1).all() for x in (*indices, made.positions, made.page_table))


@pytest.mark.always(2)
@pytest.mark.parametrize("size", BUCKETS)
@pytest.mark.parametrize("spec", [DRAFT_V4, TINY_V32], ids=lambda spec: spec.name)
def test_padded_buckets_hold_the_eager_metadata(spec, size):
    """Draft after draft of ever other sizes in the same buffers, as a graph's replays write them.

    The sizes are those of the buckets, so that few programs are compiled for what is expected.
    """
    rng, bucket = np.random.default_rng(size), Bucket(spec, size, num_steps=3)
    outs = [None] * 3
    for requests in sorted({size, 1, *[x for x in BUCKETS if x < size][-1:]}, reverse=True):
        fields = draft_fields(rng, requests, 3)
        bucket.fill(fields)
        outs = bucket.build(launch, [out and poison(out) for out in outs])
        assert_eager(outs, spec, fields)
        for made in outs:
            assert_rest_is_padding(made, requests, spec)


@pytest.mark.gpu
@pytest.mark.parametrize("size", BUCKETS)
@pytest.mark.parametrize("spec", [DRAFT_V4, TINY_V4, TINY_V32], ids=lambda spec: spec.name)
def test_draft_metadata_is_equal_with_and_without_graphs(spec, size):
    """The adapters and the kernels of three steps in one captured graph: no copy to the host, replayed on new data."""
    rng, bucket = np.random.default_rng(size), Bucket(spec, size, num_steps=3)
    bucket.fill(draft_fields(rng, size, 3))
    outs = bucket.build(build_metadata, [None] * 3)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        bucket.build(build_metadata, outs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, _ = capture(lambda: bucket.build(build_metadata, outs))
    for requests in (size, 1, max(1, size - 3), size):
        fields = draft_fields(rng, requests, 3)
        bucket.fill(fields)
        for out in outs:
            poison(out)
        graph.replay()
        assert_same(outs, bucket.build(build_metadata, [None] * 3))
        assert_eager(outs, spec, fields)


# vLLM.


def vllm_case(spec, rng, query_lens, *, padding=1, blocks=8):
    """(arguments, the request tables that they stand for) of requests whose first two share their first block."""
    size, requests = spec.page_size, len(query_lens)
    seq_lens = np.array([rng.integers(max(q, 1), blocks * size // 2) for q in query_lens])
    seq_lens[:2] = np.maximum(seq_lens[:2], size + np.array(query_lens[:2]))
    num_blocks = 64
    full = 1 + rng.permutation(num_blocks - 1)[: requests * blocks].reshape(requests, blocks)
    swa = rng.permutation(num_blocks)[: requests * blocks].reshape(requests, blocks)
    full[1, 0], swa[1, 0] = full[0, 0], swa[0, 0]
    if spec.window is not None:  # a block behind the window of the second request, which the first still holds
        swa[1, 0] = 0
        swa[0, 0] = max(swa[0, 0], 1)
    used = -(-seq_lens // size)
    table, to_swa = np.full((requests + padding, blocks * size), -1), np.full(num_blocks * size + 1, -1)
    for b in range(requests):
        for position in range(used[b] * size):
            block, offset = position // size, position % size
            slot = full[b, block] * size + offset
            table[b, position] = slot
            to_swa[slot] = max(to_swa[slot], swa[b, block] * size + offset)
    for b in range(requests):  # stale: blocks that others hold now
        full[b, used[b] :] = rng.choice([full[(b + 1) % requests, 0], -1, INT_MAX, INT_MIN], blocks - used[b])
        swa[b, used[b] :] = num_blocks - 1
    full, swa = (np.concatenate([x, np.full((padding, blocks), full[0, 0])]) for x in (full, swa))
    slots = [table[b, seq_lens[b] - q : seq_lens[b]] for b, q in enumerate(query_lens)]
    arguments = {
        "block_tables": int32(full),
        "seq_lens": int32([*seq_lens, *[0] * padding]),
        "block_size": size,
    }
    if spec.window is not None:
        arguments |= {"swa_block_tables": int32(swa), "num_blocks": num_blocks}
    return arguments, np.concatenate(slots), RequestTables(req_to_token=i32(table), full_to_swa=i32(to_swa))


@pytest.mark.always(2)
@pytest.mark.parametrize("build", sorted(BUILDS))
@pytest.mark.parametrize("spec", [TINY_V4, TINY_V32], ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("mode", "query_lens"),
    [(ForwardMode.DECODE, [1, 1, 1]), (ForwardMode.DRAFT_EXTEND, [3, 3, 3]), (ForwardMode.EXTEND, [7, 1, 12])],
)
def test_vllm_steps_equal_the_jax_builders(mode, query_lens, spec, build):
    for seed in range(3):
        arguments, slots, tables = vllm_case(spec, np.random.default_rng(seed), query_lens)
        uniform, starts = query_lens[0], np.cumsum([0, *query_lens, 0])
        padding = [-1] * (uniform if mode is not ForwardMode.EXTEND else 5)
        rows = {"uniform_query_len": uniform} if mode is not ForwardMode.EXTEND else {"query_start_loc": int32(starts)}
        step = vllm_step(spec, **arguments, slot_mapping=long([*slots, *padding]), **rows)
        assert step.batch.mode is mode
        batch = ForwardBatch(
            mode=mode,
            max_seq_len=tables.req_to_token.shape[1],
            req_pool_indices=i32(range(4)),
            seq_lens=i32(arguments["seq_lens"].cpu()),
            out_cache_loc=i32([*slots, *padding]),
            extend_lens=i32([*query_lens, 0]),
            num_draft_tokens=uniform,
        )
        assert_same(BUILDS[build](spec, step), by_jax(spec, batch, tables))


def test_vllm_buckets_and_blocks_of_several_pages():
    arguments, slots, _ = vllm_case(TINY_V32, np.random.default_rng(0), [1, 1, 1])
    whole = vllm_step(TINY_V32, **arguments, slot_mapping=long([*slots, -1]), uniform_query_len=1)
    short = vllm_step(TINY_V32, **arguments, slot_mapping=long([*slots, -1]), uniform_query_len=1, max_seq_len=40)
    assert (whole.batch.max_seq_len, short.batch.max_seq_len) == (64, 40)
    assert build_metadata(TINY_V32, short).page_table.shape == (4, 5)
    # Blocks of two pages: their slots are those of the pages side by side.
    pairs = {**arguments, "block_tables": int32([[5, 2]] * 4), "block_size": 16, "seq_lens": int32([20, 16, 17, 0])}
    step = vllm_step(TINY_V32, **pairs, slot_mapping=long([1, 2, 3, -1]), uniform_query_len=1)
    pages = build_metadata(TINY_V32, step).page_table.tolist()
    assert pages == [[10, 11, 4, 5], [10, 11, -1, -1], [10, 11, 4, 5], [-1] * 4]


def test_what_vllm_step_refuses():
    arguments, slots, _ = vllm_case(TINY_V4, np.random.default_rng(0), [1, 1, 1])
    call = functools.partial(vllm_step, TINY_V4, **{**arguments, "slot_mapping": long([*slots, -1])})
    for changes, error, message in [
        ({}, ValueError, "give either query_start_loc or uniform_query_len"),
        ({"uniform_query_len": 1, "query_start_loc": int32([0])}, ValueError, "give either query_start_loc"),
        ({"uniform_query_len": 0}, ValueError, "uniform_query_len must be at least 1"),
        ({"uniform_query_len": 1, "num_blocks": None}, ValueError, "swa_block_tables and num_blocks go together"),
        ({"uniform_query_len": 1, "block_size": 24}, ValueError, "block_size must be a multiple of 16 for tiny V4"),
        ({"uniform_query_len": 1, "block_tables": long([[1]])}, TypeError, "block_tables must be .*int32"),
        ({"uniform_query_len": 1, "swa_block_tables": int32([[1]])}, ValueError, r"swa_block_tables must be \[4, 8\]"),
        ({"uniform_query_len": 1, "block_tables": int32([[1]])}, ValueError, "block_tables must have one row per"),
    ]:
        with pytest.raises(error, match=f"vllm_step: {message}"):
            call(**changes)


NO_JAX = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from jax._src import xla_bridge
from jax_sparse_mla import DEEPSEEK_V4_FLASH, DEEPSEEK_V32
from sparse_mla_torch import engines
tensors = {"seq_lens": [5, 9], "req_pool_indices": [0, 1], "out_cache_loc": [1, 2, 3, 4, 5, 6]}
tensors = {name: torch.tensor(x) for name, x in tensors.items()}
tables = {"req_to_token": torch.arange(512, dtype=torch.int32).view(2, 256), "full_to_swa": torch.arange(513)}
draft = engines.sglang_step("DECODE", **tensors, **tables)
for spec, options in ((DEEPSEEK_V4_FLASH, {}), (DEEPSEEK_V32, dict(fp8_kv_cache=True, prefill_backend="flashmla_kv"))):
    made = engines._launch(spec, engines.draft_step(draft, 1, 3), **OPTIONS, out=None)
    assert made.out_cache_loc.tolist() == [2, 5]
assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.long
def test_the_kernels_path_initialises_no_jax_backend():
    subprocess.run([sys.executable, "-c", NO_JAX], check=True, timeout=120)
