"""The PyTorch face of jax_sparse_mla: tensors cross over without a copy, and transformers models run through it.

`bridge` exchanges tensors; `hf` replaces the attention of a transformers DeepSeek-V3.2 or V4 model and serves it
from paged caches (`jax-sparse-mla generate`).
"""

from sparse_mla_torch.bridge import call, to_jax, to_torch

__all__ = ["call", "to_jax", "to_torch"]
