"""The heads' probabilities for each index, summed, on torch tensors."""

from __future__ import annotations

from torch import Tensor

from jax_sparse_mla.argument_checks import BF16, FLOAT32
from jax_sparse_mla.attention.triton import backward as kernels
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks, check_scale


def sparse_mla_prefill_probabilities(
    q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, *, softmax_scale: float, topk_length: Tensor | None = None
) -> Tensor:
    """Torch's `jax_sparse_mla.sparse_mla_prefill_probabilities`, of bfloat16 q and kv."""
    check = TensorChecks("sparse_mla_prefill_probabilities", q)
    rows, heads, qk_dim = check("q", q, (None,) * 3, BF16).shape
    if qk_dim not in (512, 576):
        raise check.fail(f"q must have rows of 512 or 576 values, got {qk_dim}")
    check("kv", kv, (None, qk_dim), BF16)
    check("indices", indices, (rows, None))
    check("lse", lse, (rows, heads), FLOAT32)
    check.optional("topk_length", topk_length, (rows,))
    scale = check_scale(check.function, softmax_scale)
    if 0 in (q.numel(), kv.numel(), indices.numel()):
        return lse.new_zeros(indices.shape)
    return kernels.probabilities(executor(q.device), q, kv, indices, topk_length, lse, softmax_scale=scale)
