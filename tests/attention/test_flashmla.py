"""The FlashMLA backend without a GPU: the adapter and the custom call, over stand-ins for the vendor's operators.

`flashmla_stub.py` registers operators of the vendors' schemas with torch; the same host code that calls FlashMLA on a
GPU calls them here, on XLA's CPU buffers. The backend goes through the tests that every backend goes through; what
only this one has follows. On a GPU `test_sparse_mla.py` runs the real kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")

import flashmla_stub as stub
from attention_calls import (
    H200,
    assert_agree,
    assert_same,
    check_decode,
    check_prefill,
    decode_arguments,
    prefill_arguments,
    pretend_installed,
    run_decode,
    run_prefill,
    small_decode,
    small_prefill,
)
from attention_conformance import SparseMLAConformance
from attention_oracle import HostCache
from jax.sharding import AxisType, PartitionSpec

from jax_sparse_mla.attention import DeviceInfo, sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.backends import flashmla
from jax_sparse_mla.attention.index_table import IndexTable
from jax_sparse_mla.launch import torch_operator

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cpu,
    pytest.mark.skipif(not torch_operator.available(), reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def libraries():
    yield stub.register()
    jax.clear_caches()


@pytest.fixture
def namespace() -> str:
    return "stub_flash_mla"


@pytest.fixture
def traced_anew():
    """For a test that changes what is read at trace time."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def pretend_h200(monkeypatch, libraries, namespace):
    """An H200 with one of the vendors' libraries."""
    library = flashmla.Library(namespace, log2_prefill=namespace == "stub_sgl_kernel")
    monkeypatch.setattr(flashmla, "library", lambda: library)
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: H200))
    pretend_installed(monkeypatch, "flashmla")
    stub.CALLS.clear()


@pytest.fixture
def backend() -> str:
    return "flashmla"


class TestOverSglFlashMla(SparseMLAConformance):
    """All that backends share."""


@pytest.mark.usefixtures("traced_anew")
class TestOverSglangKernel:
    """Another schema, and statistics in base 2."""

    @pytest.fixture
    def namespace(self) -> str:
        return "stub_sgl_kernel"

    @pytest.mark.long
    @pytest.mark.parametrize("seed", range(2))
    def test_it_equals_the_oracle(self, seed):
        for case in (small_decode(seed), small_decode(seed, extra=(16, 2)), small_decode(seed, layout="V32_FP8")):
            check_decode(case, run_decode(case, "flashmla"))
        case = small_prefill(seed)
        check_prefill(case, run_prefill(case, "flashmla"))


class TestDecode:
    @pytest.mark.always(2)
    @pytest.mark.parametrize("heads", [1, 63, 64, 65, 127, 128])
    def test_heads_are_padded_to_64_or_128(self, heads):
        case = small_decode(heads=heads, extra=(16, 2))
        check_decode(case, run_decode(case, "flashmla"))
        assert [("decode", (6, 1, 64 if heads <= 64 else 128, 512))] == stub.CALLS

    @pytest.mark.always(2)
    @pytest.mark.parametrize("extra", [None, (200, 2)])
    @pytest.mark.parametrize("lengths", ["none", "row"])
    @pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8"])
    def test_each_call_makes_its_schedule(self, layout, lengths, extra):
        case = small_decode(3, layout=layout, topk=100, lengths=lengths, extra_lengths=lengths, extra=extra)
        check_decode(case, run_decode(case, "flashmla"))

    def test_v32_with_an_extra_cache_merges_two_calls(self):
        case = small_decode(layout="V32_FP8", extra=(16, 2))
        check_decode(case, run_decode(case, "flashmla"))
        assert len(stub.CALLS) == 2

    @pytest.mark.long
    def test_more_rows_than_the_accumulators_hold_go_through_in_parts(self, monkeypatch, traced_anew):
        case = small_decode(batch=5, extra=(16, 2))
        expected = jax.block_until_ready(run_decode(case, "flashmla"))
        stub.CALLS.clear()
        jax.clear_caches()
        monkeypatch.setattr(flashmla, "MAX_ACCUMULATOR_BYTES", (132 + 4) * 64 * 512 * 4)
        assert_same(run_decode(case, "flashmla"), expected)
        assert sorted(shape[0] for _, shape in stub.CALLS) == [2, 4, 4]

    @pytest.mark.parametrize("empty", [("cache",), ("extra_cache",), ("cache", "extra_cache")])
    def test_a_cache_without_pages(self, empty):
        case = small_decode(extra=(16, 2))
        for name in empty:
            host = getattr(case, name)
            setattr(case, name, HostCache(host.layout, host.page_size, host.data[:0], host.rows[:0]))
        check_decode(case, run_decode(case, "flashmla"))

    def test_valid_indices_go_through_untouched(self, monkeypatch, traced_anew):
        case = small_decode(topk=64, lengths="none", rows="padded", extra=(128, 2), extra_lengths="none")
        for indices, cache in ((case.indices, case.cache), (case.extra_indices, case.extra_cache)):
            indices[(indices < 0) | (indices >= len(cache.rows))] = -1
        expected = run_decode(case, "flashmla")
        jax.clear_caches()
        monkeypatch.setattr(flashmla, "_sanitise", None)
        assert_same(run_decode(case, "flashmla", assume_valid_indices=True), expected)

    def test_valid_indices_are_still_padded_to_whole_blocks(self):
        case = small_decode(topk=16, lengths="none")
        case.indices[:] = np.where(case.indices >= len(case.cache.rows), -1, np.maximum(case.indices, -1))
        check_decode(case, run_decode(case, "flashmla", assume_valid_indices=True))

    def test_without_lengths_the_schedule_is_a_constant(self):
        case = small_decode(lengths="none")
        q, cache, indices = (decode_arguments(case)[name] for name in ("q", "cache", "indices"))

        def attend(q, cache, indices):
            return flashmla.decode(q, (IndexTable(cache, indices, None),), None, softmax_scale=0.1)

        assert "while" not in jax.jit(attend).lower(q, cache, indices).as_text()

    def test_sm100_plans_its_own_partitions(self, monkeypatch, traced_anew):
        b200 = dataclasses.replace(H200, compute_capability=(10, 0), sm_count=148)
        monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: b200))
        passed = []
        monkeypatch.setattr(
            torch_operator, "torch_call", lambda op, arguments, results: passed.append(arguments) or results
        )
        with pytest.raises(TypeError):  # the results are shapes
            run_decode(small_decode(), "flashmla")
        assert passed[0]["tile_scheduler_metadata"] is None and passed[0]["num_splits"] is None


class TestTransformations:
    def test_vmap(self):
        case = small_decode(extra=(16, 2))
        arguments = decode_arguments(case)
        expected = sparse_mla_decode(**arguments, backend="flashmla")

        def one(q, indices):
            return sparse_mla_decode(**arguments | {"q": q, "indices": indices}, backend="flashmla")

        mapped = jax.vmap(one)(jnp.stack([arguments["q"]] * 2), jnp.stack([arguments["indices"]] * 2))
        for got in zip(*mapped):
            assert_agree(got, expected, "decode")

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("phase", ["decode", "prefill"])
    def test_shard_map(self, phase, check_vma):
        """Decode over heads, prefill over rows."""
        if phase == "decode":
            function, arguments = sparse_mla_decode, decode_arguments(small_decode(heads=6, extra=(16, 2)))
            out_specs, cut = PartitionSpec(None, None, "x"), {"q": PartitionSpec(None, None, "x")}
            cut |= {"attn_sink": PartitionSpec("x")}
        else:
            function, arguments = sparse_mla_prefill, prefill_arguments(small_prefill())
            out_specs, cut = PartitionSpec("x"), dict.fromkeys(("q", "indices", "topk_length"), PartitionSpec("x"))
        attend = functools.partial(function, softmax_scale=arguments.pop("softmax_scale"), backend="flashmla")
        specs = dict.fromkeys(arguments, PartitionSpec()) | cut
        mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
        sharded = jax.shard_map(
            lambda given: attend(**given), mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma
        )
        assert_agree(jax.jit(sharded)(arguments), attend(**arguments), phase)


@pytest.mark.usefixtures("traced_anew")
class TestFailures:
    def test_an_operators_exception_is_an_xla_error(self, monkeypatch):
        case = small_decode()
        monkeypatch.setattr(flashmla, "_sanitise", lambda tables, sink, padded: (tables, None))  # hostile values
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"stub_flash_mla::sparse_decode_fwd.*would end"):
            jax.block_until_ready(run_decode(case, "flashmla"))

    def test_what_is_missing_is_said(self, monkeypatch):
        monkeypatch.undo()
        flashmla.library.cache_clear()
        with pytest.raises(RuntimeError, match=r"flash_mla: .*sgl_kernel: .*JAX_SPARSE_MLA_BACKEND"):
            flashmla.library()

    @pytest.mark.parametrize(
        "file, expected",
        [
            ("flash_mla/_C_legacy.abi3.so", True),
            ("flash_mla/cuda.abi3.so", False),  # no kernels for SM90 and these caches
            ("sgl_kernel/flashmla_ops.abi3.so", True),
            ("sgl_kernel/common_ops.abi3.so", False),
        ],
    )
    def test_a_package_without_the_operators_does_not_count(self, tmp_path, file, expected):
        with stub.empty_package(tmp_path, file):
            assert (BACKENDS["flashmla"].missing("decode", "jax", H200) is None) == expected

    def test_asking_for_it_imports_nothing(self):
        program = (
            "import sys; from jax_sparse_mla.attention.backend import BACKENDS; "
            "from jax_sparse_mla import DeviceInfo; h200 = DeviceInfo('cuda', (9, 0)); "
            "[BACKENDS['flashmla'].missing(phase, 'jax', h200) for phase in ('decode', 'prefill')]; "
            "assert not {'torch', 'flash_mla', 'sgl_kernel'} & set(sys.modules)"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
