"""sparse_mla_decode and sparse_mla_prefill: what `attention_conformance.py` asks, of every backend here.

A backend joins by being installed. What only the reference promises (float32, gradients, memory) is in
`test_attention_reference.py`; argument checks, overrides and schedules in `test_attention_arguments.py`.
"""

from __future__ import annotations

import pytest
from attention_conformance import SparseMLAConformance

from jax_sparse_mla.attention.machine import installed_for


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name == "reference" else [pytest.mark.gpu])
        for name in sorted(installed_for("decode") | installed_for("prefill"))
    ]
)
def backend(request) -> str:
    return request.param


class TestSparseMLA(SparseMLAConformance):
    """All that backends share."""
