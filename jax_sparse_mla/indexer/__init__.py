"""The indexer: its keys, their logits, and the selection of the entries that a query attends to."""

from jax_sparse_mla.indexer.candidates import candidate_blocks, index_topk_and_blocks, index_topk_in_blocks
from jax_sparse_mla.indexer.contiguous import contiguous_index_logits
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import (
    IndexKeys,
    gather_index_k,
    hadamard_transform,
    index_logits,
    quantize_index_q,
    write_index_k,
    write_transformed_index_k,
)
from jax_sparse_mla.indexer.select import index_topk

__all__ = [
    "IndexFormat",
    "IndexKeys",
    "candidate_blocks",
    "contiguous_index_logits",
    "gather_index_k",
    "hadamard_transform",
    "index_logits",
    "index_topk",
    "index_topk_and_blocks",
    "index_topk_in_blocks",
    "quantize_index_q",
    "write_index_k",
    "write_transformed_index_k",
]
