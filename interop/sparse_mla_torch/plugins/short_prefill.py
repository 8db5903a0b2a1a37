"""FlashMLA's prefill call of few rows, by our decode on SM90: engines make it to decode from bfloat16 caches."""

from __future__ import annotations

import torch

from jax_sparse_mla.attention.hopper.decode_plan import sooner_than_prefill
from jax_sparse_mla.attention.machine import override_of
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention.route import device_info, missing
from sparse_mla_torch.operations.checks import are_aligned


def decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`(out, lse)` of `flash_mla_sparse_fwd`, lse in natural units; None where a prefill kernel is to serve."""
    device = device_info(q.device)
    if missing("hopper", "decode", device):
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
