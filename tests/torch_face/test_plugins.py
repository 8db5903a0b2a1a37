"""The engines' plugins beside stand-ins for what they touch of vLLM and SGLang; `tests/engines` has the real ones."""

from __future__ import annotations

import enum
import functools
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
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.plugins import calls as served
from sparse_mla_torch.plugins import sglang as sglang_plugin
from sparse_mla_torch.plugins import short_prefill
from sparse_mla_torch.plugins import vllm as vllm_plugin

pytestmark = [pytest.mark.torch, pytest.mark.cpu]

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in ("counts", "_said", "_off"):
        monkeypatch.setattr(served, name, type(getattr(served, name))())
    monkeypatch.setattr(served, "log", logging.getLogger("plugins"))
    monkeypatch.setattr(sglang_plugin, "_registered", [])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # who waits for a module waits there
    monkeypatch.delenv("JAX_SPARSE_MLA_PLUGIN_STRICT", raising=False)
    call_cache.forget()
    yield
    call_cache.forget()


def put(monkeypatch, **modules: dict) -> None:
    """Modules of these names and contents; `__` in a name is a dot."""
    for name, contents in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


# --- who serves a call --------------------------------------------------------------------------------------------


def refuse(error):
    def ours():
        raise error

    return ours


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
    assert list(Backends.__members__) == ["FLASHMLA_SPARSE", "JAX_SPARSE_MLA"] and len(sys.meta_path) == before + 1
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

    def __init__(self, num_heads, head_size, *args):
        pass

    def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
        assert q.shape[2] == 16  # it pads, in its own way
        return "theirs"

    def _bf16_flash_mla_kernel(
        self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None, actual_num_heads=None, out=None
    ):
        return "theirs"


def test_the_v32_class(vllm, monkeypatch):
    module = {"FlashMLASparseBackend": type("Backend", (), {}), "FlashMLASparseImpl": Impl}
    put(monkeypatch, vllm__v1__attention__backends__mla={})
    put(monkeypatch, vllm__v1__attention__backends__mla__flashmla_sparse=module)
    monkeypatch.delitem(sys.modules, "sparse_mla_torch.plugins.vllm_v32", raising=False)
    from sparse_mla_torch.plugins import vllm_v32

    monkeypatch.delitem(sys.modules, "sparse_mla_torch.plugins.vllm_v32")
    warmed = []
    monkeypatch.setattr(served.prefill, "warm_up", lambda *shapes: warmed.extend(shapes))
    impl = vllm_v32.JaxSparseMLABackend.get_impl_cls()(16, 576, 0.05)
    assert warmed == [(16, 576)]
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


# --- SGLang -------------------------------------------------------------------------------------------------------


class Hooks:
    """As SGLang's HookRegistry and HookType."""

    AROUND = "around"

    def __init__(self):
        self.hooks = {}

    def register(self, target, hook, kind):
        assert kind == self.AROUND and target not in self.hooks
        self.hooks[target] = hook

    def apply(self, module):
        for target, hook in self.hooks.items():
            name = target.rpartition(".")[2]
            original = getattr(module, name)
            setattr(module, name, functools.wraps(original)(functools.partial(hook, original)))


def sglang_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, kv_format=None, *,
    use_legacy=True,
):  # fmt: skip
    return "theirs", use_legacy


def sglang_prefill(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, *, use_legacy=True):
    return "theirs", use_legacy


@pytest.fixture
def sglang(monkeypatch):
    monkeypatch.setenv(sglang_plugin.SWITCH, "1")
    hooks = Hooks()
    packages = ["sglang", "sglang.srt", "sglang.srt.plugins", "sglang.kernels", "sglang.kernels.ops"]
    for name in (*packages, "sglang.kernels.ops.attention"):
        put(monkeypatch, **{name: {}})
    put(monkeypatch, sglang__version={"__version__": "0.5.23"})
    put(monkeypatch, sglang__srt__plugins__hook_registry={"HookRegistry": hooks, "HookType": Hooks})
    put(monkeypatch, **{sglang_plugin.MODULE: {DECODE: sglang_decode, PREFILL: sglang_prefill}})
    return hooks


def test_sglang_asks_ours_first(sglang):
    """In SGLang's order of arguments, with its schedule tensors."""
    for _ in range(2):
        sglang_plugin.register()
    module = sys.modules[sglang_plugin.MODULE]
    sglang.apply(module)
    case = per_request(layout="V32_FP8", topk=64, lengths="row")
    given = calls.decode_arguments(case)
    results = module.flash_mla_with_kvcache(
        *(given["q"], given["k_cache"].view(torch.float8_e4m3fn), given["indices"][:, 0], torch.zeros(3), 512),
        *(torch.zeros((132, 8), dtype=torch.int32), torch.zeros(4, dtype=torch.int32), case.softmax_scale, False),
        *(None, None, True, given["indices"], given["attn_sink"], None, None, given["topk_length"], None, "V32"),
        use_legacy=True,
    )
    check_decode(case, results)
    small = small_prefill()
    arguments = calls.prefill_arguments(small)
    base_2 = module.flash_mla_sparse_fwd(**arguments, use_legacy=True)
    natural = module.flash_mla_sparse_fwd(**arguments, use_legacy=False)
    check_prefill(small, natural)
    torch.testing.assert_close(base_2[2], natural[2] / 0.6931471805599453)
    assert served.counts == {(DECODE, "ours"): 1, (PREFILL, "ours"): 2}


def fresh_class(cls: type) -> type:
    """The same class anew: SGLang's are changed."""
    return type(cls.__name__, cls.__bases__, dict(vars(cls)))


class PaddingBackend:
    """As SGLang's of V3.2: the heads of a rank become 64, of which it takes its own from the output."""

    num_dcp_q_heads, kv_lora_rank, qk_rope_head_dim = 16, 512, 64

    def _forward_flashmla_sparse(
        self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None, attn_sink=None
    ):
        padded = torch.nn.functional.pad(q_all, (0, 0, 0, 64 - q_all.shape[1]))
        prefill = sys.modules[sglang_plugin.MODULE].flash_mla_sparse_fwd
        indices, lengths = page_table_1.unsqueeze(1), topk_length
        out, _ = prefill(q=padded, kv=kv_cache, indices=indices, sm_scale=sm_scale, topk_length=lengths)
        return out

    def _forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
        q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        padded = q.new_zeros(len(q), 1, 64, layer.head_dim)
        padded[:, :, : q.shape[2]] = q
        decode = sys.modules[sglang_plugin.MODULE].flash_mla_with_kvcache
        rest = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": torch.zeros((132, 8)).int()}
        rest |= {"head_dim_v": v_head_dim, "softmax_scale": sm_scale, "is_fp8_kvcache": True, "kv_format": "V32"}
        out, _ = decode(q=padded, k_cache=kv_cache, indices=page_table_1.unsqueeze(1), **rest)
        return out if isinstance(out, str) else out[:, :, : q.shape[2]]


@pytest.mark.parametrize("served_by", ["ours", "theirs"])
def test_ours_computes_no_head_that_sglang_pads(sglang, monkeypatch, served_by):
    case = per_request(layout="V32_FP8", topk=64, heads=16, q_len=1, lengths="none", sink=False)
    backend = fresh_class(PaddingBackend)
    put(monkeypatch, **{sglang_plugin.V32_BACKEND: {"DeepseekSparseAttnBackend": backend}})
    sglang_plugin.register()
    sglang.apply(sys.modules[sglang_plugin.MODULE])
    heads, decode = [], flash_mla.flash_mla_with_kvcache

    def ours(q, *args, **kwargs):
        heads.append(q.shape[2])
        if served_by == "theirs":
            raise ValueError("ours refuses this")
        return decode(q, *args, **kwargs)

    monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", ours)
    given = calls.decode_arguments(case)
    layer = types.SimpleNamespace(tp_q_head_num=16, head_dim=576)
    arguments = given["q"].flatten(1), given["k_cache"], 512, case.softmax_scale, layer, None, given["indices"][:, 0]
    out = backend()._forward_flashmla_kv(*arguments)
    assert heads == [16] and sglang_plugin._unpadded.q is None
    if served_by == "ours":
        calls.assert_close_flashmla(calls.array(out), calls.decode_oracle(case)[0], "decode.out")
    else:
        assert out == "theirs"


@pytest.mark.parametrize("lengths", ["as many", "others"])
@pytest.mark.parametrize("served_by", ["ours", "theirs"])
def test_v32s_prefill_is_asked_before_sglang_pads_it(sglang, monkeypatch, served_by, lengths):
    backend = fresh_class(PaddingBackend)
    put(monkeypatch, **{sglang_plugin.V32_BACKEND: {"DeepseekSparseAttnBackend": backend}})
    sglang_plugin.register()
    sglang.apply(sys.modules[sglang_plugin.MODULE])
    heads, prefill = [], flash_mla.flash_mla_sparse_fwd

    def ours(q, *args, **kwargs):
        heads.append(q.shape[1])
        if served_by == "theirs":
            raise ValueError("ours refuses this")
        return prefill(q, *args, **kwargs)

    monkeypatch.setattr(flash_mla, "flash_mla_sparse_fwd", ours)
    given = calls.prefill_arguments(small_prefill(dim=576, heads=16)) | {"attn_sink": None}
    q, kv, indices, lens = (given[name] for name in ("q", "kv", "indices", "topk_length"))
    wanted = lens if lengths == "as many" else None
    lens = lens if lengths == "as many" else lens[1:]
    out = backend()._forward_flashmla_sparse(q, kv, 512, indices[:, 0], given["sm_scale"], lens)
    assert heads == [16] and not sglang_plugin._unpadded.left
    assert served.counts == {(PREFILL, "ours" if served_by == "ours" else "refused"): 1}
    if served_by == "ours":
        wanted = prefill(**given | {"topk_length": wanted})[0]  # without lengths NaN beyond them
        torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    else:
        assert out == "theirs"


class V4Backend:
    """As SGLang's of V4: the model has padded the heads, and takes its own from what is given back."""

    def __init__(self, model_runner=None):
        self.model_runner = model_runner

    def forward(self, q, k, v, layer, forward_batch, *args, **kwargs):
        if "kv" in kwargs:
            return sys.modules[sglang_plugin.MODULE].flash_mla_sparse_fwd(q=q, **kwargs)[0]
        return sys.modules[sglang_plugin.MODULE].flash_mla_with_kvcache(q=q, **kwargs)[0]


@pytest.mark.parametrize("served_by", ["ours", "theirs"])
def test_v4s_prefill_has_no_head_that_sglang_pads_but_room_for_it(sglang, monkeypatch, served_by):
    backend = fresh_class(V4Backend)
    put(monkeypatch, **{sglang_plugin.V4_BACKEND: {"DeepseekV4AttnBackend": backend}})
    sglang_plugin.register()
    sglang.apply(sys.modules[sglang_plugin.MODULE])
    given = calls.prefill_arguments(small_prefill(heads=16))
    wanted = flash_mla.flash_mla_sparse_fwd(**given)[0]
    q = torch.full((len(given["q"]), 64, 512), torch.nan, dtype=torch.bfloat16)  # SGLang's padding is not written
    q[:, :16] = given.pop("q")
    given["attn_sink"] = torch.nn.functional.pad(given["attn_sink"], (0, 48))
    if served_by == "theirs":
        given["kv"] = given["kv"].float()
    batch = types.SimpleNamespace(forward_mode=types.SimpleNamespace(is_decode=lambda: False))
    out = backend().forward(q, None, None, types.SimpleNamespace(tp_q_head_num=16), batch, **given)
    if served_by == "ours":
        assert out.shape == (len(q), 64, 512) and torch.equal(out[:, :16], wanted)
    else:
        assert out == "theirs"


def test_sglangs_backends_warm_prefill_up(sglang, monkeypatch):
    warmed, parallel = [], types.SimpleNamespace(attn_tp_size=8)
    monkeypatch.setattr(served.prefill, "warm_up", lambda *shapes: warmed.extend(shapes))
    v32, v4 = fresh_class(PaddingBackend), fresh_class(V4Backend)
    put(monkeypatch, **{sglang_plugin.V32_BACKEND: {"DeepseekSparseAttnBackend": v32}})
    put(
        monkeypatch,
        **{sglang_plugin.V4_BACKEND: {"DeepseekV4AttnBackend": v4, "get_parallel": lambda: parallel}},
    )
    sglang_plugin.register()
    v32()
    v4(types.SimpleNamespace(model_config=types.SimpleNamespace(num_attention_heads=64, head_dim=512)))
    assert warmed == [(16, 576), (8, 512)]
    v4(None)  # whatever goes wrong, SGLang's backend is made
    monkeypatch.setattr(served.prefill, "warm_up", refuse(RuntimeError("no compiler")))
    v32()
    assert len(warmed) == 2


@pytest.mark.parametrize(
    ("rows", "is_decode", "heads", "asked"), [(9, True, 4, 4), (9, False, 4, 16), (3, True, 4, 16), (9, True, 16, 16)]
)
def test_ours_computes_no_head_of_v4_that_sglang_pads(sglang, monkeypatch, rows, is_decode, heads, asked):
    """Where the copy of the queries is worth while, in a decode: a graph of an extend wants all heads back."""
    backend = fresh_class(V4Backend)
    put(monkeypatch, **{sglang_plugin.V4_BACKEND: {"DeepseekV4AttnBackend": backend}})
    sglang_plugin.register()
    sglang.apply(sys.modules[sglang_plugin.MODULE])
    case = per_request(heads=16, batch=rows, q_len=1)
    given = calls.decode_arguments(case)
    mode = types.SimpleNamespace(is_decode=lambda: is_decode)
    layer, batch = types.SimpleNamespace(tp_q_head_num=heads), types.SimpleNamespace(forward_mode=mode)
    out = backend().forward(given.pop("q"), None, None, layer, batch, **given)
    assert out.shape[2] == asked and served.counts == {(DECODE, "ours"): 1} and sglang_plugin._unpadded.heads is None
    wanted = calls.decode_oracle(case)[0][:, :, :asked]
    calls.assert_close_flashmla(calls.array(out), wanted, "decode.out")


@pytest.mark.parametrize(
    ("module", "backend", "method"),
    [
        (sglang_plugin.V32_BACKEND, "DeepseekSparseAttnBackend", "_forward_flashmla_kv"),
        (sglang_plugin.V4_BACKEND, "DeepseekV4AttnBackend", "forward"),
    ],
)
def test_a_decode_that_takes_other_arguments_keeps_its_padding(sglang, monkeypatch, caplog, module, backend, method):
    def theirs(self, q):
        return q

    other = type("Other", (), {method: theirs})
    put(monkeypatch, **{module: {backend: other}})
    sglang_plugin.register()
    assert getattr(other, method) is theirs and len(sglang.hooks) == 2
    assert any("takes self, q" in x.getMessage() for x in caplog.records)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"indices": None}, "dense decode"),
        ({"kv_format": "V32_NO_ROPE"}, "kv_format"),
        ({"k_cache": torch.zeros(3, 64, 1, 528, dtype=torch.uint8)}, "k_cache must be"),
        ({"descale_q": torch.ones(1)}, "descale_q"),
    ],
)
def test_what_ours_does_not_serve_is_sglangs(sglang, caplog, changes, reason):
    sglang_plugin.register()
    module = sys.modules[sglang_plugin.MODULE]
    sglang.apply(module)
    arguments = calls.decode_arguments(per_request()) | changes
    for _ in range(2):
        assert module.flash_mla_with_kvcache(**arguments, use_legacy=False) == ("theirs", False)
    said = [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]
    assert len(said) == 1 and reason in said[0]


@pytest.mark.parametrize("obstacle", ["unset", "version", "signature", "absent", "no wheel"])
def test_another_sglang_is_left_alone(sglang, monkeypatch, caplog, obstacle):
    if obstacle == "unset":
        monkeypatch.setenv(sglang_plugin.SWITCH, "0")
    elif obstacle == "version":
        monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.6.0")
    elif obstacle == "signature":
        monkeypatch.setattr(sys.modules[sglang_plugin.MODULE], DECODE, lambda q, cache: None)
    elif obstacle == "absent":
        monkeypatch.setitem(sys.modules, "sglang", None)
        monkeypatch.setitem(sys.modules, "sglang.version", None)
    else:
        monkeypatch.setitem(sys.modules, sglang_plugin.MODULE, None)
    sglang_plugin.register()
    assert not sglang.hooks and len(caplog.records) == (obstacle != "unset")


def test_the_engines_have_few_rows_decoded(decoded, sglang, monkeypatch):
    sglang_plugin.register()
    sglang.apply(sys.modules[sglang_plugin.MODULE])
    given = calls.prefill_arguments(small_prefill(dim=576, heads=16, sizes=(128, 64)))
    out, lse = short_prefill.decode(**given)
    for use_legacy in (True, False):
        found = sys.modules[sglang_plugin.MODULE].flash_mla_sparse_fwd(**given, use_legacy=use_legacy)
        assert torch.equal(found[0], out) and found[1] is None
        torch.testing.assert_close(found[2] * (0.6931471805599453 if use_legacy else 1), lse)
    assert len(decoded) == 3 and served.counts == {(PREFILL, "ours"): 2}


def test_the_entry_points_are_these():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for group, plugin in (("vllm.general_plugins", vllm_plugin), ("sglang.srt.plugins", sglang_plugin)):
        (target,) = project["entry-points"][group].values()
        module, _, function = target.partition(":")
        assert sys.modules[module] is plugin and callable(getattr(plugin, function))
        assert not inspect.signature(getattr(plugin, function)).parameters
