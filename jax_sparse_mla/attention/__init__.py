"""Sparse MLA attention: `api` is the public face, `reference` the contract, `backend` the records, `route` decides."""

from jax_sparse_mla.attention.api import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.context_parallel import context_parallel_decode, cut_pages, own_slots
from jax_sparse_mla.attention.extend import sparse_mla_extend
from jax_sparse_mla.attention.merge import apply_attn_sink, merge_attention
from jax_sparse_mla.attention.probabilities import sparse_mla_prefill_probabilities
from jax_sparse_mla.attention.route import Plan, plan_attention
from jax_sparse_mla.device import DeviceInfo

__all__ = [
    "DeviceInfo",
    "Plan",
    "apply_attn_sink",
    "context_parallel_decode",
    "cut_pages",
    "merge_attention",
    "own_slots",
    "plan_attention",
    "sparse_mla_decode",
    "sparse_mla_extend",
    "sparse_mla_prefill",
    "sparse_mla_prefill_probabilities",
]
