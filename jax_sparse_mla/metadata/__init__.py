"""The metadata of a forward step: built once, shared by all layers.

`ForwardBatch` and `RequestTables` hold what the engine knows. `build_v32_metadata`, `build_v4_metadata` and, for V4
prefill, `build_prefill_plan` turn them into lengths, page tables, indices and write slots, one for each query row.
`draft_step_batch` takes one step out of a multi-step draft. The schedules split a kernel's work over a device, and the
selection functions hold the engine's rules.
"""

from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.metadata.draft import draft_step_batch
from jax_sparse_mla.metadata.prefill_plan import PrefillPlan, build_prefill_plan
from jax_sparse_mla.metadata.schedules import flashmla_schedule, paged_mqa_schedule
from jax_sparse_mla.metadata.selection import select_prefill_backend, select_topk_transform
from jax_sparse_mla.metadata.v4 import CompressedMetadata, V4Metadata, build_v4_metadata
from jax_sparse_mla.metadata.v32 import V32Metadata, build_v32_metadata

__all__ = [
    "CompressedMetadata",
    "ForwardBatch",
    "ForwardMode",
    "PrefillPlan",
    "RequestTables",
    "V4Metadata",
    "V32Metadata",
    "build_prefill_plan",
    "build_v4_metadata",
    "build_v32_metadata",
    "draft_step_batch",
    "flashmla_schedule",
    "paged_mqa_schedule",
    "select_prefill_backend",
    "select_topk_transform",
]
