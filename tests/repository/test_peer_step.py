"""SGLang's step beside ours, without a GPU: its state is our benchmark's, its guards see what differs, its table."""

from __future__ import annotations

import dataclasses
import json
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from benchmarks import peer_prefill, peer_step, peers
from benchmarks.peer_step import Case
from benchmarks.sglang import guards, prepare, state
from benchmarks.sglang.guards import GuardError, Request
from benchmarks.sglang.step import Seen
from benchmarks.stack import Stack, fill
from benchmarks.step import Operation
from jax_sparse_mla import DEEPSEEK_V4_FLASH

SMALL = dataclasses.replace(DEEPSEEK_V4_FLASH, num_heads=2, index_heads=2, index_topk=16)


def test_a_case_is_a_stack():
    case = Case.parse("8x8192")
    assert case == (8, 8192) and str(case) == "8x8192"
    stack = case.stack(5)
    assert stack == Stack(ratios=(0, 0, 4, 128, 4), batch=8, max_len=8192)


def test_the_table_compares_variants_that_do_what_ours_does():
    times = {"steps": 8, "wall_us": 1000.0, "gpu_us": 900.0, "operations": 444.0, "host_us": 30.0, "moved": False}
    theirs = times | {"wall_us": 1500.0, "span_us": 1400.0}
    ours = {"8x8192": times, "8x8192@a=1&b=2": times, "1x8192": times}
    results = {"8x8192": {"A": theirs, "B": theirs, "C": theirs}, "1x8192": {"B": theirs}}
    found = peer_step.with_ours(results, ours)
    assert list(found["8x8192"]) == ["ours", "A", "B", "C", "ours, a=1&b=2"] and "moved" not in found["8x8192"]["ours"]
    lines = peer_step.table(found).splitlines()
    assert lines[0].split()[:3] == ["case", "step", "wall_us"] and len(lines) == 8
    assert [line.endswith("1.50") for line in lines[1:]] == [False, True, True, False, False, False, True]
    failed = peer_step.table({"1x8192": {"ours": times, "B": {"failed": "layer 2"}}}).splitlines()[2]
    assert failed.split()[3:] == ["–"] * 5
    assert peer_step.table({"1x8192": {"B": theirs}}).splitlines()[1].split() == [
        *("1x8192", "SGLang", "B"),
        *("1,500", "900", "1,400", "444", "30"),
    ]


def test_only_what_the_step_needs_is_taken_from_the_wheel(tmp_path):
    names = [
        "sglang/kernels/jit/utils/arch.py",
        "sglang/kernels/jit/csrc/deepseek_v4/c4_v2.cuh",
        "sglang/kernels/ops/attention/dsv4/topk.py",
        "sglang/srt/environ.py",
        "sglang-0.5.23.dist-info/METADATA",
    ]
    others = ["sglang/srt/server.py", "sglang/kernels/ops/attention/dsv4/asm/a.co", "sglang/kernels/jit/__init__.py"]
    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        for name in names + others:
            wheel.writestr(name, "")
    with zipfile.ZipFile(tmp_path / "wheel") as wheel:
        assert prepare.kept(wheel.namelist()) == names


def test_a_compiled_module_is_found_by_its_flags_and_sources(tmp_path, monkeypatch):
    source = tmp_path / "a.cuh"
    source.write_text("int x;")
    spec = types.SimpleNamespace(
        module_name="m", module_args=("m",), wrappers=(("run", "Run"),), cuda_cflags=("-O3",), cuda_files=(str(source),)
    )
    loader = types.SimpleNamespace(_find_prebuilt=lambda *, spec, scope: None)
    monkeypatch.setattr(prepare.importlib, "import_module", lambda name: loader)
    missing = prepare.use_compiled(tmp_path)
    assert loader._find_prebuilt(spec=spec, scope=None) is None and missing == ["m"]
    path = prepare._path(tmp_path, spec)
    path.parent.mkdir(parents=True)
    path.touch()
    assert loader._find_prebuilt(spec=spec, scope=None) == path and missing == ["m"]
    source.write_text("int y;")
    assert loader._find_prebuilt(spec=spec, scope=None) is None


def test_every_name_that_the_step_takes_is_sglangs():
    try:
        found = prepare.modules()
    except peers.NotMeasured as reason:
        pytest.skip(f"SGLang's kernels: {reason}")
    names = {
        "topk": "plan_topk_v2 topk_transform_paged_v2 _jit_topk_v2_module",
        "store": "get_paged_mqa_logits_metadata _jit_metadata_module",
        "rope": "fused_k_norm_rope_flashmla fused_q_norm_rope fused_q_indexer_rope_hadamard_quant fused_rope_inplace",
        "compress": "CompressorDecodePlan CompressorPrefillPlan compress_forward compress_norm_rope_store",
        "lengths": "init_compression_metadata",
        "pages": "BuildPageTablePositions BuildCausalSwaPageIndices ExpandPrefillCausally",
        "gather": "dequantize_k_cache_paged_dsv4",
        "index keys": "GetKAndS",
        "workspace": "SparsePrefillChunkCache SparsePrefillKVBuffer",
    }
    assert names.keys() == found.keys() == set(prepare.MODULES)
    for module, wanted in names.items():
        assert [name for name in wanted.split() if not hasattr(found[module], name)] == []


# --- the state -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack():
    return Stack(spec=SMALL, ratios=(0, 4, 4), batch=2, max_len=512, window_pages=2)


@pytest.fixture(scope="module")
def theirs(stack):
    return state.State(stack, "cpu")


@pytest.mark.long
def test_the_state_is_the_stacks(stack, theirs):
    ours, tables, rows = fill(stack, stack.empty_caches()), stack.tables(), stack.rows(stack.batch)
    for name in ("swa", "compressed"):
        pages = np.concatenate([getattr(layer, name) for layer in theirs.layers if layer.ratio == 4])
        assert np.array_equal(pages, getattr(ours[4], name).data)
    assert np.array_equal(theirs.layers[0].swa, ours[0].swa.data)
    keys = np.concatenate([layer.index_k for layer in theirs.layers[1:]])
    assert np.array_equal(keys, jax.tree.leaves(ours[4].index_k)[0])
    assert np.array_equal(theirs.req_to_token, tables.req_to_token) and theirs.req_to_token.dtype == torch.int32
    assert np.array_equal(theirs.full_to_swa, tables.full_to_swa) and theirs.full_to_swa.dtype == torch.int64
    assert np.array_equal(theirs.kv.float(), rows[4].kv.astype(jnp.float32))
    compressor, params = theirs.layers[1].index_compressor, state.layer_params(stack)[1].index_compressor
    assert np.array_equal(compressor.rows, jnp.concatenate([rows[4].index.kv, rows[4].index.score], 1))
    # A window's rows are the A halves of the group before and the B halves of its own.
    assert np.array_equal(compressor.ape, np.concatenate(np.split(np.asarray(params.ape), 2, axis=1)))
    assert compressor.state.shape == ((1 + 2 * 2) * 8 // 4, 4, 2 * 2 * 128)
    weights = theirs.index_weights.float() * theirs.index_scale
    assert np.allclose(weights, rows[4].index.weights, rtol=2**-8)


def test_the_rope_table_is_the_compressors_rope():
    from jax_sparse_mla.rope import rope_interleaved

    inv_freq = 160000.0 ** -(np.arange(32, dtype=np.float32) / 32)
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    table = state.rope_table(inv_freq, 9000)[[0, 1, 255, 8191, 8999]]
    turned = x.view(np.complex64) * table
    expected = rope_interleaved(x, jnp.asarray([0, 1, 255, 8191, 8999], jnp.int32), jnp.asarray(inv_freq))
    assert table.dtype == np.complex64 and np.allclose(turned.view(np.float32), expected, atol=1e-5)


# --- the guards ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_layer_is_itself_and_not_another(stack, theirs):
    """A sliding-window layer run by our reference in SGLang's place, with a byte or an output changed."""
    layer, kv = theirs.layers[0], theirs.kv
    before = Request.of(theirs, layer, 1)
    mini = dataclasses.replace(stack, batch=1, ratios=(0,))
    tables = mini.tables()
    pages = guards._mini_pages(mini, tables)
    rows, length = guards._rows(theirs, layer, 1, kv[1:], 511), jnp.full(1, 512, jnp.int32)
    cache = guards._cache(mini, 0, before, *pages)
    out, cache, _ = guards._reference(mini, 0)(cache, rows, theirs.params[0], tables, jnp.zeros((1, 0)), length)
    after = Request(swa=np.asarray(cache.swa.data)[pages[1]])
    out = torch.from_numpy(np.array(out.astype(jnp.float32))).repeat(2, 1, 1)
    report = guards.compare(theirs, 0, 1, before, after, Seen(kv, out))
    assert report == (1.0, 0.0, 0.0, 0.0)
    assert guards.compare(theirs, 0, 1, before, after, Seen(kv, 1.1 * out)).output_error > guards.MOST_ERROR
    with pytest.raises(GuardError, match="a row's e4m3 values differ"):
        guards.compare(theirs, 0, 1, before, before, Seen(kv, out))
    after.swa[0, 0] ^= 1
    with pytest.raises(GuardError, match="1 bytes of a KV cache differ outside"):
        guards.compare(theirs, 0, 1, before, after, Seen(kv, out))


def test_a_selection_counts_by_its_logits():
    logits = np.asarray([5.0, 1.0, 4.0, 3.0, 3.0, -8.0], np.float32)
    assert guards._selected(logits, np.asarray([0, 2, 4]), 3) == 1.0  # 3 and 4 are as good as each other
    assert guards._selected(logits, np.asarray([0, 1, 2]), 3) == pytest.approx(2 / 3)


def test_a_selection_is_of_the_requests_own_entries(theirs):
    pages = theirs.req_to_token[:, ::256] // 256
    slots = torch.arange(16) + 64 * pages[1, 1]
    assert guards._positions(theirs, 1, slots.numpy(), 512).tolist() == list(range(64, 80))
    for wrong in (slots + 64 * (pages[0, 1] - pages[1, 1]), slots[:15]):
        with pytest.raises(GuardError, match="request 1 selects"):
            guards._positions(theirs, 1, wrong.numpy(), 512)


def test_values_are_near_within_a_step_of_their_format():
    values = np.asarray([1.0, -0.5, 0.001])
    guards._near(values, values * 1.12, guards.E4M3_STEP, "values")
    with pytest.raises(GuardError, match="2 of 3 values differ by more than a step"):
        guards._near(values, values * 1.2, guards.E4M3_STEP, "values")


def test_the_worst_of_two_reports():
    first, second = guards.Report(1.0, 0.1, 0.0, 0.3), guards.Report(0.9, 0.0, 0.2, 0.0)
    assert first.worse(second) == (0.9, 0.1, 0.2, 0.3)


def test_without_sglang_the_reason_is_recorded(monkeypatch, tmp_path, capsys):
    def absent(name):
        raise peers.NotMeasured("no package sglang on the path")

    monkeypatch.setattr(peers, "find", absent)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(peer_step.sys, "argv", ["peer_step"])
    monkeypatch.setattr(peer_step.jax.config, "update", lambda *arguments: None)
    assert peer_step.main() == 0 and "no package sglang" in capsys.readouterr().out
    assert json.loads((tmp_path / "peer_step.json").read_text())["not_measured"] == "no package sglang on the path"


def test_a_chunk_s_kernels_are_summed_by_name():
    operations = [Operation("a", 0, 1000, 1), Operation("b", 0, 5000, 2), Operation("a", 2000, 4000, 3)]
    assert peer_prefill.kinds(operations) == [("b", 5.0, 1), ("a", 3.0, 2)]


def test_the_parts_of_a_chunk_are_those_of_both_sides_kernels():
    both = {
        "attention": ("legacy::sm90::prefill::sparse_fwd::sparse_attn_fwd_kernel<...>", "body_mosaic_gpu_kernel"),
        "top-k and tables": ("_combine_topk_swa_indices_kernel", "(anonymous namespace)::topk_kernel<float>"),
        "index queries": ("sglang::fused_q_indexer_rope_hadamard_quant<...>", "quantize_index_q_kernel"),
        "rest": ("Memcpy HtoD (Pinned -> Device)", "v4_metadata_kernel"),
    }
    found = peer_prefill.parts([(name, 2.5, 1) for names in both.values() for name in names])
    assert {part: us for part, us in found.items() if us} == dict.fromkeys(both, 5.0)
    assert tuple(found) == (*peer_prefill.PARTS, "rest")
