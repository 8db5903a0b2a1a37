"""The rules that choose a top-k transform and a prefill kernel."""

import itertools

import numpy as np
import pytest

from jax_sparse_mla.indices.topk.api import TopkTransform
from jax_sparse_mla.metadata.batch import ForwardMode
from jax_sparse_mla.metadata.selection import select_prefill_backend, select_topk_transform


@pytest.mark.parametrize(
    ("mode", "fp8", "backend"),
    itertools.product(ForwardMode, (True, False), ("flashmla_sparse", "flashmla_kv")),
)
def test_ragged_in_exactly_one_case(mode, fp8, backend):
    got = select_topk_transform(mode, fp8_kv_cache=fp8, prefill_backend=backend)
    ragged = (mode, fp8, backend) == (ForwardMode.EXTEND, True, "flashmla_sparse")
    assert got is (TopkTransform.RAGGED if ragged else TopkTransform.PAGED)


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("backend", ["trtllm", "flashmla_auto", "", None, 3])
def test_other_backends_are_refused_in_every_mode(mode, backend):
    with pytest.raises(ValueError, match=r"select_topk_transform: prefill_backend .*flashmla_kv"):
        select_topk_transform(mode, fp8_kv_cache=True, prefill_backend=backend)


def test_wrong_types_are_refused_by_name():
    with pytest.raises(TypeError, match="forward_mode"):
        select_topk_transform("extend", fp8_kv_cache=True, prefill_backend="flashmla_sparse")
    with pytest.raises(TypeError, match="fp8_kv_cache"):
        select_topk_transform(ForwardMode.EXTEND, fp8_kv_cache=1, prefill_backend="flashmla_sparse")


@pytest.mark.parametrize(
    ("kv", "q", "want"),
    [
        (0, 0, "flashmla_kv"),
        (0, 1, "flashmla_sparse"),
        (511, 1, "flashmla_sparse"),
        (512, 1, "flashmla_kv"),
        (512 * 4096 - 1, 4096, "flashmla_sparse"),
        (512 * 4096, 4096, "flashmla_kv"),
        (2**40, 2**32, "flashmla_sparse"),
    ],
)
def test_prefill_backend_threshold(kv, q, want):
    assert select_prefill_backend(kv, q) == want


def test_prefill_backend_takes_numpy_ints_and_refuses_the_rest():
    assert select_prefill_backend(np.int64(100), np.int32(1)) == "flashmla_sparse"
    with pytest.raises(TypeError, match="total_kv_tokens"):
        select_prefill_backend(1.5, 1)
    with pytest.raises(TypeError, match="total_q_tokens"):
        select_prefill_backend(1, True)
    with pytest.raises(ValueError, match="total_q_tokens"):
        select_prefill_backend(1, -1)
