"""The SM90 decode kernel: its plan and its compilation without a GPU, and on one what `test_sparse_mla.py`, which runs
every backend, does not have: rows cut into parts, graphs, repeated runs, a large cache."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import ptxas
import pytest
from attention_calls import (
    assert_agree,
    assert_same,
    by_decode_kernel,
    check_decode,
    check_last_slots_of_5_gib,
    decode_arguments,
    plan_of_many,
    pretend_h200,
    run_decode,
    small_decode,
)
from layout_oracle import RECORDS, page_bytes, put_token, values_of

from jax_sparse_mla.attention import sparse_mla_decode
from jax_sparse_mla.attention.hopper import decode_plan as planning
from jax_sparse_mla.attention.hopper.decode_plan import (
    ALWAYS,
    AS_LENGTHS_SAY,
    IN_CLUSTERS,
    IN_WINDOW,
    NEVER,
    V4,
    V4_BF16,
    V32,
    V32_BF16,
    V41,
    V41_FP4,
    DecodePlan,
    decode_format,
    decode_plan,
)
from jax_sparse_mla.attention.machine import installed_for
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv
from jax_sparse_mla.launch import build as cuda_build
from jax_sparse_mla.launch import tvm

on_the_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif("hopper" not in installed_for("decode"), reason="needs an SM90 GPU and the CUDA kernel"),
]


class TestPlan:
    """The launch follows from static shapes."""

    @staticmethod
    def plan(rows: int, heads: int = 64, topks: tuple[int, ...] = (128, 512), *, few: bool = False, **changes):
        plan = decode_plan if few else plan_of_many
        return plan(rows, heads, topks, **{"has_lengths": False, "sm_count": 132} | changes)

    @pytest.mark.parametrize(
        ("rows", "heads", "topks", "tile", "parts"),
        [
            (1, 64, (128, 512), 16, 10),  # a block of keys for each thread block
            (4, 16, (128, 512), 16, 10),
            (4, 64, (128, 512), 16, 5),  # 16 clusters of ten would not run at once
            (4, 128, (128, 1024), 32, 6),
            (1, 128, (2048,), 32, 16),
        ],
    )
    def test_a_cluster_shares_each_of_few_rows(self, rows, heads, topks, tile, parts):
        for has_lengths in (False, True):
            plan = self.plan(rows, heads, topks, few=True, has_lengths=has_lengths)
            assert plan == DecodePlan(tile, parts, NEVER, 0)

    @pytest.mark.parametrize(("rows", "heads"), [(72, 64), (48, 128), (256, 16)])
    def test_many_rows_share_the_device(self, rows, heads):
        assert self.plan(rows, heads, few=True) == self.plan(rows, heads)

    @pytest.mark.parametrize("heads", [1, 16, 17, 64, 128, 1000])
    @pytest.mark.parametrize("sm_count", [1, 20, 78, 132])
    def test_clusters_have_no_more_thread_blocks_than_keys_or_than_they_may(self, heads, sm_count):
        for rows in (1, 2, 7, 40, 131, 70_000):
            for topks in ((1,), (64, 1), (128, 512), (2048,), (16384,)):
                plan = self.plan(rows, heads, topks, few=True, sm_count=sm_count)
                if plan.tile == 64 and plan.cuts != IN_CLUSTERS:
                    continue
                assert plan.tile in (16, 32, 64) and plan.scratch_bytes == 0
                assert 2 <= plan.groups <= min(16, max(2, sum(-(-k // 64) for k in topks)))
                clusters = rows * -(-heads // plan.tile)
                assert clusters * plan.groups <= sm_count and rows <= 65_535

    def test_a_row_that_must_not_depend_on_the_batch_is_in_no_cluster(self):
        assert self.plan(1, few=True, batch_invariant=True).tile == 64

    def test_wide_clusters_share_rows_of_many_heads(self):
        """As many thread blocks as let all clusters run at once."""
        plans = [self.plan(rows, 128, (128, 1024), few=True) for rows in (8, 16, 32, 64)]
        assert plans[:-1] == [DecodePlan(64, parts, IN_CLUSTERS, 0) for parts in (6, 3, 2)]
        assert plans[-1].cuts != IN_CLUSTERS
        assert {self.plan(rows, 32, few=True).tile for rows in (1, 8, 64)} == {16, 32}  # half of a wide tile

    @pytest.mark.parametrize("kernel_format", [V4, V41, V4_BF16])
    def test_a_thread_block_has_each_short_row(self, kernel_format):
        """Where no row can have more than 128 keys, of one cache of a format that has the kernel."""
        plan = functools.partial(self.plan, few=True, kernel_format=kernel_format)
        for rows, heads, topk in ((32, 128, 128), (66, 128, 65), (132, 64, 128), (34, 64, 1), (67, 16, 128)):
            for has_lengths in (False, True):
                for invariant in (False, True):
                    given = {"has_lengths": has_lengths, "batch_invariant": invariant}
                    assert plan(rows, heads, (topk,), **given) == DecodePlan(64, 1, IN_WINDOW, 0)
        for topks in ((129,), (64, 64), (128, 512)):
            assert plan(64, 128, topks).cuts != IN_WINDOW
        for rows, heads in ((67, 128), (133, 64), (133, 1), (45, 129), (70_000, 64)):  # more than one wave
            assert plan(rows, heads, (128,)).cuts not in (IN_WINDOW, IN_CLUSTERS)
        for rows, heads, tile in ((1, 64, 16), (16, 64, 16), (33, 64, 32), (16, 128, 32), (66, 16, 16)):
            assert plan(rows, heads, (128,)) == DecodePlan(tile, 2, NEVER, 0)  # a cluster is sooner
            assert plan(rows, heads, (128,), batch_invariant=True).cuts == IN_WINDOW

    @pytest.mark.parametrize("kernel_format", [None, V32, V41_FP4, V32_BF16])
    def test_other_formats_have_no_kernel_of_short_rows(self, kernel_format):
        assert self.plan(32, 128, (128,), few=True, kernel_format=kernel_format).cuts != IN_WINDOW

    @pytest.mark.parametrize(("heads", "groups", "tiles"), [(16, 132, 1), (128, 66, 2), (1000, 8, 16)])
    def test_rows_are_shared_by_the_device(self, heads, groups, tiles):
        plan, blocks = self.plan(1, heads), groups * tiles
        assert (plan.tile, plan.groups, plan.cuts) == (64, groups, ALWAYS)
        assert plan.scratch_bytes == sum(4 * math.prod((blocks, *shape)) for shape in ((2, 64, 512), (2, 64, 2), (2,)))

    @pytest.mark.parametrize(("rows", "cuts"), [(1, ALWAYS), (13, ALWAYS), (132, NEVER), (148, ALWAYS), (1320, NEVER)])
    def test_rows_are_cut_where_whole_ones_spread_unevenly(self, rows, cuts):
        """Without cuts there is no scratch; the kernel decides where lengths do."""
        plan = self.plan(rows)
        assert plan.cuts == cuts and (plan.scratch_bytes == 0) == (cuts == NEVER)
        assert self.plan(rows, has_lengths=True).cuts == AS_LENGTHS_SAY

    def test_rows_that_must_not_depend_on_the_batch_are_whole(self):
        for rows in (1, 7, 148):
            plan = self.plan(rows, batch_invariant=True)
            assert plan.cuts == NEVER and plan.groups <= rows

    @pytest.mark.parametrize("heads", [1, 16, 64, 65, 128, 129, 1000])
    @pytest.mark.parametrize("rows", [1, 5, 300])
    def test_thread_blocks_of_a_launch_with_cuts_run_at_once(self, rows, heads):
        for sm_count in (1, 78, 132):
            plan = self.plan(rows, heads, sm_count=sm_count, has_lengths=True)
            assert plan.groups >= 1 and (plan.cuts == NEVER or plan.groups * -(-heads // 64) <= sm_count)

    def test_the_kernel_has_the_same_numbers(self):
        text = (cuda_build.folder() / "sparse_decode" / "schedule.cuh").read_text()
        text += (cuda_build.folder() / "sparse_decode" / "cluster.cuh").read_text()
        for name in ("RowCost", "JoinCost", "PartsJoined", "MostParts", "WindowBlocks"):
            value = getattr(planning, re.sub("([A-Z])", r"_\1", name).upper())
            assert f"constexpr int k{name} = {value};" in text, name
        assert re.search(r"enum Cuts \{ kNever, kAlways, kAsLengthsSay, kInClusters, kInWindow \}", text)
        assert (NEVER, ALWAYS, AS_LENGTHS_SAY, IN_CLUSTERS, IN_WINDOW) == (0, 1, 2, 3, 4)
        text = (cuda_build.folder() / "sparse_decode" / "shared.cuh").read_text()
        assert "enum Format { kV4, kV32, kV41, kV41Fp4, kV4Bf16, kV32Bf16 };" in text
        assert (V4, V32, V41, V41_FP4, V4_BF16, V32_BF16) == (0, 1, 2, 3, 4, 5)
        text = (cuda_build.folder() / "sparse_decode" / "window.cuh").read_text()
        assert "kHasWindow = kFormat == kV4 || kFormat == kV41 || kFormat == kV4Bf16;" in text
        assert planning._HAVE_WINDOW == (V4, V41, V4_BF16)


V41_PAIRS = [("V41_FP8",) * 2, ("V41_FP8_SPLIT",) * 2, ("V41_FP8", "V41_FP4"), ("V41_FP8_SPLIT", "V41_FP4_SPLIT")]
PAIRS = [*V41_PAIRS, *((name, name) for name in ("V4_FP8", "V32_FP8", "V4_BF16", "V32_BF16"))]
of_plain_rows = pytest.mark.parametrize("layout", [KVLayout.V4_FP8, KVLayout.V4_BF16, KVLayout.V32_BF16], ids=str)
BF16_ROWS = [KVLayout.V4_BF16, KVLayout.V32_BF16, KVLayout.NOPE_BF16]
of_bf16 = pytest.mark.parametrize("layout", BF16_ROWS, ids=str)


def test_a_call_s_format_is_that_of_both_caches():
    of_one = {"V4_FP8": V4, "V32_FP8": V32, "V41_FP8": V41, "V41_FP8_SPLIT": V41}
    of_one |= {"V4_BF16": V4_BF16, "V32_BF16": V32_BF16, "NOPE_BF16": V4_BF16}
    for name, wanted in of_one.items():
        assert decode_format([getattr(KVLayout, name)]) == decode_format([getattr(KVLayout, name)] * 2) == wanted
    for first, extra in V41_PAIRS:
        layouts = [getattr(KVLayout, first).written_by("vllm"), getattr(KVLayout, extra).written_by("vllm")]
        assert decode_format(layouts) == (V41_FP4 if "FP4" in extra else V41)


@pytest.mark.parametrize("layout, extra", [*V41_PAIRS, ("V4_BF16",) * 2, ("V32_BF16",) * 2])
@pytest.mark.parametrize("first", [True, False], ids=["both", "the extra cache alone"])
def test_jax_hands_the_kernel_each_cache_in_its_place(layout, extra, first, monkeypatch):
    """Buffers by the function's order of arguments, and where rows and scales are."""
    handed = []

    def call(module, function, arguments, results, *operands):
        handed.append((arguments, [x.shape for x in operands]))
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    pretend_h200(monkeypatch, "hopper")
    monkeypatch.setattr(tvm, "call", call)
    case = small_decode(layout=layout, extra_layout=extra, page_size=16, extra=(24, 2))
    arguments = decode_arguments(case)
    if not first:
        arguments |= {"indices": arguments["indices"][..., :0], "topk_length": None}
    sparse_mla_decode(**arguments, backend="hopper")
    ((given, shapes),) = handed
    places = {"V41_FP8": lambda size: (528, 512, 528), "V41_FP4": lambda size: (288, 256, 288)}
    places |= {"V41_FP8_SPLIT": lambda size: (512, 512 * size, 16)}
    places |= {"V41_FP4_SPLIT": lambda size: (256, 256 * size, 32)}
    places |= {"V4_BF16": lambda size: (1024, 0, 1024), "V32_BF16": lambda size: (1152, 0, 1152)}
    tables = []
    for prefix, name, size in (("", layout, 16), ("extra_", extra, 2)):
        data = arguments[f"{prefix}cache"].data
        numbers = (len(data) * size, size, data.shape[1], *places[name](size))
        tables.append(((data.shape, arguments[f"{prefix}indices"].shape), numbers))
    nothing = ((None, None), (0, 1, 0, 0, 0, 0))
    if not first:
        tables = [nothing, tables[1]] if "FP4" in extra else [tables[1], nothing]
    found = [shapes[x.index] if x else None for x in given[:8]]
    assert [tuple(found[i : i + 2]) for i in (1, 4)] == [table[0] for table in tables]
    formats = {"V4_BF16": V4_BF16, "V32_BF16": V32_BF16}
    assert given[8] == (V41_FP4 if "FP4" in extra else formats.get(layout, V41))
    assert given[9:21] == (*tables[0][1], *tables[1][1])


@pytest.mark.parametrize("sizes", [(0, 64, 8), (2, 0, 8), (2, 64, 0)], ids=["no rows", "no columns", "no slots"])
def test_without_work_the_results_are_of_the_same_dtypes(sizes, monkeypatch):
    """Through the attention function: no call without work reaches a kernel."""
    pretend_h200(monkeypatch, "hopper")
    batch, columns, pages = sizes
    q = jnp.ones((batch, 1, 64, 512), jnp.bfloat16)
    indices = jnp.zeros((batch, 1, columns), jnp.int32)
    with jax.enable_x64(True):
        data = jnp.zeros((pages, KVLayout.V4_FP8.page_bytes(64)), jnp.uint8)
        cache = PagedKV(data=data, layout=KVLayout.V4_FP8, page_size=64)
        out, lse = sparse_mla_decode(q, cache, indices, softmax_scale=0.05, backend="hopper")
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert not np.asarray(out, np.float32).any() and np.isneginf(lse).all()


@pytest.mark.long
@pytest.mark.no_gpu
def test_it_compiles_within_its_registers(tmp_path):
    """Compiled, not run."""
    said = ptxas.said_of("sparse_decode", tmp_path)
    # A register or two wait out the plan; a loop that spills takes more.
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert spills and all(int(n) <= 16 for n in spills), said
    assert "setmaxnreg" not in said  # is what it says where it ignores one
    assert "serialized" not in said, said


def arguments_of(
    layout: KVLayout,
    batch: int,
    q_len: int,
    heads: int,
    topk: int,
    extra_topk: int = 0,
    seed: int = 0,
    extra_layout: KVLayout | None = None,
):
    """The arrays of a decode call at a model's size, some of the indices none of the cache's."""
    rng, slots = np.random.default_rng(seed), 8192
    arguments = {"q": jnp.asarray(rng.standard_normal((batch, q_len, heads, layout.qk_dim)), jnp.bfloat16)}
    tables = (("", layout, topk, 64), ("extra_", extra_layout or layout, extra_topk, 2))
    for name, of_cache, columns, page_size in tables:
        if not columns:
            continue
        rows = jnp.asarray(rng.standard_normal((slots, layout.qk_dim)) / 4, jnp.bfloat16)
        cache = PagedKV.zeros(of_cache, slots // page_size, page_size)
        arguments[f"{name}cache"] = write_kv(cache, jnp.arange(slots, dtype=jnp.int32), rows)
        indices = rng.integers(-slots // 8, slots + slots // 8, (batch, q_len, columns))
        arguments[f"{name}indices"] = jnp.asarray(indices, jnp.int32)
        arguments[f"{name}topk_length"] = jnp.asarray(rng.integers(0, columns + 1, (batch, q_len)), jnp.int32)
    arguments["attn_sink"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    return arguments


def without_lengths(arguments: dict) -> dict:
    return {name: x for name, x in arguments.items() if not name.endswith("topk_length")}


def sent_in_wide_clusters(values: np.ndarray) -> np.ndarray:
    """Float64 `[rows, 512]` as float16 times a power of two for each row's halves, whose largest is less than 2^15."""
    halves = values.reshape(len(values), 2, 256)
    scale = 2.0 ** (15 - np.frexp(np.abs(halves).max(-1, keepdims=True))[1])
    return ((halves * scale).astype(np.float16) / scale).reshape(values.shape)


@pytest.fixture(
    params=[None, (16, 3), (32, 10), (64, 4)], ids=["many rows'", "clusters of 3", "clusters of 10", "wide clusters"]
)
def kernel(request, monkeypatch):
    """The kernel that `hopper` launches, whatever the plan would be; JAX must trace it anew."""
    made = by_decode_kernel(request.param, monkeypatch)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()
    assert made and {plan.tile for plan in made} == {request.param[0] if request.param else 64}


class TestOnTheGPU:
    pytestmark = on_the_gpu
    SCALE = 0.05

    def run(self, arguments: dict, backend: str = "hopper"):
        return sparse_mla_decode(**arguments, softmax_scale=self.SCALE, backend=backend)

    @pytest.mark.parametrize("batch, heads", [(1, 16), (3, 128), (20, 8), (67, 64), (150, 128)])
    @pytest.mark.parametrize("layout, extra", [*PAIRS, ("NOPE_BF16",) * 2])
    def test_any_share_of_rows_equals_the_triton_kernel(self, batch, heads, layout, extra):
        layout, extra_layout = getattr(KVLayout, layout), getattr(KVLayout, extra)
        for topks in ((128, 512), (77, 1030), (2048,))[: 3 if extra == layout.name else 2]:
            arguments = arguments_of(layout, batch, 2, heads, *topks, extra_layout=extra_layout)
            for given in (arguments, without_lengths(arguments)):
                assert_agree(self.run(given), self.run(given, "triton"), "decode")

    @of_bf16
    def test_every_number_of_bf16_rows_is_copied_to_its_place(self, layout, kernel):
        """One key a row, whose weight is 1: the output is the key. All bfloat16 numbers that are normal, and 0.

        Those of 16 columns from a multiple of 16 on have like exponents: thread blocks of a cluster send them as
        float16 times one power of two.
        """
        numbers = np.arange(1 << 16, dtype=np.uint16)
        exponents = numbers >> 7 & 0xFF
        numbers = np.append(numbers[(exponents > 0) & (exponents < 0xFF)], np.uint16(0))
        rows, page_size, width = 128, 8, layout.qk_dim
        values = np.resize(numbers, (rows, width)).view(jnp.bfloat16)
        assert len({*values[:, :512].view(np.uint16).flat}) > 65_000 * (width == 512)
        data = np.full((2 * rows // page_size, layout.page_bytes(page_size)), 0xFF, np.uint8)  # each second page is NaN
        data[::2] = values.view(np.uint8).reshape(rows // page_size, -1)
        cache = PagedKV(data=jnp.asarray(data), layout=layout, page_size=page_size)
        at = np.arange(rows)[:, None]
        slots = at // page_size * 2 * page_size + at % page_size
        indices = jnp.asarray(np.where(np.arange(130) == at, slots, -1)[:, None], jnp.int32)
        q = jnp.zeros((rows, 1, 3, width), jnp.bfloat16)
        out, lse = self.run({"q": q, "cache": cache, "indices": indices})
        np.testing.assert_array_equal(np.asarray(out)[:, 0, 1].view(np.uint16), values[:, :512].view(np.uint16))
        assert not np.asarray(lse).any()

    @of_bf16
    def test_each_number_of_a_bf16_row_meets_its_number_of_the_query(self, layout, kernel):
        """Row i is 2 at its i-th number, query head h is 1 at its h-th: the key that a head finds is row h."""
        width, batch = layout.qk_dim, -(-layout.qk_dim // 64)
        rows = jnp.asarray(2 * np.eye(width), jnp.bfloat16)
        cache = write_kv(PagedKV.zeros(layout, width // 64, 64), jnp.arange(width, dtype=jnp.int32), rows)
        q = jnp.asarray(np.eye(width).reshape(batch, 1, 64, width), jnp.bfloat16)
        indices = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, 1, width))
        out, lse = sparse_mla_decode(q, cache, indices, softmax_scale=128.0, backend="hopper")
        found = np.asarray(out, np.float32).reshape(width, 512)
        np.testing.assert_array_equal(found, 2 * np.eye(width)[:, :512])
        np.testing.assert_allclose(np.asarray(lse), 256, rtol=1e-5)

    @pytest.mark.parametrize("sizes", [(1, 64, 4, (65, 2)), (130, 61, 70, (200, 3)), (590, 7, 129, (2, 1))], ids=str)
    @pytest.mark.parametrize("layout, extra", [*PAIRS, ("NOPE_BF16",) * 2])
    def test_rows_equal_the_oracle(self, sizes, layout, extra, kernel):
        """Holes, duplicates, hostile indices and lengths, sinks; unused rows are NaN. Then either cache alone."""
        topk, page_size, heads, extra_sizes = sizes
        setting = {"topk": topk, "page_size": page_size, "heads": heads, "extra": extra_sizes}
        case = small_decode(layout=layout, extra_layout=extra, **setting)
        without = {f"{prefix}indices": getattr(case, f"{prefix}indices")[..., :0] for prefix in ("", "extra_")}
        alone = [{name: x, name.replace("indices", "topk_length"): None} for name, x in without.items()]
        for changes in ({}, *alone, dict.fromkeys(("extra_cache", "extra_indices", "extra_topk_length"))):
            one = dataclasses.replace(case, **changes)
            check_decode(one, run_decode(one, "hopper"))

    @pytest.mark.parametrize("name", ["V41_FP8", "V41_FP8_SPLIT", "V41_FP4", "V41_FP4_SPLIT"])
    def test_every_byte_of_v41_s_rows_converts_exactly(self, name, kernel):
        """One key a row, whose weight is 1: the output is the key. All bytes of values, with all that scales can be."""
        record, rows, page_size = RECORDS[name], 256, 8
        at = np.arange(rows)[:, None]
        values = ((np.arange(record.value_bytes) * 7 + at * 5) % 256).astype(np.uint8)
        scales = ((np.arange(record.scale_bytes) * 9 + at) % 256).astype(np.uint8)
        if record.scales == "ue8m0":  # products within bfloat16's normal numbers and infinity
            values, scales = np.where((values & 0x7F) == 0x7F, 0, values), 20 + scales % 200
        else:
            scales = np.where((scales & 0x7F) == 0x7F, 0x7E, scales)
        data = np.full((rows // page_size, page_bytes(name, page_size)), 0xFF, np.uint8)
        for slot in range(rows):
            put_token(data, name, page_size, slot, values[slot], scales[slot].astype(np.uint8))
        wanted = values_of(name, values, scales.astype(np.uint8))
        assert np.isfinite(wanted).all() and len({*values.flat}) > 250
        cache = PagedKV(data=jnp.asarray(data), layout=getattr(KVLayout, name), page_size=page_size)
        indices = jnp.asarray(np.where(np.arange(70) == at % 70, at, -1)[:, None], jnp.int32)
        arguments = {"q": jnp.zeros((rows, 1, 3, 512), jnp.bfloat16), "cache": cache, "indices": indices}
        if "FP4" in name:
            first = PagedKV.zeros(getattr(KVLayout, name.replace("FP4", "FP8")), 1, page_size)
            nothing = jnp.full((rows, 1, 3), -1, jnp.int32)
            arguments |= {"cache": first, "indices": nothing, "extra_cache": cache, "extra_indices": indices}
        out, lse = self.run(arguments)
        wanted = sent_in_wide_clusters(wanted) if kernel and kernel[0] == 64 else wanted
        np.testing.assert_array_equal(np.asarray(out, np.float64)[:, 0, 1], wanted)
        assert not np.asarray(lse).any()

    @pytest.mark.parametrize("scale", [0.0, -0.05])
    def test_any_scale_equals_the_reference(self, scale, kernel):
        """Masked keys included, which must not become NaN where the scale is 0."""
        arguments = decode_arguments(small_decode(extra=(16, 2))) | {"softmax_scale": scale}
        wanted = sparse_mla_decode(**arguments, backend="reference")
        assert_agree(sparse_mla_decode(**arguments, backend="hopper"), wanted, "decode")

    def test_infinite_sinks_and_rows_without_keys_equal_the_oracle(self, kernel):
        case = small_decode(topk=200, extra=(130, 2), heads=20)
        sink = np.array(case.attn_sink)
        sink[[0, 17, 19]] = [np.inf, -np.inf, 300]
        lengths = np.array(case.topk_length), np.array(case.extra_topk_length)
        lengths[0][1], lengths[1][1] = 0, 0
        names = ("attn_sink", "topk_length", "extra_topk_length")
        case = dataclasses.replace(case, **dict(zip(names, (sink, *lengths))))
        check_decode(case, run_decode(case, "hopper"))

    def test_a_row_among_lengths_of_all_kinds_is_as_when_alone(self):
        arguments = arguments_of(KVLayout.V4_FP8, 300, 1, 64, 128, 1024)
        lengths = np.zeros((300, 1), np.int32)
        lengths[[3, 77, 299]] = [[1024], [1], [513]]
        arguments |= {"extra_topk_length": jnp.asarray(lengths), "topk_length": jnp.asarray(lengths // 8)}
        assert_agree(self.run(arguments), self.run(arguments, "triton"), "decode")

    @pytest.mark.parametrize("batch", [1, 8, 40, 149])
    @pytest.mark.parametrize("heads", [64, 128])
    @pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8", "V4_BF16", "V32_BF16", "NOPE_BF16"])
    def test_a_hundred_runs_give_the_same_bits(self, layout, heads, batch):
        topks = (2048,) if layout == "V32_FP8" else (128, 512)
        arguments = arguments_of(getattr(KVLayout, layout), batch, 1, heads, *topks)
        call = jax.jit(lambda arguments: self.run(arguments))
        first = jax.tree.map(np.asarray, call(arguments))
        for _ in range(100):
            assert_same(call(arguments), first)

    def test_a_command_buffer_replays_it(self, kernel):
        arguments = arguments_of(KVLayout.V4_FP8, 4, 1, 64, 128, 512)
        q = arguments.pop("q")

        def chain(q, arguments):
            total = jnp.zeros(q.shape, jnp.float32)
            for i in range(8):  # enough launches that XLA records them
                total += self.run(arguments | {"q": q + jnp.bfloat16(i / 64)})[0].astype(jnp.float32)
            return total

        compiled = jax.jit(chain).lower(q, arguments).compile()
        assert "command_buffer" in compiled.as_text()
        expected = sum(
            np.asarray(self.run(arguments | {"q": q + jnp.bfloat16(i / 64)})[0], np.float32) for i in range(8)
        )
        for _ in range(3):
            np.testing.assert_allclose(np.asarray(compiled(q, arguments)), expected, rtol=1e-6, atol=1e-5)

    @pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8", "V41_FP8_SPLIT", "V4_BF16", "V32_BF16"])
    def test_the_last_slots_of_a_5_gib_cache(self, layout, kernel):
        check_last_slots_of_5_gib(layout, "hopper")


class TestOnTorch:
    """Through torch, where a caller may also ask for results that do not depend on the batch."""

    pytestmark = on_the_gpu

    @staticmethod
    def call(arguments: dict, monkeypatch, **options):
        torch = pytest.importorskip("torch")
        from sparse_mla_torch import flash_mla, to_torch
        from sparse_mla_torch.attention.call_cache import forget
        from sparse_mla_torch.attention.pages import pages_of

        monkeypatch.setenv("JAX_SPARSE_MLA_DECODE_BACKEND", "hopper")
        forget()
        jax.block_until_ready(arguments)
        given = {name: to_torch(x) for name, x in arguments.items() if not isinstance(x, PagedKV)}
        caches = [arguments[name] for name in ("cache", "extra_cache")]
        caches = [pages_of(to_torch(x.data), x.layout, x.page_size) for x in caches]
        call = lambda: flash_mla.flash_mla_with_kvcache(  # noqa: E731
            *(given["q"], caches[0], None, None, 512, flash_mla.get_mla_metadata()[0]),
            softmax_scale=0.05,
            is_fp8_kvcache=True,
            indices=given["indices"],
            attn_sink=given["attn_sink"],
            extra_k_cache=caches[1],
            extra_indices_in_kvcache=given["extra_indices"],
            **options,
        )
        return torch, call

    @of_plain_rows
    @pytest.mark.parametrize("batch", [1, 150])
    def test_a_cuda_graph_captures_it(self, batch, layout, monkeypatch):
        arguments = without_lengths(arguments_of(layout, batch, 1, 64, 128, 512))
        torch, call = self.call(arguments, monkeypatch)
        from torch_graphs import capture

        expected = [x.clone() for x in call()]
        ours = sparse_mla_decode(**arguments, softmax_scale=0.05, backend="hopper")
        np.testing.assert_array_equal(expected[0].float().cpu().numpy(), np.asarray(ours[0], np.float32))
        graph, captured = capture(call)
        for x in captured:
            x.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected))

    @of_plain_rows
    def test_a_row_s_result_need_not_depend_on_the_batch(self, layout, monkeypatch):
        # 11 blocks each: the second row of a thread block begins at an odd one, the other warpgroup's.
        arguments = without_lengths(arguments_of(layout, 149, 1, 64, 128, 513))
        _, call = self.call(arguments, monkeypatch, enable_batch_invariant=True)
        out, lse = call()
        for rows in (slice(0, 1), slice(17, 34), slice(70, 75)):
            per_row = ("q", "indices", "extra_indices")
            some = {name: x[rows] if name in per_row else x for name, x in arguments.items()}
            _, call = self.call(some, monkeypatch, enable_batch_invariant=True)
            for a, b in zip(call(), (out, lse)):
                assert (a == b[rows]).all()
