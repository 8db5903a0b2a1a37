"""The compressor of DeepSeek-V4 and V4.1, and KPool: tokens become fewer rows."""

from jax_sparse_mla.compressor.api import compress_kv
from jax_sparse_mla.compressor.pools import pool_keys
from jax_sparse_mla.compressor.state import CompressorState, compressor_window

__all__ = ["CompressorState", "compress_kv", "compressor_window", "pool_keys"]
