"""How the tests of the torch face call it: cases as tensors in FlashMLA's shapes, and who serves them.

On a GPU the backends are the real ones. Without, "reference" serves CPU tensors, and the others take CPU tensors as if
they were an H200's: "triton" runs in Triton's interpreter, "flashmla" calls `flashmla_stub`'s operators, "hopper"
`hopper_stub`'s library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import flashmla_stub
import numpy as np
import pytest
import torch
from attention_calls import H200, OVERRIDES, small_decode
from attention_oracle import assert_close_flashmla, decode_oracle, prefill_oracle
from hopper_stub import library
from layout_oracle import RECORDS
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.attention import decode as torch_decode
from sparse_mla_torch.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from triton_device import ON_GPU, tensor

from jax_sparse_mla.attention.backends import flashmla as jax_flashmla
from jax_sparse_mla.launch import build

BACKENDS = ("hopper", "triton", "flashmla") if ON_GPU else ("reference", "triton", "flashmla")
ALL_BACKENDS = BACKENDS if ON_GPU else (*BACKENDS, "hopper")
WIDTH = {"V32_FP8": 656, "V4_FP8": 584, "V32_BF16": 1152, "V4_BF16": 1024}
WIDTH |= {name: record.value_bytes + record.scale_bytes for name, record in RECORDS.items()}


@contextlib.contextmanager
def served_by(backend: str, monkeypatch):
    """All calls go to this backend; "hopper" is for decode alone here."""
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(f"JAX_SPARSE_MLA_{'DECODE_' if backend == 'hopper' else ''}BACKEND", backend)
    if not ON_GPU and backend != "reference":
        monkeypatch.setattr(route, "device_info", lambda device: H200)
        monkeypatch.setattr(build, "module", lambda kernel, arch: library())
        there = ("reference", "triton", "flashmla", "hopper")
        monkeypatch.setattr(route, "missing", lambda name, *_: None if name in there else "not installed")
    elif why := route.missing(backend, "decode", route.device_info(torch.device("cuda" if ON_GPU else "cpu"))):
        pytest.skip(f"{backend}: {why}")
    call_cache.forget()
    yield
    call_cache.forget()


@contextlib.contextmanager
def served_with_stand_ins(backend: str, monkeypatch):
    """`served_by`, with stand-ins for FlashMLA's operators where there is no GPU."""
    if not ON_GPU:
        flashmla_stub.register()
        monkeypatch.setattr(jax_flashmla, "library", lambda: jax_flashmla.Library("stub_flash_mla", log2_prefill=False))
    flashmla_stub.CALLS.clear()
    with served_by(backend, monkeypatch):
        yield backend


def optional(x: np.ndarray | None) -> torch.Tensor | None:
    return None if x is None else tensor(x)


def pages(host) -> torch.Tensor | None:
    """The cache as FlashMLA takes it; a page's padding is in the stride."""
    if host is None:
        return None
    data, width = tensor(host.data), WIDTH[host.layout]
    return data.as_strided((len(data), host.page_size, 1, width), (data.shape[1], width, width, 1))


def decode_arguments(case) -> dict:
    """Keyword arguments of `flash_mla_with_kvcache`."""
    return {
        "q": tensor(case.q),
        "k_cache": pages(case.cache),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "softmax_scale": case.softmax_scale,
        "is_fp8_kvcache": True,
        "indices": tensor(case.indices),
        "attn_sink": optional(case.attn_sink),
        "extra_k_cache": pages(case.extra_cache),
        "extra_indices_in_kvcache": optional(case.extra_indices),
        "topk_length": optional(case.topk_length),
        "extra_topk_length": optional(case.extra_topk_length),
    }


def prefill_arguments(case) -> dict:
    """Keyword arguments of `flash_mla_sparse_fwd`."""
    return {
        "q": tensor(case.q),
        "kv": tensor(case.kv)[:, None],
        "indices": tensor(case.indices)[:, None],
        "sm_scale": case.softmax_scale,
        "attn_sink": optional(case.attn_sink),
        "topk_length": optional(case.topk_length),
    }


def array(x: torch.Tensor) -> np.ndarray:
    return x.float().cpu().numpy()


def check_decode(case, results) -> None:
    """Against the oracle, in FlashMLA's conventions."""
    out, lse = decode_oracle(case)
    batch, q_len, heads, _ = case.q.shape
    assert results[0].shape == (batch, q_len, heads, 512) and results[0].dtype == torch.bfloat16
    assert results[1].shape == (batch, heads, q_len) and results[1].dtype == torch.float32
    assert_close_flashmla(array(results[0]), out, "decode.out")
    assert_close_flashmla(array(results[1]), np.where(np.isneginf(lse), np.inf, lse).transpose(0, 2, 1), "decode.lse")


def check_prefill(case, results) -> None:
    out, max_logits, lse = prefill_oracle(case)
    rows, heads, _ = case.q.shape
    assert results[0].shape == (rows, heads, 512) and results[0].dtype == torch.bfloat16
    assert all(x.shape == (rows, heads) and x.dtype == torch.float32 for x in results[1:])
    assert_close_flashmla(array(results[0]), out, "prefill.out")
    assert_close_flashmla(array(results[1]), max_logits, "prefill.max_logits")
    assert_close_flashmla(array(results[2]), np.where(np.isneginf(lse), np.inf, lse), "prefill.lse")


def decode(case, **changes):
    return flash_mla_with_kvcache(**decode_arguments(case) | changes)


def decode_by_name(case, batch_invariant: bool = False):
    """A case whose layout the bytes of its rows do not tell, with FlashMLA's lse."""
    names = ("topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", "attn_sink")
    given = decode_arguments(case)
    tensors = (given["q"], given["k_cache"], given["indices"], *(given[name] for name in names))
    facts = {"batch_invariant": batch_invariant, "kv_layout": case.cache.layout}
    options = torch_decode.Options("decode_by_name", case.softmax_scale, np.inf, **facts)
    return torch_decode.prepare(options, *tensors).run(*tensors, None, None)


def prefill(case, **changes):
    return flash_mla_sparse_fwd(**prefill_arguments(case) | changes)


def per_request(seed: int = 0, **setting):
    """A small case whose lengths are as FlashMLA takes them: [batch]."""
    return small_decode(seed, **{"lengths": "batch", "extra_lengths": "batch"} | setting)


def valid_case(**setting):
    """What FlashMLA itself takes: −1 or a slot, no lengths beyond the columns, no sink that makes NaN of its own."""
    case = per_request(topk=64, extra=(64, 2), lengths="none", extra_lengths="none", heads=64, **setting)
    changes = {"attn_sink": np.where(case.attn_sink < -1e38, -np.inf, case.attn_sink).astype(np.float32)}
    for prefix, cache in (("", case.cache), ("extra_", case.extra_cache)):
        indices = getattr(case, f"{prefix}indices")
        exists = (indices >= 0) & (indices < len(cache.rows))
        changes[f"{prefix}indices"] = np.where(exists, indices, -1)
    return dataclasses.replace(case, **changes)


def python(script: str) -> subprocess.CompletedProcess:
    root = Path(__file__).resolve().parents[2]
    paths = (str(root), str(root / "interop"), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
