"""The bytes of paged KV caches: layouts, the quantising writer, the gather, and the page split.

This package knows bytes, not attention. A slot is a token of a paged buffer; a layout says how its K row is stored.
"""

from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.kv_cache.paged import PagedKV, ScaledPagedKV
from jax_sparse_mla.kv_cache.quantize import quantize_ue8m0
from jax_sparse_mla.kv_cache.rows import dequantize_kv, gather_kv, write_kv
from jax_sparse_mla.kv_cache.split import split_pages

__all__ = [
    "KVLayout",
    "PagedKV",
    "ScaledPagedKV",
    "dequantize_kv",
    "gather_kv",
    "quantize_ue8m0",
    "split_pages",
    "write_kv",
]
