"""The attention functions refuse bad input by name; overrides of the route."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import (
    H200,
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


def decode_input() -> dict:
    return decode_arguments(small_decode(extra=(16, 2)))


def prefill_input() -> dict:
    return prefill_arguments(small_prefill())


def test_extra_arguments_need_an_extra_cache():
    arguments = decode_arguments(small_decode())
    for name in ("extra_indices", "extra_topk_length"):
        with pytest.raises(ValueError, match=f"sparse_mla_decode: {name} was given without extra_cache"):
            sparse_mla_decode(**arguments | {name: np.zeros((3, 2, 16), np.int32)})


def test_a_sink_is_float32():
    """`tests/contract/test_bad_input.py` has every array of every function with other dtypes, ranks and sizes."""
    for function, arguments in ((sparse_mla_decode, decode_input()), (sparse_mla_prefill, prefill_input())):
        with pytest.raises(TypeError, match=f"^{function.__name__}: .*attn_sink"):
            function(**arguments | {"attn_sink": np.zeros(4, BF16)})


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
