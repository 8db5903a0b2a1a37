"""sparse_mla_decode and sparse_mla_prefill: what `attention_conformance.py` asks, of every backend here.

A backend joins by being installed. What only the reference promises (float32, gradients, memory) is in
`test_attention_reference.py`; argument checks, overrides and schedules in `test_attention_arguments.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from attention_calls import OVERRIDES, small_decode
from attention_conformance import SparseMLAConformance
from attention_oracle import QK_DIM

from jax_sparse_mla.attention.machine import installed_backends


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name == "reference" else [pytest.mark.gpu])
        for name in sorted(installed_backends())
    ]
)
def backend(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)


class TestSparseMLA(SparseMLAConformance):
    """All that backends share."""


def test_the_oracle_reads_every_layout():
    """The oracle's own bytes: what it packed is what it reads back, and nothing of a packed row is poison."""
    for layout in QK_DIM:
        case = small_decode(layout=layout)
        live = ~np.isnan(case.cache.rows).all(axis=1)
        assert live.any() and not live.all()
        assert np.isfinite(case.cache.rows[live]).all()
        assert 0.05 < case.cache.rows[live].std() < 0.15
