"""A device on which few rows of prefill are decoded."""

from __future__ import annotations

import pytest
from attention_calls import H200

from jax_sparse_mla.attention.backend import BACKENDS


@pytest.fixture
def decoded(monkeypatch):
    """As on an H200; the shapes of the caches that decode is asked to read."""
    from sparse_mla_torch import flash_mla
    from sparse_mla_torch.plugins import short_prefill

    asked, decode = [], flash_mla.flash_mla_with_kvcache

    def watched(q, k_cache, *rest):
        asked.append(tuple(k_cache.shape))
        return decode(q, k_cache, *rest)

    monkeypatch.setattr(short_prefill, "device_info", lambda device: H200)
    monkeypatch.setattr(short_prefill, "missing", lambda name, phase, device: BACKENDS[name].wrong_device(device))
    monkeypatch.setattr(short_prefill, "sooner_than_prefill", lambda rows, heads, topk, sm_count: rows < 10)
    monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", watched)
    return asked
