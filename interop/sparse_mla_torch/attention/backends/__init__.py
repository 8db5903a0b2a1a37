"""The calls of each backend on torch tensors, one module a backend (see `attention/route.py`)."""

from __future__ import annotations

import torch

from sparse_mla_torch.attention.call_cache import Results

_LOG2_E = 1.4426950408889634


def heads_apart(q: torch.Tensor) -> int:
    """Heads from one token of `[tokens, heads, values]` to the next; 0 where these are not evenly apart and dense."""
    (tokens, heads, values), (of_token, of_head, of_value) = q.shape, q.stride()
    if of_value != 1 or of_head != values or of_token % values:
        return 0
    return heads if tokens == 1 else of_token // values


def in_base_2(results: Results) -> Results:
    """`(out, max_logits, lse)` with the statistics in base 2, in place."""
    out, max_logits, lse = results
    return out, max_logits.mul_(_LOG2_E), lse.mul_(_LOG2_E)
