"""The FlashMLA backend without a GPU: the adapter and the custom call, over stand-ins for the vendor's operators.

`flashmla_stub.py` registers operators of the vendors' schemas with torch; the same host code that calls FlashMLA on a
GPU calls them here, on XLA's CPU buffers. The backend goes through the tests that every backend goes through; what
only this one has follows. On a GPU `test_attention.py` runs the real kernels.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")

import flashmla_stub as stub  # noqa: E402
import test_attention  # noqa: E402
from attention_calls import (  # noqa: E402
    H200,
    OVERRIDES,
    assert_same,
    check_decode,
    check_prefill,
    decode_arguments,
    prefill_arguments,
    run_decode,
    run_prefill,
    small_decode,
    small_prefill,
)
from attention_oracle import INT_MAX, INT_MIN  # noqa: E402

from jax_sparse_mla import ffi  # noqa: E402
from jax_sparse_mla.attention import DeviceInfo, api, decode_schedule, flashmla, sparse_mla_decode  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cpu,
    pytest.mark.skipif(ffi.compiler() is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def libraries():
    return stub.register()


@pytest.fixture
def namespace() -> str:
    return "stub_flash_mla"


@pytest.fixture(autouse=True)
def pretend_h200(monkeypatch, libraries, namespace):
    """An H200 with one of the vendors' libraries."""
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    library = flashmla._Library(namespace, log2_prefill=namespace == "stub_sgl_kernel")
    monkeypatch.setattr(flashmla, "_library", lambda: library)
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: H200))
    monkeypatch.setattr(api, "installed_backends", lambda: frozenset({"reference", "flashmla"}))
    jax.clear_caches()  # what was traced calls the other library
    stub.CALLS.clear()


@pytest.fixture
def backend() -> str:
    return "flashmla"


class TestOverSglFlashMla(test_attention.TestSparseMLA):
    """All that backends share."""


class TestOverSglangKernel:
    """Another schema, and statistics in base 2."""

    @pytest.fixture
    def namespace(self) -> str:
        return "stub_sgl_kernel"

    @pytest.mark.parametrize("seed", range(2))
    def test_it_equals_the_oracle(self, seed):
        for case in (small_decode(seed), small_decode(seed, extra=(16, 2)), small_decode(seed, layout="V32_FP8")):
            check_decode(case, run_decode(case, "flashmla"))
        case = small_prefill(seed)
        check_prefill(case, run_prefill(case, "flashmla"))
