"""SGLang's caches of V4.1 on SM90, beside stand-ins for what the plugin touches; `tests/engines` has the real ones."""

from __future__ import annotations

import enum
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import drop_in_calls as calls
from attention_calls import small_decode
from drop_in_calls import check_decode
from plugin_stubs import fresh, put  # noqa: F401 - a fixture
from sparse_mla_torch.plugins import calls as served
from sparse_mla_torch.plugins import sglang as sglang_plugin
from sparse_mla_torch.plugins import sglang_v41
from test_sglang_plugin import DECODE, PREFILL, sglang  # noqa: F401 - a fixture

from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv

pytestmark = [pytest.mark.torch, pytest.mark.cpu, pytest.mark.usefixtures("fresh")]

POOL, GATHER = (module for module, *_ in sglang_v41.HOOKS)
CHOICE = f"{POOL}.select_dsv4_kv_layout"


class Layout(enum.Enum):
    """As SGLang's KVLayout."""

    V41, V41_FP4, V41_NEW, V41_FP4_NEW = "v41", "v41_fp4", "v41_new", "v41_fp4_new"

    @classmethod
    def parse(cls, value):
        return cls(value.lower())


def refuse_the_gpu():
    raise AssertionError("the V4.1 KV cache layouts need an SM100 / SM103 GPU")


def refuse_the_gather(quant_k_cache, page_table_1_flattened, page_size, out=None, layout=Layout.V41):
    raise RuntimeError("requires CUDA SM100 or newer")


@pytest.fixture
def on_sm90(sglang, monkeypatch):  # noqa: F811
    """SGLang, which takes its GPU for one of SM90, with its refusals; the arguments of its attention backend."""
    kernel = types.SimpleNamespace(dsv4_attn_backend="flashmla")
    monkeypatch.setattr(sglang_v41, "_is_sm90", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(sglang_v41.LAYOUT, "v41_new")
    put(
        monkeypatch,
        **{
            **{POOL: {"select_dsv4_kv_layout": refuse_the_gpu}},
            **{GATHER: {"dequantize_k_cache_paged_v41": refuse_the_gather}},
            "sglang.kernels.ops.attention.dsv4.kv_layout": {"KVLayout": Layout},
            "sglang.srt.runtime_context": {"get_exec": lambda: types.SimpleNamespace(kernel=kernel)},
        },
    )
    return types.SimpleNamespace(hooks=sglang.hooks, kernel=kernel)


@pytest.mark.parametrize("mode", ["v41", "V41_New"])
def test_the_layout_that_is_asked_for_is_chosen(on_sm90, monkeypatch, mode):
    monkeypatch.setenv(sglang_v41.LAYOUT, mode)
    sglang_plugin.register()
    choose = on_sm90.hooks[CHOICE]
    assert choose(refuse_the_gpu) == (Layout(mode.lower()), "auto")
    monkeypatch.setenv(sglang_v41.COMPRESSED_LAYOUT, "FP8")
    assert choose(refuse_the_gpu)[1] == "fp8"
    for backend in ("trtllm", "flashmla_mega"):
        on_sm90.kernel.dsv4_attn_backend = backend
        assert choose(lambda: "theirs") == "theirs"


@pytest.mark.parametrize("obstacle", ["no layout", "another GPU", "no GPU", "switch off", "signature"])
def test_otherwise_nothing_is_hooked(on_sm90, monkeypatch, obstacle):
    if obstacle == "no layout":
        monkeypatch.setenv(sglang_v41.LAYOUT, "auto")
    elif obstacle == "another GPU":
        monkeypatch.setattr(sglang_v41, "_is_sm90", lambda: False)
    elif obstacle == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif obstacle == "switch off":
        monkeypatch.setenv(sglang_plugin.SWITCH, "0")
    else:
        monkeypatch.setattr(sys.modules[POOL], "select_dsv4_kv_layout", lambda kind: None)
    sglang_plugin.register()
    decode = {f"{sglang_plugin.MODULE}.{name}" for name in (DECODE, PREFILL)}
    assert set(on_sm90.hooks) == (set() if obstacle in ("switch off", "signature") else decode)


@pytest.mark.parametrize("layout, extra", [("V41_FP8", "V41_FP4"), ("V41_FP8_SPLIT", "V41_FP4_SPLIT")])
def test_decode(on_sm90, sglang, layout, extra):  # noqa: F811
    """The wheel's kernels that SGLang asks for tell the order of bytes."""
    sglang_plugin.register()
    module = sys.modules[sglang_plugin.MODULE]
    put_aside = {name: sglang.hooks.pop(name) for name in (CHOICE, f"{GATHER}.dequantize_k_cache_paged_v41")}
    sglang.apply(module)
    assert len(put_aside) == 2
    case = small_decode(
        layout=layout, extra_layout=extra, extra=(16, 2), page_size=16, lengths="batch", extra_lengths="batch"
    )
    given, legacy = calls.decode_arguments(case), layout.endswith("SPLIT")
    check_decode(case, module.flash_mla_with_kvcache(**given, use_legacy=legacy))
    assert served.counts == {(DECODE, "ours"): 1}
    for others in ({"kv_format": "V32_NO_ROPE"}, {"tile_scheduler_metadata": torch.zeros((132, 8)).int()}):
        assert module.flash_mla_with_kvcache(**given | others, use_legacy=legacy) == ("theirs", legacy)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda x: x.value)
@pytest.mark.parametrize("into", [False, True], ids=["new", "into"])
def test_gather(on_sm90, layout, into):
    """Slots of no token are zeros; the workspace's other rows are left alone."""
    sglang_plugin.register()
    gather = on_sm90.hooks[f"{GATHER}.dequantize_k_cache_paged_v41"]
    ours, page_size = getattr(KVLayout, sglang_v41._OURS[layout.value]), 8
    rng = np.random.default_rng(3)
    pages = rng.integers(0, 120, (5, ours.page_bytes(page_size)), dtype=np.uint8)
    slots = np.array([39, 0, -1, 17, 40, 8], np.int64)
    wanted = gather_kv(PagedKV(data=pages, layout=ours, page_size=page_size), slots.astype(np.int32))
    workspace = torch.full((9, 1, 512), 7, dtype=torch.bfloat16)
    given = torch.from_numpy(pages).view(torch.float8_e4m3fn), torch.from_numpy(slots), page_size
    found = gather(refuse_the_gather, *given, out=workspace[2:8] if into else None, layout=layout)
    assert found.shape == (6, 1, 512) and served.counts == {("dequantize_k_cache_paged_v41", "ours"): 1}
    np.testing.assert_array_equal(found[:, 0].float().numpy(), np.asarray(wanted, np.float32))
    assert not into or (found.data_ptr() == workspace[2].data_ptr() and (workspace[[0, 1, 8]] == 7).all())
