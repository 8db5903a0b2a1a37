"""Merging partial attention results on torch tensors, in one launch."""

from __future__ import annotations

from torch import Tensor

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS
from jax_sparse_mla.attention.triton import merge as kernels
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks


def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's `jax_sparse_mla.merge_attention` of stacked parts: outs `[parts, ..., heads, v_dim]`."""
    check = TensorChecks("merge_attention", outs)
    check("outs", outs, (None,) * max(outs.dim(), 3), FLOATS)
    check("lses", lses, outs.shape[:-1], FLOAT32)
    if len(outs) == 0:
        raise check.fail("outs must have at least one part")
    if not outs.numel():
        return outs.new_empty(outs.shape[1:]), lses.logsumexp(0)
    return kernels.merge(executor(outs.device), outs, lses)


def apply_attn_sink(out: Tensor, lse: Tensor, attn_sink: Tensor) -> Tensor:
    """Torch's `jax_sparse_mla.apply_attn_sink`."""
    check = TensorChecks("apply_attn_sink", out)
    check("out", out, (None,) * max(out.dim(), 2), FLOATS)
    check("lse", lse, out.shape[:-1], FLOAT32)
    check("attn_sink", attn_sink, (out.shape[-2],), FLOAT32)
    return kernels.merge(executor(out.device), out[None], lse[None], attn_sink)[0] if out.numel() else out.clone()
