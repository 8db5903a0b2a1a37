"""Sparse MLA attention: `api` is the public face, `reference` the contract, `route` decides which kernel serves."""

from jax_sparse_mla.attention.api import decode_schedule, sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.extend import sparse_mla_extend
from jax_sparse_mla.attention.merge import apply_attn_sink, merge_attention
from jax_sparse_mla.attention.route import DeviceInfo, Plan, plan_attention
from jax_sparse_mla.attention.schedule import DecodeSchedule, DecodeShape

__all__ = [
    "DecodeSchedule",
    "DecodeShape",
    "DeviceInfo",
    "Plan",
    "apply_attn_sink",
    "decode_schedule",
    "merge_attention",
    "plan_attention",
    "sparse_mla_decode",
    "sparse_mla_extend",
    "sparse_mla_prefill",
]
