"""The PyTorch face of jax_sparse_mla: tensors are exchanged without a copy, and transformers models run through it.

`flash_mla` stands in for FlashMLA's module; `ops` has the same kernels as operators for `torch.compile`
(`torch.ops.jax_sparse_mla.*`); `kernels` launches them into an engine's own buffers. `bridge` exchanges tensors with
JAX; `hf` replaces the attention of a transformers DeepSeek-V3.2 or V4 model and serves it from paged caches
(`jax-sparse-mla generate`).
"""

from sparse_mla_torch import flash_mla, ops
from sparse_mla_torch.bridge import call, to_jax, to_torch

__all__ = ["call", "flash_mla", "ops", "to_jax", "to_torch"]
