"""FlashMLA's prefill call of few rows, by our decode on SM90: engines make it to decode from bfloat16 caches."""

from __future__ import annotations

import torch

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.hopper.decode_plan import sooner_than_prefill
from jax_sparse_mla.attention.machine import override_of
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention.backends.hopper import are_aligned
from sparse_mla_torch.attention.route import device_info, missing


def decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `flash_mla_sparse_fwd`, without the largest logits; None where a prefill kernel is for the call.

    Args:
      q: bfloat16 `[rows, heads, dim]`.
      kv: bfloat16 `[slots, 1, dim]`.
      indices: int32 `[rows, 1, topk]`.
      sm_scale, attn_sink, topk_length: as in `flash_mla_sparse_fwd`.

    Returns:
      out bfloat16 `[rows, heads, 512]`, and lse float32 `[rows, heads]`, natural log.
    """
    device = device_info(q.device)
    if BACKENDS["hopper"].wrong_device(device) or missing("hopper", "decode"):
        return None
    if not sooner_than_prefill(*q.shape[:2], indices.shape[-1], sm_count=device.sm_count):
        return None
    if override_of("prefill") is not None or override_of("decode") not in (None, "hopper"):
        return None  # a kernel is named
    if kv.dtype != torch.bfloat16 or not are_aligned((q, kv, indices, attn_sink, topk_length)):
        return None  # Triton's decode would serve, which is slower than prefill
    pages = kv.view(torch.uint8).unsqueeze(1)  # of one row
    out, lse = flash_mla.flash_mla_with_kvcache(
        *(q.unsqueeze(1), pages, None, None, 512, flash_mla.get_mla_metadata()[0], None, sm_scale, False, None),
        *(indices, attn_sink, None, None, topk_length),
    )
    return out.squeeze(1), lse.squeeze(-1)
