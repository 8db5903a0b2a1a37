"""Top-k selection and its transforms: `api` is the public face, `route` chooses the kernel."""

from jax_sparse_mla.indices.topk.api import TopkTransform, topk_positions, topk_transform

__all__ = ["TopkTransform", "topk_positions", "topk_transform"]
