"""The engines' plugins beside stand-ins for what they touch of vLLM and SGLang; `tests/engines` has the real ones."""

from __future__ import annotations

import enum
import importlib.util
import inspect
import logging
import pickle
import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import drop_in_calls as calls
from attention_calls import H200, small_prefill
from drop_in_calls import check_decode, check_prefill, per_request
from plugin_stubs import fresh, put, refuse  # noqa: F401 - a fixture
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.plugins import calls as served
from sparse_mla_torch.plugins import sglang as sglang_plugin
from sparse_mla_torch.plugins import short_prefill
from sparse_mla_torch.plugins import vllm as vllm_plugin

pytestmark = [pytest.mark.torch, pytest.mark.cpu, pytest.mark.usefixtures("fresh")]

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


# --- who serves a call --------------------------------------------------------------------------------------------


def test_a_reason_is_given_once(caplog):
    caplog.set_level(logging.INFO)
    for rows in range(3):
        error = ValueError(f"indices must have shape [{rows}, any]")
        assert served.ours_or_theirs("f", refuse(error), lambda: "theirs") == "theirs"
        assert served.ours_or_theirs("f", refuse(flash_mla.FasterAlone("sooner")), lambda: "theirs") == "theirs"
        assert served.ours_or_theirs("f", lambda: "ours", None) == "ours"
    assert served.counts == {("f", "refused"): 3, ("f", "theirs"): 3, ("f", "ours"): 3}
    assert [(x.levelname, x.getMessage()) for x in caplog.records] == [
        ("WARNING", "jax-sparse-mla leaves f to the engine: indices must have shape [0, any]"),
        ("INFO", "jax-sparse-mla leaves f to the engine: sooner"),
        ("INFO", "jax-sparse-mla serves f"),
    ]


def test_what_fails_is_not_asked_again(caplog):
    asked = []

    def ours():
        asked.append(1)
        raise RuntimeError("nvcc is missing")

    for _ in range(3):
        assert served.ours_or_theirs("f", ours, lambda: "theirs") == "theirs"
    assert len(asked) == 1 and "not asked again in this process: nvcc is missing" in caplog.text
    assert served.ours_or_theirs("g", lambda: "ours", None) == "ours"
    with pytest.raises(torch.OutOfMemoryError):  # theirs would want as much
        served.ours_or_theirs("h", refuse(torch.OutOfMemoryError("no memory")), lambda: "theirs")


def test_strict_raises(monkeypatch):
    monkeypatch.setenv("JAX_SPARSE_MLA_PLUGIN_STRICT", "1")
    for error in (ValueError, RuntimeError):
        with pytest.raises(error):
            served.ours_or_theirs("f", refuse(error("why")), lambda: "theirs")
    assert served.ours_or_theirs("f", refuse(flash_mla.FasterAlone("why")), lambda: "theirs") == "theirs"


def test_a_call_that_is_left_is_remembered(monkeypatch):
    case = per_request(heads=64)
    arguments = calls.decode_arguments(case)
    monkeypatch.setattr(route, "why_flashmla_alone", lambda call, backend: "sooner")
    asked = []
    monkeypatch.setattr(route, "plan_call", lambda *a, _plan=route.plan_call, **k: asked.append(1) or _plan(*a, **k))
    for _ in range(2):
        with pytest.raises(flash_mla.FasterAlone, match="sooner"):
            flash_mla.flash_mla_with_kvcache(**arguments, beside_flashmla=True)
    assert len(asked) == 1 and not arguments["tile_scheduler_metadata"].have_initialized
    with pytest.raises(flash_mla.FasterAlone, match="sooner"):
        flash_mla.flash_mla_sparse_fwd(**calls.prefill_arguments(small_prefill()), beside_flashmla=True)
    check_decode(case, flash_mla.flash_mla_with_kvcache(**arguments))
    monkeypatch.setenv("JAX_SPARSE_MLA_DECODE_BACKEND", "reference")  # who is named serves
    call_cache.forget()
    check_decode(case, flash_mla.flash_mla_with_kvcache(**arguments, beside_flashmla=True))


# --- vLLM ---------------------------------------------------------------------------------------------------------


class Backends(enum.Enum):
    """As vLLM's AttentionBackendEnum: members may be added, and a process that did not add one does not know it."""

    FLASHMLA_SPARSE = "theirs"


def register_backend(name: str, path: str) -> None:
    member = object.__new__(Backends)
    member._name_, member._value_ = name, path
    Backends._member_map_[name] = Backends._value2member_map_[path] = member
    Backends._member_names_.append(name)


@pytest.fixture
def vllm(monkeypatch):
    registry = {"AttentionBackendEnum": Backends, "register_backend": register_backend}
    put(monkeypatch, vllm={"__version__": "0.33.1"}, vllm__v1={}, vllm__v1__attention={})
    put(monkeypatch, vllm__v1__attention__backends={}, vllm__v1__attention__backends__registry=registry)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    Backends._member_map_.pop(vllm_plugin.NAME, None)
    Backends._value2member_map_.pop(vllm_plugin._CLASS, None)
    Backends._member_names_[:] = ["FLASHMLA_SPARSE"]


def test_vllm_registers_a_name_once(vllm):
    before = len(sys.meta_path)
    for _ in range(2):
        vllm_plugin.register()
    assert list(Backends.__members__) == ["FLASHMLA_SPARSE", "JAX_SPARSE_MLA"] and len(sys.meta_path) == before + 2
    assert Backends["JAX_SPARSE_MLA"].value == "sparse_mla_torch.plugins.vllm_v32.JaxSparseMLABackend"


def test_vllms_workers_know_the_name_before_they_load_plugins(vllm):
    vllm_plugin.register()
    pickled = pickle.dumps(Backends["JAX_SPARSE_MLA"])
    Backends._member_map_.pop("JAX_SPARSE_MLA")
    assert pickle.loads(pickled) is Backends["JAX_SPARSE_MLA"]
    assert pickle.loads(pickle.dumps(Backends.FLASHMLA_SPARSE)) is Backends.FLASHMLA_SPARSE


@pytest.mark.parametrize("obstacle", ["version", "moved", "absent"])
def test_another_vllm_is_left_alone(vllm, monkeypatch, caplog, obstacle):
    if obstacle == "version":
        monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.0")
    elif obstacle == "moved":
        monkeypatch.delattr(sys.modules["vllm.v1.attention.backends.registry"], "register_backend")
    else:
        monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_plugin.register()
    assert "JAX_SPARSE_MLA" not in Backends.__members__
    assert len(caplog.records) == 1 and "leaves vLLM as it is" in caplog.text


def theirs_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None, enable_batch_invariant=False,
):  # fmt: skip
    given = dict(locals())
    assert q.shape[-2] == 64 and attn_sink.shape == (64,) and out is None
    return flash_mla.flash_mla_with_kvcache(**given | {"tile_scheduler_metadata": flash_mla.FlashMLASchedMeta()})


def theirs_prefill(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None):
    assert q.shape[-2] == 64 and attn_sink.shape == (64,) and out is None
    return flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)


def make_layer() -> tuple[type, dict]:
    """A class like vLLM's V4 layer, and the globals of its methods."""
    source = """
class DeepseekV4FlashMLAAttention:
    n_local_heads, head_dim = 16, 512

    @classmethod
    def get_padded_num_q_heads(cls, num_heads):
        return 64

    def _forward_decode(self, **arguments):
        return flash_mla_with_kvcache(**arguments)

    def _forward_prefill(self, *, scale=0.5, **arguments):
        return flash_mla_sparse_fwd(sm_scale=scale, **arguments)
"""
    names = {"flash_mla_with_kvcache": theirs_decode, "flash_mla_sparse_fwd": theirs_prefill, "__name__": "layer"}
    exec(source, names)
    return names["DeepseekV4FlashMLAAttention"], names


def test_the_v4_layer_calls_ours_with_its_own_heads(vllm, monkeypatch):
    from sparse_mla_torch.plugins.vllm_v4 import attention_class

    theirs, names = make_layer()
    before = dict(names)
    layer = attention_class(theirs)
    assert attention_class(theirs) is layer and issubclass(layer, theirs)
    assert layer.get_padded_num_q_heads(16) == 16 and theirs.get_padded_num_q_heads(16) == 64
    warmed = []
    monkeypatch.setattr(served.prefill, "warm_up", lambda *shapes: warmed.extend(shapes))
    layer()
    assert warmed == [(16, 512)]
    case, small = per_request(heads=16, extra=(40, 2)), small_prefill(heads=16)
    decode, prefill = calls.decode_arguments(case), calls.prefill_arguments(small)
    prefill["scale"] = prefill.pop("sm_scale")
    out = torch.empty(*decode["q"].shape[:3], 512, dtype=torch.bfloat16)

    def check():
        results = layer()._forward_decode(**decode, out=out.fill_(torch.nan))
        assert results[0] is out
        check_decode(case, results)
        check_prefill(small, layer()._forward_prefill(**prefill))

    check()
    assert served.counts == {(DECODE, "ours"): 1, (PREFILL, "ours"): 1} and names == before
    monkeypatch.setattr(served, "_off", {DECODE, PREFILL})  # theirs asserts that heads are padded
    check()
    assert served.counts == {(DECODE, "ours"): 1, (PREFILL, "ours"): 1}


def test_another_v4_layer_is_left_alone(vllm, caplog):
    from sparse_mla_torch.plugins.vllm_v4 import attention_class

    theirs, names = make_layer()
    names["flash_mla_with_kvcache"] = lambda q, cache: None
    with pytest.raises(TypeError, match="_forward_decode does not call"):
        attention_class(theirs)
    other = type("DeepseekV4FlashInferMLAAttention", (theirs,), {})
    assert attention_class(other) is other and "only DeepseekV4FlashMLAAttention is served" in caplog.text


@pytest.mark.parametrize("when", ["imported later", "there already"])
def test_the_model_chooses_our_layer_where_the_flag_says_so(vllm, monkeypatch, tmp_path, when):
    folder = tmp_path / "vllm_models"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "model.py").write_text("from plugin_test import select as _select_dsv4_attn_cls\n")
    theirs, _ = make_layer()
    put(monkeypatch, plugin_test={"select": lambda config: theirs})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_plugin, "V4_MODEL", "vllm_models.model")
    monkeypatch.delitem(sys.modules, "vllm_models.model", raising=False)
    if when == "there already":
        import vllm_models.model as model

        vllm_plugin.register()
    else:
        vllm_plugin.register()
        assert importlib.util.find_spec("vllm_models.model")  # to look is not to import
        import vllm_models.model as model
    vllm_plugin.register()  # again
    monkeypatch.delitem(sys.modules, "vllm_models.model")
    monkeypatch.delitem(sys.modules, "vllm_models")

    def chosen(name):
        backend = Backends[name] if name else None
        return model._select_dsv4_attn_cls(
            types.SimpleNamespace(attention_config=types.SimpleNamespace(backend=backend))
        )

    assert chosen(None) is theirs and chosen("FLASHMLA_SPARSE") is theirs
    assert chosen("JAX_SPARSE_MLA").__name__ == "JaxSparseMLAV4Attention"
    monkeypatch.setitem(sys.modules, "sparse_mla_torch.plugins.vllm_v4", None)  # whatever goes wrong
    assert chosen("JAX_SPARSE_MLA") is theirs


class Impl:
    """As vLLM's FlashMLASparseImpl calls FlashMLA: with 64 heads."""

    softmax_scale = 0.05

    def __init__(self, num_heads, head_size, *args, ranks=1):
        self.pcp_dcp_kv_gather, self.dcp_world_size, self.pcp_world_size = ranks > 1, 8, 2

    def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
        assert q.shape[2] == 16  # it pads, in its own way
        return "theirs"

    def _bf16_flash_mla_kernel(
        self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None, actual_num_heads=None, out=None
    ):
        return "theirs"


class Builder:
    """As vLLM's FlashMLASparseMetadataBuilder for few heads: two decodes, then a prefill."""

    device = torch.device("cpu")

    def __init__(self, cache_dtype="fp8_ds_mla", dcp_world_size=1):
        self.vllm_config = types.SimpleNamespace(cache_config=types.SimpleNamespace(cache_dtype=cache_dtype))
        self.dcp_world_size = dcp_world_size

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        of_batch = {"num_decodes": 2, "num_decode_tokens": 2, "fp8_extra_metadata": "mixed"}
        return types.SimpleNamespace(fp8_use_mixed_batch=True, **of_batch)

    def _build_fp8_separate_prefill_decode(self, common_attn_metadata, metadata):
        return "separate"


def test_the_v32_class(vllm, monkeypatch):
    module = {"FlashMLASparseBackend": type("Backend", (), {}), "FlashMLASparseImpl": Impl}
    module["FlashMLASparseMetadataBuilder"] = Builder
    parallel = types.SimpleNamespace(parallel_config=types.SimpleNamespace(tensor_parallel_size=4))
    put(monkeypatch, vllm__config={"get_current_vllm_config": lambda: parallel})
    put(monkeypatch, vllm__v1__attention__backends__mla={})
    put(monkeypatch, vllm__v1__attention__backends__mla__flashmla_sparse=module)
    monkeypatch.delitem(sys.modules, "sparse_mla_torch.plugins.vllm_v32", raising=False)
    from sparse_mla_torch.plugins import vllm_v32

    monkeypatch.delitem(sys.modules, "sparse_mla_torch.plugins.vllm_v32")
    warmed = []
    monkeypatch.setattr(served.prefill, "warm_up", lambda *shapes: warmed.extend(shapes))
    impl = vllm_v32.JaxSparseMLABackend.get_impl_cls()(16, 576, 0.05)
    vllm_v32.JaxSparseMLABackend.get_impl_cls()(16, 576, ranks=4)
    assert warmed == [(16, 576), (64, 576)]
    for able, rows, tokens, options, gathered in (
        (True, 256, 512 * 256 - 1, {}, True),
        (True, 255, 255, {}, False),
        (True, 256, 512 * 256, {}, False),
        (False, 256, 256, {}, False),
        (True, 256, 256, {"dcp_world_size": 2}, False),
        (True, 256, 256, {"cache_dtype": "nvfp4_ds_mla"}, False),
    ):
        monkeypatch.setattr(vllm_v32, "is_hopper_s", lambda device, able=able: able)
        lens = {"num_actual_tokens": rows + 2, "seq_lens_cpu_upper_bound": torch.tensor([9000, 9000, tokens])}
        batch = types.SimpleNamespace(**lens)
        made = vllm_v32.JaxSparseMLABackend.get_builder_cls()(**options).build(0, batch)
        found = made.fp8_use_mixed_batch, made.fp8_extra_metadata
        assert found == ((False, "separate") if gathered else (True, "mixed"))
    case = per_request(layout="V32_FP8", heads=16, lengths="none")
    arguments = calls.decode_arguments(case)
    impl.softmax_scale = case.softmax_scale
    metadata = types.SimpleNamespace(scheduler_metadata=flash_mla.FlashMLASchedMeta())
    given = (arguments["q"], arguments["k_cache"][:, :, 0], arguments["indices"], metadata)
    results = impl._fp8_flash_mla_kernel(*given)
    expected = flash_mla.flash_mla_with_kvcache(**arguments | {"attn_sink": None})
    assert all(torch.equal(a, b) for a, b in zip(results, expected))
    small = calls.prefill_arguments(small_prefill(dim=576, heads=16)) | {"attn_sink": None}
    impl.softmax_scale = small["sm_scale"]
    q = torch.nn.functional.pad(small["q"], (0, 0, 0, 48))  # vLLM's buffer has heads for its own kernel
    out, lse = impl._bf16_flash_mla_kernel(q, small["kv"], small["indices"], small["topk_length"], 16)
    expected = flash_mla.flash_mla_sparse_fwd(**small)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[2])
    monkeypatch.setattr(short_prefill, "device_info", lambda device: H200)
    monkeypatch.setattr(short_prefill, "missing", lambda name, phase, device: None)
    monkeypatch.setattr(short_prefill, "sooner_than_prefill", lambda rows, heads, topk, sm_count: True)
    small = calls.prefill_arguments(small_prefill(dim=576, heads=16, sizes=(128, 64), sink=False))
    few = impl._bf16_flash_mla_kernel(small["q"], small["kv"], small["indices"], small["topk_length"])
    assert all(torch.equal(a, b) for a, b in zip(few, short_prefill.decode(**small | {"sm_scale": impl.softmax_scale})))
    monkeypatch.setattr(served, "_off", {DECODE, PREFILL})
    assert (
        impl._fp8_flash_mla_kernel(*given) == impl._bf16_flash_mla_kernel(q, small["kv"], small["indices"]) == "theirs"
    )
    monkeypatch.setattr(Impl, "_fp8_flash_mla_kernel", lambda self, q: None)
    with pytest.raises(ImportError, match="does not suit this vLLM"):
        vllm_v32._check_methods()


# --- both ---------------------------------------------------------------------------------------------------------


def test_the_entry_points_are_these():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for group, plugin in (("vllm.general_plugins", vllm_plugin), ("sglang.srt.plugins", sglang_plugin)):
        (target,) = project["entry-points"][group].values()
        module, _, function = target.partition(":")
        assert sys.modules[module] is plugin and callable(getattr(plugin, function))
        assert not inspect.signature(getattr(plugin, function)).parameters
