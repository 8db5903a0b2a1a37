"""The indices that attention reads: window slots, merged index lists and top-k transforms.

This package knows slots (page · page_size + offset), not bytes. Everywhere −1 is the canonical invalid index.
"""

from jax_sparse_mla.indices.merge import combine_swa_extra_indices, combine_topk_swa_indices
from jax_sparse_mla.indices.ownership import Ownership, global_topk, local_candidates, select_candidates
from jax_sparse_mla.indices.pools import expand_pools
from jax_sparse_mla.indices.topk.api import TopkTransform, topk_positions, topk_transform
from jax_sparse_mla.indices.window import swa_gather_plan, swa_slots

__all__ = [
    "Ownership",
    "TopkTransform",
    "combine_swa_extra_indices",
    "combine_topk_swa_indices",
    "expand_pools",
    "global_topk",
    "local_candidates",
    "select_candidates",
    "swa_gather_plan",
    "swa_slots",
    "topk_positions",
    "topk_transform",
]
