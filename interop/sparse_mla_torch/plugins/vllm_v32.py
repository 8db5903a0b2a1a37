"""vLLM's backend for DeepSeek-V3.2 and GLM, FLASHMLA_SPARSE, with our kernels in the place of its two calls.

Imported by vLLM, where the backend was chosen.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl

from sparse_mla_torch import flash_mla
from sparse_mla_torch.plugins import calls, short_prefill

calls.log_under("vllm")


class JaxSparseMLAImpl(FlashMLASparseImpl):
    """Heads are not padded for ours. What is left to vLLM's own methods is padded there, as they do it."""

    def __init__(self, num_heads: int, head_size: int, *args: Any, **kwargs: Any):
        super().__init__(num_heads, head_size, *args, **kwargs)
        calls.warm_up(num_heads, head_size)

    def _fp8_flash_mla_kernel(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, topk_indices: torch.Tensor, kernel_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata)

        def ours() -> tuple[torch.Tensor, torch.Tensor]:
            return flash_mla.flash_mla_with_kvcache(
                *(q, kv_c_and_k_pe_cache.unsqueeze(-2), None, None, 512, kernel_metadata.scheduler_metadata, None),
                *(self.softmax_scale, False, True, topk_indices),
                beside_flashmla=True,
            )

        theirs = super()._fp8_flash_mla_kernel
        return calls.ours_or_theirs("flash_mla_with_kvcache", ours, lambda: theirs(*arguments))

    def _bf16_flash_mla_kernel(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_length: torch.Tensor | None = None,
        actual_num_heads: int | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` has the padded heads of vLLM's kernel; a result elsewhere will do."""
        arguments = (q, kv_c_and_k_pe_cache, topk_indices, topk_length, actual_num_heads, out)

        def ours() -> tuple[torch.Tensor, torch.Tensor]:
            kv = kv_c_and_k_pe_cache.view(-1, 1, kv_c_and_k_pe_cache.shape[-1])
            heads = q.shape[1] if actual_num_heads is None else actual_num_heads
            prefill = q[:, :heads], kv, topk_indices.view(len(q), 1, -1), self.softmax_scale
            if decoded := short_prefill.decode(*prefill, topk_length=topk_length):
                return decoded
            result, _, lse = flash_mla.flash_mla_sparse_fwd(*prefill, topk_length=topk_length, beside_flashmla=True)
            return result, lse

        theirs = super()._bf16_flash_mla_kernel
        return calls.ours_or_theirs("flash_mla_sparse_fwd", ours, lambda: theirs(*arguments))


def _check_methods() -> None:
    """Raises where vLLM's methods take other arguments than ours, before the backend is used."""
    for name in ("_fp8_flash_mla_kernel", "_bf16_flash_mla_kernel"):
        methods = (getattr(cls, name) for cls in (FlashMLASparseImpl, JaxSparseMLAImpl))
        theirs, ours = (list(inspect.signature(method).parameters) for method in methods)
        if theirs != ours:
            raise ImportError(f"JAX_SPARSE_MLA does not suit this vLLM: FlashMLASparseImpl.{name} takes {theirs}")


_check_methods()


class JaxSparseMLABackend(FlashMLASparseBackend):
    """Its name stays FLASHMLA_SPARSE, by which vLLM chooses the cache's format and the metadata."""

    @staticmethod
    def get_impl_cls() -> type[JaxSparseMLAImpl]:
        return JaxSparseMLAImpl
