"""The calls of each backend on torch tensors, one module a backend (see `attention/route.py`)."""

from __future__ import annotations

from sparse_mla_torch.attention.call_cache import Results

_LOG2_E = 1.4426950408889634


def in_base_2(results: Results) -> Results:
    """`(out, max_logits, lse)` with the statistics in base 2, in place."""
    out, max_logits, lse = results
    return out, max_logits.mul_(_LOG2_E), lse.mul_(_LOG2_E)
