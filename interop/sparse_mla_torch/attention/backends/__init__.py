"""The calls of each backend on torch tensors, one module a backend (see `attention/route.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jax_sparse_mla.attention.index_table import V_DIM
from sparse_mla_torch.attention.call_cache import Results

_LOG2_E = 1.4426950408889634


def into_results(attend: Callable, num_tables: int, shape: tuple[int, int, int]) -> Callable[..., Results]:
    """A decode call that allocates its results or takes them, from one that only takes them.

    Args:
      attend: called with `(q, tables, attn_sink, out, lse)`.
      num_tables: one or two.
      shape: batch, q_len and heads.
    """

    def run(q, k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink, schedule, into):
        q = q.contiguous()
        tables = ((k_cache, indices, lengths), (extra_k_cache, extra_indices, extra_lengths))[:num_tables]
        out, lse = into or (None, None)
        if out is None:
            out = q.new_empty((*shape, V_DIM))
        if lse is None:
            lse = q.new_empty(shape, dtype=torch.float32)
        attend(q, tables, attn_sink, out, lse)
        return out, lse.transpose(1, 2)

    return run


def in_base_2(results: Results) -> Results:
    """`(out, max_logits, lse)` with the statistics in base 2, in place."""
    out, max_logits, lse = results
    return out, max_logits.mul_(_LOG2_E), lse.mul_(_LOG2_E)
