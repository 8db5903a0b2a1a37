"""The reference, for CPU tensors and for calls that no kernel serves. JAX computes it, over DLPack."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jax_sparse_mla import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.kv_cache import PagedKV
from sparse_mla_torch.attention.backends import in_base_2
from sparse_mla_torch.attention.call_cache import Results
from sparse_mla_torch.attention.pages import page_rows
from sparse_mla_torch.bridge import call

WRITES_INTO = False
PREFILL_APART = ()


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach().contiguous()


def decode(options, q, layout, tables, has_sink) -> Callable[..., Results]:
    """As `decode.prepare`'s `run`, at one shape."""

    def cache_of(k_cache, table):
        if k_cache is None:
            return None
        return PagedKV(data=page_rows(k_cache, table.layout), layout=table.layout, page_size=table.page_size)

    def run(q, *arguments):
        k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink, _, _ = arguments
        out, lse = call(
            *(sparse_mla_decode, _dense(q), cache_of(k_cache, tables[0]), indices.contiguous()),
            topk_length=_dense(lengths),
            attn_sink=_dense(attn_sink),
            extra_cache=cache_of(extra_k_cache, tables[-1]),
            extra_indices=_dense(extra_indices),
            extra_topk_length=_dense(extra_lengths),
            softmax_scale=options.softmax_scale,
            backend="reference",
            batch_invariant=options.batch_invariant,
        )
        lse = lse.masked_fill(torch.isneginf(lse), options.empty_lse).transpose(1, 2)
        return out.clone(), lse  # JAX's memory is not to be written to

    return run


def prefill(options, q, table, has_sink) -> Callable[..., Results]:
    """As `prefill.prepare`'s `run`, at one shape."""

    def run(q, kv, indices, lengths, attn_sink, into):
        results = call(
            sparse_mla_prefill,
            *(_dense(q), _dense(kv[:, 0]), _dense(indices[:, 0])),
            topk_length=_dense(lengths),
            attn_sink=_dense(attn_sink),
            softmax_scale=options.softmax_scale,
            backend="reference",
        )
        out, max_logits, lse = (x.clone() for x in results)  # JAX's memory is not to be written to
        lse.masked_fill_(torch.isneginf(lse), options.empty_lse)
        return in_base_2((out, max_logits, lse)) if options.log2 else (out, max_logits, lse)

    return run
