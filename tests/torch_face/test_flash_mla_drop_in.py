"""The drop-in `flash_mla`: FlashMLA's signatures and conventions, whoever serves the call.

Results are judged by `attention_oracle`: numpy float64 over poisoned caches and hostile indices.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import drop_in_calls as calls
import flashmla_stub as stub
from attention_calls import H200, MADE_UP, OVERRIDES, small_prefill
from drop_in_calls import (
    BACKENDS,
    ON_GPU,
    check_decode,
    check_prefill,
    decode,
    per_request,
    prefill,
    python,
    served_by,
    served_with_stand_ins,
    valid_case,
)
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import decode as torch_decode
from sparse_mla_torch.attention import pages, route
from sparse_mla_torch.attention.backends import flashmla
from sparse_mla_torch.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.backends import flashmla as jax_flashmla
from jax_sparse_mla.kv_cache import KVLayout

pytestmark = pytest.mark.torch


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    with served_with_stand_ins(request.param, monkeypatch):
        yield request.param


# --- what FlashMLA is called with ---------------------------------------------------------------------------------

WITH_KVCACHE = [
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"),
    *("softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache"),
    *("extra_indices_in_kvcache", "topk_length", "extra_topk_length"),
]
OF_THE_WHEEL = ["enable_batch_invariant", "use_legacy", "kv_format", "descale_q", "descale_k"]
SPARSE_FWD = ["q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"]


def positional(function) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def test_signatures_are_flashmlas():
    found = positional(flash_mla_with_kvcache)
    assert list(found) == WITH_KVCACHE + OF_THE_WHEEL
    required = WITH_KVCACHE[:6]
    assert [name for name, default in found.items() if default is inspect.Parameter.empty] == required
    assert {name for name in found if found[name] is False} == {"causal", "enable_batch_invariant", "use_legacy"}
    found = positional(flash_mla_sparse_fwd)
    assert list(found) == [*SPARSE_FWD, "use_legacy", "return_log2_lse"]
    assert found["d_v"] == 512 and found["use_legacy"] is False and found["return_log2_lse"] is None
    fields = [field.name for field in dataclasses.fields(flash_mla.FlashMLASchedMeta)]
    assert fields[:4] == ["have_initialized", "config", "tile_scheduler_metadata", "num_splits"]
    config = [field.name for field in dataclasses.fields(flash_mla.FlashMLASchedMeta.Config)]
    assert config[:8] == ["b", "s_q", "h_q", "page_block_size", "h_k", "causal", "is_fp8_kvcache", "topk"]
    assert config[8:] == ["extra_page_block_size", "extra_topk", "enable_batch_invariant"]


def test_metadata_takes_anything():
    meta, nothing = get_mla_metadata(torch.zeros(3), 128, num_heads_k=1, topk=2048)
    assert nothing is None and not meta.have_initialized and meta.config is None
    assert meta.tile_scheduler_metadata is None and meta.num_splits is None


# --- results ------------------------------------------------------------------------------------------------------

DECODES = {
    "v4 two caches": {"extra": (40, 2)},
    "v4 lengths none": {"lengths": "none", "topk": 64},
    "v32 with lengths": {"layout": "V32_FP8", "topk": 100},
    "v32 two caches": {"layout": "V32_FP8", "extra": (24, 61), "topk": 16},
    "one head": {"heads": 1, "q_len": 3},
    "65 heads": {"heads": 65, "batch": 1, "q_len": 1},
    "no valid index": {"rows": "none", "extra": (24, 2)},
    "odd pages": {"page_size": 61},
}


@pytest.mark.always(4)
@pytest.mark.parametrize("name", DECODES)
def test_decode_equals_the_oracle(backend, name):
    if backend == "flashmla" and name == "v32 two caches":
        pytest.skip("the router keeps this from FlashMLA: test_what_flashmla_cannot_take")
    case = per_request(**DECODES[name])
    check_decode(case, decode(case))


@pytest.mark.parametrize("setting", [{"layout": "V4_BF16", "extra": (24, 61)}, {"layout": "V32_BF16"}], ids=str)
def test_decode_from_bfloat16_rows_equals_the_oracle(backend, setting):
    case = per_request(**setting)
    if backend == "flashmla":
        with pytest.raises(ValueError, match=r"reads rows of V32_FP8 and V4_FP8, got V\d+_BF16"):
            decode(case)
    else:
        check_decode(case, decode(case))


PREFILLS = [{}, {"topk": 128, "heads": 64}, {"topk": 100, "heads": 3}, {"rows": "none"}, {"dim": 576}]


@pytest.mark.parametrize("setting", PREFILLS, ids=str)
def test_prefill_equals_the_oracle(backend, setting):
    case = small_prefill(1, **setting)
    check_prefill(case, prefill(case))


# --- strides, dtypes, buffers -------------------------------------------------------------------------------------


def strided(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values with room behind each step of `dim`."""
    shape = list(x.shape)
    shape[dim] += 8
    room = x.new_zeros(shape).narrow(dim, 0, x.shape[dim])
    room.copy_(x)
    assert not room.is_contiguous()
    return room


def shifted(x: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same values, so many elements behind an address that is a multiple of 64."""
    return x.new_empty(x.numel() + elements)[elements:].view(x.shape).copy_(x)


@pytest.mark.always(2)
def test_strided_queries_and_indices(backend):
    case = per_request(extra=(40, 2))
    arguments = calls.decode_arguments(case)
    for name, dim in (("q", 2), ("indices", 2), ("extra_indices_in_kvcache", 1), ("topk_length", 0)):
        changed = strided(arguments[name][..., None], -1)[..., 0] if dim == 0 else strided(arguments[name], dim)
        assert torch.equal(changed, arguments[name])
        check_decode(case, flash_mla_with_kvcache(**arguments | {name: changed}))


@pytest.mark.always(2)
def test_strided_prefill(backend):
    case = small_prefill(heads=64)
    arguments = calls.prefill_arguments(case)
    for name, dim in (("q", 1), ("q", 2), ("kv", 2), ("indices", 2), ("topk_length", 0), ("attn_sink", 0)):
        changed = strided(arguments[name][..., None], -1)[..., 0] if dim == 0 else strided(arguments[name], dim)
        check_prefill(case, flash_mla_sparse_fwd(**arguments | {name: changed}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_cache_dtypes(backend, dtype):
    case = per_request()
    arguments = calls.decode_arguments(case)
    check_decode(case, flash_mla_with_kvcache(**arguments | {"k_cache": arguments["k_cache"].view(dtype)}))


def test_pages_that_stand_apart(backend):
    case = per_request(layout="V32_FP8", topk=64)
    cache = calls.decode_arguments(case)["k_cache"]
    pages, page_size, _, width = cache.shape
    apart = torch.full((pages, page_size + 1, 1, width), 255, dtype=torch.uint8, device=cache.device)
    apart[:, :page_size] = cache
    check_decode(case, decode(case, k_cache=apart[:, :page_size]))


@pytest.mark.always(2)
def test_results_are_written_into_out(backend):
    case = per_request(heads=64, q_len=2)
    out, lse = (torch.full_like(x, torch.nan).contiguous() for x in decode(case))
    results = decode(case, out=(out, lse))
    assert results[0] is out and results[1] is lse
    check_decode(case, results)
    rows = torch.full_like(lse.transpose(1, 2).contiguous(), torch.nan)  # as the kernels write it
    check_decode(case, decode(case, out=(out.fill_(torch.nan), rows.transpose(1, 2))))
    check_decode(case, decode(case, out=(shifted(out.fill_(torch.nan)), shifted(lse.fill_(torch.nan)))))
    small = small_prefill()
    poisoned = tuple(torch.full_like(x, torch.nan) for x in prefill(small))
    results = prefill(small, out=poisoned)
    assert all(x is y for x, y in zip(results, poisoned))
    check_prefill(small, results)


def test_valid_indices_need_no_sanitiser(backend, monkeypatch):
    monkeypatch.setattr(flashmla, "Sanitiser", None)
    case = valid_case()
    check_decode(case, decode(case, assume_valid_indices=True))
    if backend == "flashmla":
        with pytest.raises(TypeError, match="NoneType"):
            decode(case)


# --- options ------------------------------------------------------------------------------------------------------


def test_return_log2_lse(backend):
    case = small_prefill(heads=64)
    out, max_logits, lse = prefill(case)
    in_base_2 = prefill(case, return_log2_lse=True)
    torch.testing.assert_close(in_base_2[1], max_logits / math.log(2))
    torch.testing.assert_close(in_base_2[2], lse / math.log(2))
    alone = prefill(case, return_log2_lse=False)
    assert alone[1] is None and alone[2] is None and torch.equal(alone[0], out)


@pytest.mark.parametrize("heads", [3, 64])
def test_statistics_in_base_2_of_the_other_wheel(heads, monkeypatch):
    if ON_GPU:
        pytest.skip("by the stub of sglang-kernel")
    stub.register()
    monkeypatch.setattr(jax_flashmla, "library", lambda: jax_flashmla.Library("stub_sgl_kernel", log2_prefill=True))
    with served_by("flashmla", monkeypatch):
        case = small_prefill(1, heads=heads)
        check_prefill(case, results := prefill(case))
        in_base_2 = prefill(case, return_log2_lse=True)
        torch.testing.assert_close(in_base_2[1], results[1] / math.log(2))
        torch.testing.assert_close(in_base_2[2], results[2] / math.log(2))


def test_operators_have_this_packages_conventions(backend, monkeypatch):
    """And keep none of the memory that they take: in a compiled graph it may be the graph's."""
    kept = []

    class Sanitiser(flashmla.Sanitiser):
        def __init__(self, *arguments):
            kept.append(arguments[-1])
            super().__init__(*arguments)

    monkeypatch.setattr(flashmla, "Sanitiser", Sanitiser)
    case, small = per_request(extra=(40, 2)), small_prefill(1, heads=3)
    for indices in (case.indices, case.extra_indices, small.indices):
        indices[0] = -1
    arguments = list(calls.decode_arguments(case).values())
    q, k_cache, _, _, _, _, scale, _, indices, sink, extra_cache, extra_indices, lengths, extra_lengths = arguments
    operators = torch.ops.jax_sparse_mla
    rest = (lengths, extra_cache, extra_indices, extra_lengths, sink)
    out, lse = operators.sparse_mla_decode(q, k_cache, indices, scale, *rest)
    assert torch.isneginf(lse).any() and not torch.isposinf(lse).any()
    check_decode(case, (out, lse.masked_fill(torch.isneginf(lse), torch.inf).transpose(1, 2)))
    q, kv, indices, scale, sink, lengths = calls.prefill_arguments(small).values()
    results = operators.sparse_mla_prefill(q, kv[:, 0], indices[:, 0], scale, lengths, sink)
    assert torch.isneginf(results[2]).any() and not torch.isposinf(results[2]).any()
    check_prefill(small, (*results[:2], results[2].masked_fill(torch.isneginf(results[2]), torch.inf)))
    # Before FlashMLA's operators; the SM90 kernels check their indices themselves. Without a GPU prefill has none.
    calls_of_flashmla = {"flashmla": 2, "hopper": 0 if ON_GPU else 1}.get(backend, 0)
    assert kept == [False] * calls_of_flashmla
    decode(case), prefill(small)
    assert kept == [False] * calls_of_flashmla + [True] * calls_of_flashmla


@pytest.mark.parametrize("name", ["triton", pytest.param("reference", marks=pytest.mark.cpu)])
def test_batch_invariant_results_are_bitwise_those_of_a_row_alone(name, monkeypatch):
    case = per_request(batch=4, q_len=1, lengths="none", topk=128, heads=8)
    with served_by(name, monkeypatch):
        alike = {"enable_batch_invariant": True}
        out, lse = decode(case, **alike)
        arguments = calls.decode_arguments(case)
        one = {name: x[2:3] for name, x in arguments.items() if name in ("q", "indices")}
        alone = flash_mla_with_kvcache(**arguments | one | alike)
    assert torch.equal(alone[0][0], out[2]) and torch.equal(alone[1][0], lse[2])


def test_default_scale_and_inferred_format():
    case = per_request()
    check = dataclasses.replace(case, softmax_scale=512**-0.5)
    check_decode(check, decode(check, softmax_scale=None, is_fp8_kvcache=None, kv_format="V4", use_legacy=True))


def test_scales_of_numpy(backend):
    case = dataclasses.replace(per_request(), softmax_scale=0.0625)
    check_decode(case, decode(case, softmax_scale=np.float32(0.0625)))
    small = dataclasses.replace(small_prefill(), softmax_scale=0.0625)
    check_prefill(small, prefill(small, sm_scale=np.float32(0.0625)))


@pytest.mark.always(2)
def test_a_schedule_is_reused_by_calls_of_its_shape(backend):
    case = per_request(heads=64)
    meta = get_mla_metadata()[0]
    for _ in range(2):
        check_decode(case, decode(case, tile_scheduler_metadata=meta))
    assert meta.have_initialized and meta.config.b == case.q.shape[0] and meta.config.topk == case.indices.shape[-1]
    assert (meta.tile_scheduler_metadata is not None) == (backend == "flashmla")
    other = per_request(heads=63)
    with pytest.raises(ValueError, match="tile_scheduler_metadata was filled by"):
        decode(other, tile_scheduler_metadata=meta)


@pytest.mark.always(2)
def test_large_batches_go_in_chunks(backend, monkeypatch):
    if ON_GPU:
        pytest.skip("by the stub's count of calls")
    monkeypatch.setattr(jax_flashmla, "MAX_ACCUMULATOR_BYTES", (132 + 2) * 64 * 512 * 4)
    case = per_request(heads=64, batch=5, q_len=1)
    check_decode(case, decode(case))
    assert len(stub.CALLS) == (3 if backend == "flashmla" else 0)


@pytest.mark.always(3)
@pytest.mark.parametrize("empty", ["indices", "extra_indices_in_kvcache"])
def test_a_table_without_a_column_is_left_out(backend, empty):
    """What remains is a call of the other table."""
    case = per_request(extra=(16, 2))
    arguments = calls.decode_arguments(case)
    names = ("k_cache", "indices", "topk_length")
    extras = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    out, lse = flash_mla_with_kvcache(**arguments | {empty: arguments[empty][..., :0].contiguous()})
    kept = [arguments[name] for name in (extras if empty == "indices" else names)]
    alone = arguments | dict.fromkeys(extras) | dict(zip(names, kept))
    for a, b in zip((out, lse), flash_mla_with_kvcache(**alone | {"tile_scheduler_metadata": get_mla_metadata()[0]})):
        assert torch.equal(a, b)


@pytest.mark.parametrize("setting", [{"batch": 0}, {"topk": 0}, {"heads": 0}], ids=str)
def test_empty_calls(backend, setting):
    case = per_request(lengths="none")
    arguments = calls.decode_arguments(case)
    batch, heads = setting.get("batch", 3), setting.get("heads", 4)
    arguments["q"] = arguments["q"][:batch, :, :heads]
    arguments["indices"] = arguments["indices"][:batch, :, : setting.get("topk")]
    arguments["attn_sink"] = None
    if backend == "flashmla":
        arguments["tile_scheduler_metadata"] = get_mla_metadata()[0]
    out, lse = flash_mla_with_kvcache(**arguments)
    assert out.shape == (batch, 2, heads, 512) and lse.shape == (batch, heads, 2)
    assert not out.any() and torch.isposinf(lse).all()


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"indices": None}, ValueError, "dense decode"),
        ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache must be True or None, got False"),
        ({"causal": True}, ValueError, "causal must be False"),
        ({"head_dim_v": 448}, ValueError, "head_dim_v must be 512"),
        ({"num_splits": 1}, ValueError, "num_splits must be None"),
        ({"descale_q": 1.0}, ValueError, "descale_q"),
        ({"kv_format": "V32"}, ValueError, "kv_format 'V32' is not what"),
        ({"tile_scheduler_metadata": None}, TypeError, "tile_scheduler_metadata must come from"),
        ({"q": 1}, TypeError, "q must be a torch.Tensor"),
        ({"k_cache": np.zeros(3)}, TypeError, r"k_cache must be a torch\.Tensor"),
        ({"q": "float"}, TypeError, "q must be .*bfloat16"),
        ({"q": "448"}, ValueError, "goes with queries of 512 .*, got queries of 448"),
        ({"indices": "long"}, TypeError, "indices must be .*int32"),
        ({"indices": "one"}, ValueError, "indices must have shape"),
        ({"topk_length": "one"}, ValueError, "topk_length must have shape"),
        ({"k_cache": "narrow"}, ValueError, "k_cache must be"),
        ({"attn_sink": "short"}, ValueError, r"attn_sink must have shape \[4\]"),
        ({"softmax_scale": math.nan}, ValueError, "must be finite"),
        ({"extra_topk_length": "lone"}, ValueError, "without an extra cache"),
        ({"out": "wrong"}, ValueError, r"out\[1\] must have shape"),
        ({"out": "alone"}, ValueError, "out must have shape"),
        ({"out": 3}, TypeError, "out must be a tensor or 2 tensors"),
    ],
)
def test_refused_by_name(changes, error, message):
    arguments = calls.decode_arguments(per_request())
    replacements = {
        "float": lambda x: x.float(),
        "long": lambda x: x.long(),
        "narrow": lambda x: x[..., :400],
        "short": lambda x: x[:3],
        "one": lambda x: x[:1],
        "448": lambda x: x[..., :448].contiguous(),
        "lone": lambda x: arguments["topk_length"],
        "alone": lambda x: torch.empty_like(arguments["q"])[:1],
        "wrong": lambda x: (torch.empty_like(arguments["q"]), torch.empty(1)),
    }
    named = {name: how for name, how in changes.items() if isinstance(how, str) and how in replacements}
    changes = changes | {name: replacements[how](arguments.get(name)) for name, how in named.items()}
    with pytest.raises(error, match=message):
        flash_mla_with_kvcache(**arguments | changes)


def test_pages_that_overlap_are_refused():
    arguments = calls.decode_arguments(per_request(topk=64))
    cache = arguments["k_cache"]
    with pytest.raises(ValueError, match="pages must each be dense"):
        flash_mla_with_kvcache(**arguments | {"k_cache": cache.as_strided(cache.shape, (8, *cache.stride()[1:]))})
    with pytest.raises(ValueError, match="d_v must be 512"):
        prefill(small_prefill(), d_v=448)


# --- routing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "heads", "topk", "expected"),
    [(1, 64, 640, "triton"), (64, 64, 640, "triton"), (128, 64, 640, "flashmla"), (128, 192, 640, "triton")],
)
def test_the_route(monkeypatch, rows, heads, topk, expected):
    """As JAX's: on SM90 our own kernel at any size, and without it by the amount of work."""
    absent = {"hopper": "no nvcc"}
    monkeypatch.setattr(route, "missing", lambda name, phase, device: absent.get(name))
    call = Call("decode", KVLayout.V4_FP8, rows, heads, H200, topk)
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    assert route.plan(call).backend == expected
    absent.clear()
    assert route.plan(call).backend == "hopper"
    assert route.plan(Call("prefill", KVLayout.V4_BF16, rows, heads, H200, topk)).backend == "hopper"
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "triton")
    assert route.plan(call).backend == "triton"
    monkeypatch.setenv("JAX_SPARSE_MLA_DECODE_BACKEND", "hopper")
    assert route.plan(call).backend == "hopper"


def test_a_cpu_has_the_reference():
    device = route.device_info(torch.device("cpu"))
    assert route.plan(Call("prefill", KVLayout.V4_BF16, 1, 1, device, 1)).backend == "reference"


@pytest.mark.parametrize("named", [None, "triton", "flashmla", "hopper"])
def test_a_layout_that_no_kernel_names_is_the_references(monkeypatch, named):
    case = calls.decode_arguments(per_request())
    cache = torch.zeros(2, 64, 1, 528, dtype=torch.uint8, device=case["q"].device)
    options = torch_decode.Options("decode", 0.1, math.inf)
    monkeypatch.setitem(pages.LAYOUTS, 528, MADE_UP)
    monkeypatch.setattr(route, "device_info", lambda device: H200)
    monkeypatch.setattr(route, "missing", lambda name, phase, device: None)
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    tensors = (case["q"], cache, case["indices"], None, None, None, None, None)
    if named is None:
        plan = torch_decode._new(options, *tensors).plan
        assert plan.backend == "reference"
        assert all("made up" in plan.rejected[name] for name in ("hopper", "flashmla", "triton"))
        return
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", named)
    with pytest.raises(ValueError, match=f"backend '{named}' cannot serve this decode call: .*got made up"):
        torch_decode._new(options, *tensors)


@pytest.mark.parametrize(
    ("file", "expected"), [("flash_mla/cuda.abi3.so", False), ("flash_mla/_C_legacy.abi3.so", True), (None, False)]
)
def test_a_flash_mla_without_the_operators_is_not_routed_to(tmp_path, file, expected):
    """FlashMLA's own builds and the wheel have one name: whoever changes an import has either."""
    with stub.empty_package(tmp_path, file):
        assert (route.missing.__wrapped__("flashmla", "decode", H200) is None) == expected


def test_what_flashmla_cannot_take():
    scope = torch_decode.TableShape(64, 0, 128, 64, 64 * 656)

    def obstacle(layout=KVLayout.V4_FP8, q_len=1, scopes=(scope,), shift=0):
        options = torch_decode.Options("decode", 0.1, math.inf)
        q = torch.empty((1, q_len, 64, 512), device="meta")
        tensors = (q, shifted(torch.zeros(64), shift), None)
        return flashmla.decode_obstacle(options, layout, list(scopes), tensors, H200)

    assert obstacle() is None and obstacle(scopes=(scope, scope)) is None
    assert "one cache" in obstacle(KVLayout.V32_FP8, scopes=(scope, scope))
    assert "16 bytes" in obstacle(shift=1)
    assert "16 bytes" in obstacle(scopes=(scope._replace(page_bytes=61 * 584),))
    assert "accumulators" in obstacle(q_len=1 << 16)
    assert "request's" in obstacle(q_len=2, scopes=(scope._replace(rows_per_length=1),))


def test_what_flashmlas_prefill_cannot_take():
    bf16 = {"dtype": torch.bfloat16}
    given = {"q": torch.zeros(1, 64, 512, **bf16), "kv": torch.zeros(3, 1, 512, **bf16)}
    given["indices"] = torch.zeros((1, 1, 64), dtype=torch.int32)
    absent = {"lengths": None, "attn_sink": None}
    assert flashmla.prefill_obstacle(**given, **absent) is None
    for name in given:  # 16 bytes are not enough for indices
        moved = given | {name: shifted(given[name], 4)}
        assert "begin at multiples" in flashmla.prefill_obstacle(**moved, **absent)


IMPORTS = """
import sys
before = set(sys.modules)  # some installations start with more
import sparse_mla_torch, sparse_mla_torch.plugins.sglang, sparse_mla_torch.plugins.vllm
assert "flash_mla" in dir(sparse_mla_torch) and not hasattr(sparse_mla_torch, "absent")
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"jax", "jaxlib", "jax_sparse_mla", "torch", "triton", "numpy", "vllm", "sglang"}, loaded
from sparse_mla_torch import flash_mla, to_jax
import sparse_mla_torch.attention.backends.flashmla
assert sparse_mla_torch.flash_mla is flash_mla and callable(to_jax)
from jax._src import xla_bridge
assert not xla_bridge._backends
"""


@pytest.mark.long
@pytest.mark.cpu
def test_importing_is_light_and_initialises_no_jax_backend():
    """The package and its plugins, which engines load into each process, import neither torch nor JAX until asked."""
    done = python(IMPORTS)
    assert done.returncode == 0, done.stderr
