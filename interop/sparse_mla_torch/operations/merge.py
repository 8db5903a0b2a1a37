"""Merging partial attention results on torch tensors, on the current stream, in one launch."""

from __future__ import annotations

import torch

from jax_sparse_mla.attention.triton import merge as kernels
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import FLOAT32, FLOATS, check_tensor


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.merge_attention`.

    Args:
      outs: the parts, stacked: bfloat16 or float32 `[parts, ..., heads, v_dim]`, contiguous.
      lses: float32 `[parts, ..., heads]`, contiguous; −inf where a part has no valid key.

    Returns:
      out `[..., heads, v_dim]` and lse float32 `[..., heads]`.

    Raises:
      TypeError: a tensor of another dtype.
      ValueError: no parts, a tensor of another shape, not contiguous, or on another device.
    """
    function = "merge_attention"
    check_tensor(function, "outs", outs, (None,) * max(outs.dim(), 3), outs, FLOATS)
    check_tensor(function, "lses", lses, tuple(outs.shape[:-1]), outs, FLOAT32)
    if len(outs) == 0:
        raise ValueError(f"{function}: outs must have at least one part")
    if not outs.numel():
        return outs.new_empty(outs.shape[1:]), lses.logsumexp(0)
    return kernels.merge(executor(outs.device), outs, lses)


def apply_attn_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """As `jax_sparse_mla.apply_attn_sink`; out `[..., heads, v_dim]`, lse `[..., heads]`, attn_sink `[heads]`.

    Raises:
      TypeError: a tensor of another dtype.
      ValueError: a tensor of another shape, not contiguous, or on another device.
    """
    function = "apply_attn_sink"
    check_tensor(function, "out", out, (None,) * max(out.dim(), 2), out, FLOATS)
    check_tensor(function, "lse", lse, tuple(out.shape[:-1]), out, FLOAT32)
    check_tensor(function, "attn_sink", attn_sink, (out.shape[-2],), out, FLOAT32)
    return kernels.merge(executor(out.device), out[None], lse[None], attn_sink)[0] if out.numel() else out.clone()
