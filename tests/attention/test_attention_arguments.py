"""The attention functions refuse bad input by name; overrides of the route."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import (
    H200,
    OVERRIDES,
    assert_same,
    decode_arguments,
    prefill_arguments,
    pretend_installed,
    small_decode,
    small_prefill,
)
from attention_oracle import BF16

from jax_sparse_mla.attention import (
    DeviceInfo,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from jax_sparse_mla.kv_cache import KVLayout, PagedKV


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)


def decode_input() -> dict:
    return decode_arguments(small_decode(extra=(16, 2)))


def prefill_input() -> dict:
    return prefill_arguments(small_prefill())


def zeros(*shape, dtype=np.int32) -> np.ndarray:
    return np.zeros(shape, dtype)


def bf16(*shape) -> np.ndarray:
    return np.zeros(shape, BF16)


def cache_of(of: KVLayout = KVLayout.V4_FP8, **changes) -> PagedKV:
    """A cache of two pages, with fields that may not fit."""
    good = {"data": zeros(2, of.page_bytes(64), dtype=np.uint8), "layout": of, "page_size": 64}
    return PagedKV(**good | changes)


# (what is given, the exception, the argument that the message names)
BAD_DECODE = [
    ({"q": bf16(3, 2, 512)}, ValueError, "q"),
    ({"q": bf16(3, 2, 4, 576)}, ValueError, "q"),
    ({"q": zeros(3, 2, 4, 512, dtype=np.float16)}, TypeError, "q"),
    ({"q": None}, TypeError, "q"),
    ({"cache": None}, TypeError, "cache"),
    ({"cache": zeros(2, 64 * 584, dtype=np.uint8)}, TypeError, "cache"),
    ({"cache": cache_of(data=zeros(2, 64 * 584, dtype=np.int8))}, TypeError, "cache.data"),
    ({"cache": cache_of(data=zeros(2, 64 * 584 + 1, dtype=np.uint8))}, ValueError, "cache.data"),
    ({"cache": cache_of(data=zeros(64 * 584, dtype=np.uint8))}, ValueError, "cache.data"),
    ({"cache": cache_of(page_size=32)}, ValueError, "cache.data"),
    ({"cache": cache_of(page_size=0)}, ValueError, "cache.page_size"),
    ({"cache": cache_of(layout="V4_FP8")}, TypeError, "cache.layout"),
    ({"cache": cache_of(KVLayout.V32_FP8)}, ValueError, "q"),
    ({"indices": zeros(3, 16)}, ValueError, "indices"),
    ({"indices": zeros(2, 2, 16)}, ValueError, "indices"),
    ({"indices": zeros(3, 1, 16)}, ValueError, "indices"),
    ({"indices": zeros(3, 2, 16, dtype=np.float32)}, TypeError, "indices"),
    ({"indices": np.zeros((3, 2, 16), np.int64)}, TypeError, "indices"),
    ({"indices": None}, TypeError, "indices"),
    ({"topk_length": zeros(2)}, ValueError, "topk_length"),
    ({"topk_length": zeros()}, ValueError, "topk_length"),
    ({"topk_length": zeros(3, 1)}, ValueError, "topk_length"),
    ({"topk_length": zeros(3, 2, 1)}, ValueError, "topk_length"),
    ({"topk_length": zeros(3, dtype=np.float32)}, TypeError, "topk_length"),
    ({"topk_length": np.zeros((3, 2), np.int64)}, TypeError, "topk_length"),
    ({"extra_cache": None}, ValueError, "extra_indices"),
    ({"extra_cache": None, "extra_indices": None}, ValueError, "extra_topk_length"),
    ({"extra_cache": 1}, TypeError, "extra_cache"),
    ({"extra_cache": cache_of(KVLayout.V4_BF16)}, ValueError, "extra_cache"),
    ({"extra_cache": cache_of(data=zeros(2, 7, dtype=np.uint8))}, ValueError, "extra_cache.data"),
    ({"extra_indices": None}, TypeError, "extra_indices"),
    ({"extra_indices": zeros(3, 16)}, ValueError, "extra_indices"),
    ({"extra_indices": zeros(3, 1, 16)}, ValueError, "extra_indices"),
    ({"extra_indices": zeros(3, 2, 16, dtype=np.uint32)}, TypeError, "extra_indices"),
    ({"extra_topk_length": zeros(4)}, ValueError, "extra_topk_length"),
    ({"extra_topk_length": zeros(2, 3)}, ValueError, "extra_topk_length"),
    ({"extra_topk_length": zeros(3, dtype=bool)}, TypeError, "extra_topk_length"),
    ({"attn_sink": zeros(5, dtype=np.float32)}, ValueError, "attn_sink"),
    ({"attn_sink": zeros(1, 4, dtype=np.float32)}, ValueError, "attn_sink"),
    ({"attn_sink": bf16(4)}, TypeError, "attn_sink"),
    ({"softmax_scale": None}, TypeError, "softmax_scale"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale"),
    ({"softmax_scale": np.ones(4)}, TypeError, "softmax_scale"),
    ({"backend": "cutlass"}, ValueError, "backend"),
]

BAD_PREFILL = [
    ({"q": bf16(1, 6, 4, 512)}, ValueError, "q"),
    ({"q": zeros(6, 4, 512)}, TypeError, "q"),
    ({"kv": bf16(40, 1, 512)}, ValueError, "kv"),
    ({"kv": bf16(40, 576)}, ValueError, "kv"),
    ({"kv": zeros(40, 512, dtype=np.uint8)}, TypeError, "kv"),
    ({"kv": cache_of()}, TypeError, "kv"),
    ({"indices": zeros(6, 1, 16)}, ValueError, "indices"),
    ({"indices": zeros(5, 16)}, ValueError, "indices"),
    ({"indices": np.zeros((6, 16), np.int64)}, TypeError, "indices"),
    ({"topk_length": zeros(5)}, ValueError, "topk_length"),
    ({"topk_length": zeros(6, 1)}, ValueError, "topk_length"),
    ({"topk_length": zeros(6, dtype=np.float32)}, TypeError, "topk_length"),
    ({"attn_sink": zeros(3, dtype=np.float32)}, ValueError, "attn_sink"),
    ({"attn_sink": bf16(4)}, TypeError, "attn_sink"),
    ({"softmax_scale": None}, TypeError, "softmax_scale"),
    ({"backend": "cutlass"}, ValueError, "backend"),
]


def bad_ids(table) -> list[str]:
    return [f"{i}-{'+'.join(change)}" for i, (change, _, _) in enumerate(table)]


class TestArguments:
    """Dtypes raise TypeError, shapes and static misuse ValueError; both name function and argument."""

    @pytest.mark.parametrize("change, error, name", BAD_DECODE, ids=bad_ids(BAD_DECODE))
    def test_bad_decode_input(self, change, error, name):
        with pytest.raises(error, match=rf"^sparse_mla_decode: .*?\b{re.escape(name)}\b"):
            sparse_mla_decode(**decode_input() | change)

    @pytest.mark.parametrize("change, error, name", BAD_PREFILL, ids=bad_ids(BAD_PREFILL))
    def test_bad_prefill_input(self, change, error, name):
        with pytest.raises(error, match=rf"^sparse_mla_prefill: .*?\b{re.escape(name)}\b"):
            sparse_mla_prefill(**prefill_input() | change)

    def test_extra_arguments_need_an_extra_cache(self):
        arguments = decode_arguments(small_decode())
        for name in ("extra_indices", "extra_topk_length"):
            with pytest.raises(ValueError, match=f"sparse_mla_decode: {name} was given without extra_cache"):
                sparse_mla_decode(**arguments | {name: zeros(3, 2, 16)})

    def test_errors_come_while_tracing(self):
        arguments = prefill_input()
        scale = arguments.pop("softmax_scale")
        jitted = jax.jit(lambda arguments: sparse_mla_prefill(**arguments, softmax_scale=scale))
        with pytest.raises(ValueError, match="sparse_mla_prefill: indices"):
            jax.eval_shape(jitted, arguments | {"indices": zeros(5, 16)})
        with pytest.raises(TypeError, match="sparse_mla_prefill: softmax_scale must be a static number"):
            jax.eval_shape(lambda x: sparse_mla_prefill(**arguments, softmax_scale=x), 0.5)


class TestOverrides:
    """JAX_SPARSE_MLA_BACKEND and its two variants by phase, read while tracing."""

    @pytest.fixture(autouse=True)
    def on_a_cpu(self, monkeypatch):
        monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: cls("cpu")))

    @staticmethod
    def decode():
        return sparse_mla_decode(**decode_input())

    @staticmethod
    def prefill():
        return sparse_mla_prefill(**prefill_input())

    def test_the_reference_by_name(self, monkeypatch):
        expected = self.decode(), self.prefill()
        monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")
        assert_same((self.decode(), self.prefill()), expected)

    @pytest.mark.parametrize("name", ["flashmla", "hopper", "triton", "flashinfer"])
    def test_a_backend_that_cannot_run_is_refused_with_the_reason(self, monkeypatch, name):
        monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", name)
        reason = f"backend '{name}' cannot serve this {{}} call: (not installed|needs a CUDA device)"
        with pytest.raises(ValueError, match="sparse_mla_decode: .*" + reason.format("decode")):
            self.decode()
        with pytest.raises(ValueError, match="sparse_mla_prefill: .*" + reason.format("prefill")):
            self.prefill()

    @pytest.mark.parametrize("name", ["cutlass", "Reference", " "])
    def test_an_unknown_backend_is_refused(self, monkeypatch, name):
        monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", name)
        for call in (self.decode, self.prefill):
            with pytest.raises(ValueError, match=f"backend must be one of .*reference.*got '{name}'"):
                call()

    @pytest.mark.parametrize(
        "variables, refused",
        [
            ({"DECODE_BACKEND": "flashmla"}, "decode"),
            ({"PREFILL_BACKEND": "flashmla"}, "prefill"),
            ({"BACKEND": "flashmla", "DECODE_BACKEND": "reference"}, "prefill"),
            ({"BACKEND": ""}, None),
        ],
        ids=str,
    )
    def test_the_phase_s_own_goes_before_the_common_one(self, monkeypatch, variables, refused):
        for name, value in variables.items():
            monkeypatch.setenv(f"JAX_SPARSE_MLA_{name}", value)
        for phase in ("decode", "prefill"):
            if phase == refused:
                with pytest.raises(ValueError, match="flashmla"):
                    getattr(self, phase)()
            else:
                getattr(self, phase)()

    def test_an_argument_goes_before_the_environment(self, monkeypatch):
        monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "flashmla")
        sparse_mla_decode(**decode_input(), backend="reference")
        with pytest.raises(ValueError, match="triton"):
            sparse_mla_prefill(**prefill_input(), backend="triton")

    @pytest.mark.parametrize("name", ["q", "kv"])
    def test_float32_goes_to_the_reference_wherever_it_runs(self, monkeypatch, name):
        arguments = prefill_input()
        arguments[name] = arguments[name].astype(jnp.float32)
        expected = sparse_mla_prefill(**arguments)
        monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: H200))
        pretend_installed(monkeypatch, "hopper", "triton")
        assert_same(sparse_mla_prefill(**arguments), expected)

    def test_float32_is_the_reference_s(self, monkeypatch):
        arguments = prefill_input()
        arguments["q"] = arguments["q"].astype(jnp.float32)
        monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "triton")
        with pytest.raises(ValueError, match="float32 inputs are served by the reference only"):
            sparse_mla_prefill(**arguments)
