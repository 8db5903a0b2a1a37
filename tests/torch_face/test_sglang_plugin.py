"""SGLang's plugin beside stand-ins for what it touches of SGLang; `tests/engines` has the real one."""

from __future__ import annotations

import functools
import logging
import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import drop_in_calls as calls
from attention_calls import small_prefill
from drop_in_calls import check_decode, check_prefill, per_request
from plugin_stubs import fresh, put, refuse  # noqa: F401 - a fixture
from sparse_mla_torch import flash_mla
from sparse_mla_torch.plugins import calls as served
from sparse_mla_torch.plugins import sglang as sglang_plugin
from sparse_mla_torch.plugins import short_prefill

pytestmark = [pytest.mark.torch, pytest.mark.cpu, pytest.mark.usefixtures("fresh")]

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


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
        given["kv"] = given["kv"].double()
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
        ({"k_cache": torch.zeros(3, 64, 1, 352, dtype=torch.uint8)}, "k_cache must be"),
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
