"""vLLM's caches of V4.1 on SM90, beside stand-ins for what the plugin touches; `tests/engines` has the real ones."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl
from attention_calls import small_decode
from drop_in_calls import check_decode, decode_arguments
from plugin_stubs import fresh, put  # noqa: F401 - a fixture
from sparse_mla_torch.plugins import calls as served
from sparse_mla_torch.plugins import vllm_v4, vllm_v41
from triton_device import DEVICE, tensor

pytestmark = [pytest.mark.torch, pytest.mark.no_gpu, pytest.mark.usefixtures("fresh")]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@triton.jit
def convert(low_ptr, high_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, vllm_v41.fp32x2_to_fp4x2(tl.load(low_ptr + at), tl.load(high_ptr + at)))


def test_the_writers_conversion():
    """Nearest, ties to the even code, 6 from there on; a zero keeps its sign. Numbers are ties and next to them."""
    ties = (E2M1[1:] + E2M1[:-1]) / 2
    numbers = np.concatenate([E2M1, ties, [7, 1e30, np.inf, 1e-30]]).astype(np.float32)
    numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(0)), np.nextafter(numbers, np.float32(9))])
    numbers = np.resize(np.concatenate([numbers, -numbers]), 128)
    others = numbers[::-1].copy()
    out = torch.zeros(128, dtype=torch.uint8, device=DEVICE)
    convert[(1,)](tensor(numbers), tensor(others), out, N=128)

    def codes(x):
        distance = np.abs(np.minimum(np.abs(x), 6).astype(np.float64)[:, None] - E2M1)
        odd_last = np.lexsort((np.broadcast_to(np.arange(8) % 2, distance.shape), distance), axis=1)[:, 0]
        return odd_last | (np.signbit(x) << 3)

    np.testing.assert_array_equal(out.cpu().numpy(), codes(numbers) | (codes(others) << 4))


@pytest.fixture
def vllm(monkeypatch):
    """What the plugin replaces of vLLM, on an H200; where it lies."""
    platform = types.SimpleNamespace(is_device_capability_family=lambda family: family == 90)
    attention, writer = {vllm_v41._CHOICE: lambda: False}, {vllm_v41._CONVERSION: "theirs"}
    for name in ("vllm", "vllm.models", "vllm.models.deepseek_v41", "vllm.models.deepseek_v41.common"):
        put(monkeypatch, **{name: {}})
    put(monkeypatch, **{"vllm.models.deepseek_v41.common.ops": {}, "vllm.platforms": {"current_platform": platform}})
    put(monkeypatch, **{vllm_v41._ATTENTION: attention, vllm_v41._WRITER: writer})
    return types.SimpleNamespace(
        platform=platform, attention=sys.modules[vllm_v41._ATTENTION], writer=sys.modules[vllm_v41._WRITER]
    )


def config(dtype: str):
    return types.SimpleNamespace(cache_config=types.SimpleNamespace(cache_dtype=dtype))


def test_the_records_are_kept_where_they_are_asked_for(vllm):
    vllm_v41.use_records(config("fp8_ds_mla"))
    assert not vllm.attention._use_v41_mxfp8_kv_record() and vllm.writer._fp32x2_to_fp4x2 == "theirs"
    vllm_v41.use_records(config("nvfp4_ds_mla"))
    assert vllm.attention._use_v41_mxfp8_kv_record()
    assert vllm.writer._fp32x2_to_fp4x2 is vllm_v41.fp32x2_to_fp4x2


@pytest.mark.parametrize("obstacle", ["another GPU", "another vLLM"])
def test_otherwise_nothing_is_replaced(vllm, obstacle):
    if obstacle == "another GPU":
        vllm.platform.is_device_capability_family = lambda family: family == 100
        vllm_v41.use_records(config("nvfp4_ds_mla"))
    else:
        del vllm.writer._fp32x2_to_fp4x2
        with pytest.raises(AttributeError, match="_fp32x2_to_fp4x2"):
            vllm_v41.use_records(config("nvfp4_ds_mla"))
    assert not vllm.attention._use_v41_mxfp8_kv_record()


def test_the_layer_decodes_from_them():
    options = {"extra": (16, 2), "page_size": 16, "lengths": "batch", "extra_lengths": "batch"}
    case = small_decode(layout="V41_FP8", extra_layout="V41_FP4", **options)
    results = vllm_v4._serve("flash_mla_with_kvcache", None, **decode_arguments(case))
    check_decode(case, results)
    assert served.counts == {("flash_mla_with_kvcache", "ours"): 1}
