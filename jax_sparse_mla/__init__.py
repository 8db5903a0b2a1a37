"""Sparse multi-head latent attention (MLA) for DeepSeek-V3.2 and DeepSeek-V4, in JAX."""

from jax_sparse_mla import debug
from jax_sparse_mla.attention import (
    DeviceInfo,
    Plan,
    apply_attn_sink,
    merge_attention,
    plan_attention,
    sparse_mla_decode,
    sparse_mla_extend,
    sparse_mla_prefill,
)
from jax_sparse_mla.compressor import CompressorState, compress_kv
from jax_sparse_mla.indexer import index_logits, index_topk, write_index_k
from jax_sparse_mla.indices import (
    TopkTransform,
    combine_swa_extra_indices,
    combine_topk_swa_indices,
    swa_gather_plan,
    swa_slots,
    topk_positions,
    topk_transform,
)
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, dequantize_kv, gather_kv, quantize_ue8m0, split_pages, write_kv
from jax_sparse_mla.metadata import (
    ForwardBatch,
    ForwardMode,
    PrefillPlan,
    RequestTables,
    V4Metadata,
    V32Metadata,
    build_prefill_plan,
    build_v4_metadata,
    build_v32_metadata,
    draft_step_batch,
    flashmla_schedule,
    paged_mqa_schedule,
    select_prefill_backend,
    select_topk_transform,
)
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, DEEPSEEK_V32, ModelSpec

__version__ = "0.1.0"

__all__ = [
    "DEEPSEEK_V4_FLASH",
    "DEEPSEEK_V4_PRO",
    "DEEPSEEK_V32",
    "CompressorState",
    "DeviceInfo",
    "ForwardBatch",
    "ForwardMode",
    "KVLayout",
    "ModelSpec",
    "PagedKV",
    "Plan",
    "PrefillPlan",
    "RequestTables",
    "TopkTransform",
    "V4Metadata",
    "V32Metadata",
    "apply_attn_sink",
    "build_prefill_plan",
    "build_v4_metadata",
    "build_v32_metadata",
    "combine_swa_extra_indices",
    "combine_topk_swa_indices",
    "compress_kv",
    "debug",
    "dequantize_kv",
    "draft_step_batch",
    "flashmla_schedule",
    "gather_kv",
    "index_logits",
    "index_topk",
    "merge_attention",
    "paged_mqa_schedule",
    "plan_attention",
    "quantize_ue8m0",
    "select_prefill_backend",
    "select_topk_transform",
    "sparse_mla_decode",
    "sparse_mla_extend",
    "sparse_mla_prefill",
    "split_pages",
    "swa_gather_plan",
    "swa_slots",
    "topk_positions",
    "topk_transform",
    "write_index_k",
    "write_kv",
]
