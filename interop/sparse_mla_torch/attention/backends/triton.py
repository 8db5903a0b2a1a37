"""Our Triton kernel on torch tensors: both phases, any layout that it reads, any head count."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jax_sparse_mla.kernels.triton.sparse_mla.plan import V_DIM
from jax_sparse_mla.kv_cache.layout import workspace_layout
from sparse_mla_torch.attention.backends import in_base_2, into_results
from sparse_mla_torch.attention.call_cache import Results

WRITES_INTO = True


def decode(options, q, layout, scopes, has_sink) -> Callable[..., Results]:
    """As `decode.prepare`'s `run`, at one shape."""
    from sparse_mla_torch.kernels.sparse_mla import Attention

    batch, q_len, heads, _ = q.shape
    attend = Attention(
        layout,
        batch * q_len,
        heads,
        tuple(scopes),
        options.softmax_scale,
        has_sink,
        q.device,
        empty_is_inf=options.empty_lse > 0,
        may_split=not options.batch_invariant,
    )
    return into_results(attend, len(scopes), (batch, q_len, heads))


def prefill(options, q, scope, has_sink) -> Callable[..., Results]:
    """As `prefill.prepare`'s `run`, at one shape."""
    from sparse_mla_torch.kernels.sparse_mla import Attention

    q_len, heads, qk_dim = q.shape
    attend = Attention(
        *(workspace_layout(qk_dim), q_len, heads, (scope,)),
        options.softmax_scale,
        has_sink,
        q.device,
        empty_is_inf=options.empty_lse > 0,
        may_split=False,
    )

    def run(q, kv, indices, lengths, attn_sink, into):
        if into is None:
            out = q.new_empty((q_len, heads, V_DIM))
            into = (out, *(q.new_empty((q_len, heads), dtype=torch.float32) for _ in range(2)))
        out, max_logits, lse = into
        attend(q, [(kv, indices, lengths)], attn_sink, out, lse, max_logits)
        return in_base_2(into) if options.log2 else into

    return run
