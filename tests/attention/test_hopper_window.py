"""The window kernel on a GPU: short rows, against float64 and, to the bit, against the kernel of many rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import attention_calls
import drop_in_calls
from sparse_mla_torch.attention import decode as torch_decode

from jax_sparse_mla.attention import sparse_mla_decode
from jax_sparse_mla.attention.hopper.decode_plan import IN_WINDOW
from jax_sparse_mla.attention.machine import installed_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif("hopper" not in installed_for("decode"), reason="needs an SM90 GPU and the CUDA kernel"),
]

LAYOUTS = ["V4_FP8", "V41_FP8", "V41_FP8_SPLIT", "V4_BF16"]
# Of one multiprocessor and of several waves of them; lengths, holes, slots outside the cache and rows without keys.
SIZES = [
    {"batch": 1, "q_len": 1, "heads": 64},
    {"batch": 32, "q_len": 1, "heads": 128, "page_size": 256},
    {"batch": 32, "q_len": 1, "heads": 128, "lengths": "none", "hot": True},
    {"batch": 70, "q_len": 2, "heads": 64, "lengths": "batch", "topk": 100},
    {"batch": 150, "q_len": 1, "heads": 70, "topk": 65, "sink": False, "hot": True},
    {"batch": 9, "q_len": 1, "heads": 1, "topk": 64, "page_size": 61},
    {"batch": 5, "q_len": 3, "heads": 16, "topk": 1, "page_size": 1},
    {"batch": 20, "q_len": 1, "heads": 8, "rows": "none"},
]


def attend(case, monkeypatch, *, window: bool) -> list[torch.Tensor]:
    """By torch, into results that are NaN before. `served_by` forgets which kernel the last call was prepared for."""
    names = ("topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", "attn_sink")
    given = drop_in_calls.decode_arguments(case)
    tensors = (given["q"], given["k_cache"], given["indices"], *(given[name] for name in names))
    options = torch_decode.Options("short rows", case.softmax_scale, np.inf, kv_layout=case.cache.layout)
    out = torch.full((*case.q.shape[:3], 512), torch.nan, dtype=torch.bfloat16, device=tensors[0].device)
    lse = torch.full(case.q.shape[:3], torch.nan, device=tensors[0].device)
    with monkeypatch.context() as patch, drop_in_calls.served_by("hopper", patch):
        made = attention_calls.by_decode_kernel(None, patch, window=window)
        results = torch_decode.prepare(options, *tensors).run(*tensors, None, (out, lse))
    assert [plan.cuts == IN_WINDOW for plan in made] == [window]
    return [x.clone() for x in results]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(len(SIZES)))
def test_rows_of_any_length(layout, seed, monkeypatch):
    case = attention_calls.small_decode(seed, **{"layout": layout, "topk": 128} | SIZES[seed])
    results = attend(case, monkeypatch, window=True)
    drop_in_calls.check_decode(case, results)
    for _ in range(3):
        for a, b in zip(attend(case, monkeypatch, window=True), results):
            assert torch.equal(a, b)
    for a, b in zip(attend(case, monkeypatch, window=False), results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_jax(layout, monkeypatch):
    case = attention_calls.small_decode(3, layout=layout, topk=128, batch=40, heads=70)
    made = attention_calls.by_decode_kernel(None, monkeypatch, window=True)
    jax.clear_caches()
    arguments = attention_calls.decode_arguments(case)
    attention_calls.check_decode(case, sparse_mla_decode(**arguments, backend="hopper"))
    jax.clear_caches()
    assert [plan.cuts for plan in made] == [IN_WINDOW]
