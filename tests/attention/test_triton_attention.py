"""The Triton attention kernel: its arithmetic, without a GPU in Triton's interpreter, and its compilation.

Results are judged by `attention_oracle.py`, numpy float64, over poisoned caches and hostile indices, through the torch
launcher. On a GPU `test_sparse_mla.py` has the behaviour; here is what only this kernel has: splits, tiles, the
integer e4m3 decode, and the shared memory of devices that are not at hand ("compiled, not run").
"""

from __future__ import annotations

import functools

import jax
import pytest
from attention_calls import check_last_slots_of_5_gib
from compiled_facts import ARCHITECTURES, SHARED_MEMORY, compiled_facts

pytest.importorskip("triton")

from jax_sparse_mla.attention.backend import BACKENDS, Call
from jax_sparse_mla.attention.index_table import TableShape
from jax_sparse_mla.attention.triton import plan as planning
from jax_sparse_mla.attention.triton.launch import CallShape, launches
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.layout import KVLayout, workspace_layout
from jax_sparse_mla.launch.describe import Device

ON_GPU = jax.default_backend() == "gpu"


def test_results_equal_the_oracle():
    """On the CPU in Triton's interpreter; on a GPU for real, split and tiled, with the integer decode."""
    torch = pytest.importorskip("torch")
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    from triton_attention_cases import CHECKS

    assert len(CHECKS) == 13
    for check in CHECKS:
        check()


class TestPlan:
    """The launch follows from static shapes and the device; no lengths, no arrays."""

    @staticmethod
    def plan(rows: int, num_heads: int = 64, topk: int = 128, extra_topk: int = 512, **changes):
        device = Device(changes.pop("capability", (9, 0)), 132)
        scopes = [TableShape(columns, 0, 512, 64, 37_440) for columns in (topk, extra_topk)]
        return launches(CallShape(KVLayout.V4_FP8, rows, num_heads, scopes, 0.1, True), device, **changes)

    def test_few_rows_share_the_device(self):
        attend, combine = self.plan(1)
        (programs, splits), constants = attend.grid, attend.constants
        assert splits == (128 + 512) // constants["BLOCK_N"]  # one block of keys each
        assert programs == 64 // constants["BLOCK_H"] and constants["SPLIT"]
        assert combine.grid == (64,)
        # The sink enters once, where the denominator is whole.
        assert not constants["HAS_SINK"] and combine.constants["HAS_SINK"]

    def test_many_rows_are_not_split(self):
        attend, combine = self.plan(4096)
        assert attend.grid == (4096, 1) and not attend.constants["SPLIT"] and attend.constants["HAS_SINK"]
        assert combine is None

    @pytest.mark.parametrize("rows", [1, 2, 8, 63, 64, 65, 131, 132, 133, 256, 1000])
    def test_no_split_is_without_a_block(self, rows):
        attend, combine = self.plan(rows)
        splits = attend.grid[1]
        assert 1 <= splits <= 640 // attend.constants["BLOCK_N"]
        assert splits == 1 if combine is None else combine.constants["ALL_SPLITS"] >= splits

    def test_no_columns(self):
        assert self.plan(3, topk=0, extra_topk=0)[1] is None

    @pytest.mark.parametrize("num_heads", [1, 3, 16, 17, 32, 33, 64, 65, 127, 128])
    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
    def test_every_head_has_a_program(self, num_heads, capability):
        attend, _ = self.plan(5, num_heads, capability=capability, may_split=False)
        assert attend.grid[0] % 5 == 0
        assert attend.grid[0] // 5 * attend.constants["BLOCK_H"] >= num_heads

    def test_prefill_is_never_split(self):
        """max_logits does not go through the combine."""
        assert self.plan(1, may_split=False)[1] is None

    def test_the_integer_decode_is_for_devices_without_e4m3(self):
        assert not self.plan(1, capability=(8, 0))[0].constants["NATIVE"]
        assert not self.plan(1, capability=(8, 6))[0].constants["NATIVE"]
        for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
            assert self.plan(1, capability=capability)[0].constants["NATIVE"]

    def test_each_cache_s_layout_is_in_its_scope(self):
        """One loop over both caches where rows are read in the same way, whoever wrote them; else a loop for each."""

        def constants(first: KVLayout, second: KVLayout, extra_topk: int = 512) -> list[int]:
            scopes = [TableShape(n, 0, 512, 64, 8, layout=x) for n, x in ((128, first), (extra_topk, second))]
            made = launches(CallShape(first, 3, 64, scopes, 0.1, True), Device((9, 0), 132))[0].constants
            return [made[name] for name in ("KIND", "EXTRA_KIND", "ROW_BYTES", "EXTRA_ROW_BYTES")]

        fp8, fp4 = KVLayout.V41_FP8, KVLayout.V41_FP4
        same = [planning.BYTE_SCALES, planning.BYTE_SCALES, 528, 528]
        assert constants(fp8, fp4) == [planning.BYTE_SCALES, planning.E2M1_PAIRS, 528, 288]
        assert constants(fp8, fp8.written_by("vllm")) == same
        assert constants(fp8, fp4, extra_topk=0) == same  # no loop that nothing goes through
        assert constants(fp4, fp4) == [planning.E2M1_PAIRS, planning.E2M1_PAIRS, 288, 288]

    def test_pages_are_constants_of_the_kernel(self):
        names, device = ("PAGE_SIZE", "EXTRA_PAGE_SIZE", "PAGE_BYTES", "EXTRA_PAGE_BYTES"), Device((9, 0), 132)

        def pages(layout, *scopes):
            constants = launches(CallShape(layout, 3, 64, scopes, 0.1, True), device)[0].constants
            return tuple(constants[name] for name in names)

        for layout in (KVLayout.V4_FP8, KVLayout.V32_FP8):
            scopes = [TableShape(8, 0, 512, size, layout.page_bytes(size)) for size in (256, 2)]
            assert pages(layout, *scopes) == (256, 2, layout.page_bytes(256), layout.page_bytes(2))
        # A workspace's length is data: no compilation of its own for each.
        assert pages(workspace_layout(512), TableShape(8, 0, 512)) == (0, 0, 0, 0)

    @pytest.mark.parametrize("qk_dim", [64, 128, 448, 640])
    def test_rows_of_another_width_are_refused(self, qk_dim):
        call = Call("prefill", workspace_layout(qk_dim), 4, 64, DeviceInfo("cuda", (9, 0), 132, 232_448))
        (why,) = BACKENDS["triton"].cannot(call)
        assert why.startswith("its prefill reads rows of ")


@pytest.mark.long
@ARCHITECTURES
def test_it_compiles_within_the_shared_memory(capabilities, tmp_path):
    """Compiled, not run."""
    facts = compiled_facts("attention", tmp_path, capabilities)
    for capability in capabilities:
        rows = [fact for fact in facts if fact["capability"] == capability]
        newer = ["V41_FP8", "V41_FP8+V41_FP4"]
        if capability in (89, 120):
            newer = ["V41_FP8_SPLIT+V41_FP4_SPLIT", "NOPE_FP8_TENSOR"]
        assert [row["kernel"] for row in rows] == ["V4_FP8", "V32_FP8", *newer, "workspace 576", "combine"]
        for row in rows:
            assert row["shared"] <= SHARED_MEMORY[capability], row
            assert row["e4m3"] == (capability >= 89 and "_FP8" in row["kernel"]), row
            assert row["wgmma"] == (capability == 90 and row["kernel"] not in ("workspace 576", "combine")), row
            # Keys come 16 bytes at a time; on SM80 the e4m3 ones are no asynchronous copies.
            wide = row["wide_copies"] or (row["kernel"] in newer and row["wide_loads"])
            assert wide or row["kernel"] == "combine", row


@pytest.mark.gpu
class TestOnTheGPU:
    """What tests/attention/test_sparse_mla.py, which runs every backend, does not have."""

    @pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8", "V32_BF16"])
    def test_the_last_slots_of_a_5_gib_cache(self, layout):
        check_last_slots_of_5_gib(layout, "triton")

    def test_a_cuda_graph_captures_the_torch_launch(self):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
        from sparse_mla_torch.attention.backends.triton import Attention
        from sparse_mla_torch.launch.executor import launch_device
        from torch_graphs import capture

        torch.manual_seed(0)
        layout = KVLayout.V4_BF16
        rows = torch.randn(4, 64, 512, device="cuda").bfloat16()
        q = torch.randn(2, 1, 64, 512, device="cuda").bfloat16()
        indices = torch.randint(0, 256, (2, 1, 512), device="cuda", dtype=torch.int32)
        scope = TableShape(512, 0, 256, 64, layout.page_bytes(64))
        shape = CallShape(layout, 2, 64, (scope,), 0.04, False)
        attend = Attention(*launches(shape, launch_device(q.device)))
        out, expected = (
            (torch.empty(2, 1, 64, 512, dtype=torch.bfloat16, device="cuda"), torch.empty(2, 1, 64, device="cuda"))
            for _ in range(2)
        )
        tables = [(rows.view(torch.uint8).view(4, -1), indices, None)]
        attend(q, tables, None, *expected)
        graph, _ = capture(functools.partial(attend, q, tables, None, *out), stream=torch.cuda.Stream())
        for tensor in out:
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])
