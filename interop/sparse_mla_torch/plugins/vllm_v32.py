"""vLLM's backend for DeepSeek-V3.2 and GLM, FLASHMLA_SPARSE, with our kernels in the place of its two calls.

Imported by vLLM, where the backend was chosen.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)

from jax_sparse_mla.attention.route import GATHERED_FROM_ROWS
from jax_sparse_mla.metadata import select_prefill_backend
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention.prefill import is_hopper_s
from sparse_mla_torch.plugins import calls, short_prefill

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata

calls.log_under("vllm")


class JaxSparseMLAImpl(FlashMLASparseImpl):
    """Heads are not padded for ours. What is left to vLLM's own methods is padded there, as they do it."""

    def __init__(self, num_heads: int, head_size: int, *args: Any, **kwargs: Any):
        super().__init__(num_heads, head_size, *args, **kwargs)
        # Under both context parallelisms a rank prefills the heads of all.
        gathered = self.pcp_dcp_kv_gather and self.dcp_world_size > self.pcp_world_size
        ranks = get_current_vllm_config().parallel_config.tensor_parallel_size if gathered else 1
        calls.warm_up(num_heads * ranks, head_size)

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


class JaxSparseMLAMetadataBuilder(FlashMLASparseMetadataBuilder):
    """Has chunks of prefill gathered for few heads too.

    With fewer than 32 heads of a rank vLLM sends prefill through the decode kernel, as one request's tokens, because
    its prefill pads them to 64. Ours does not.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        is_fp8 = self.vllm_config.cache_config.cache_dtype == "fp8_ds_mla"
        self._may_gather = is_fp8 and self.dcp_world_size == 1 and is_hopper_s(self.device)  # DCP wants each row's lse

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashMLASparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.fp8_use_mixed_batch and self._may_gather and _is_worth_a_gather(common_attn_metadata, metadata):
            metadata.fp8_use_mixed_batch = False
            metadata.fp8_extra_metadata = self._build_fp8_separate_prefill_decode(common_attn_metadata, metadata)
        return metadata


def _is_worth_a_gather(batch: CommonAttentionMetadata, metadata: FlashMLASparseMetadata) -> bool:
    """Whether the prefill's rows are many, also beside the tokens that would be gathered for them."""
    rows = batch.num_actual_tokens - metadata.num_decode_tokens
    tokens = int(batch.seq_lens_cpu_upper_bound[metadata.num_decodes :].sum())
    return rows >= GATHERED_FROM_ROWS and select_prefill_backend(tokens, rows) == "flashmla_sparse"


def _check_methods() -> None:
    """Raises where vLLM's methods take other arguments than ours, before the backend is used."""
    for theirs, ours, names in (
        (FlashMLASparseImpl, JaxSparseMLAImpl, ("_fp8_flash_mla_kernel", "_bf16_flash_mla_kernel")),
        (FlashMLASparseMetadataBuilder, JaxSparseMLAMetadataBuilder, ("build",)),
    ):
        for name in names:
            taken, known = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (theirs, ours))
            if taken != known:
                raise ImportError(f"JAX_SPARSE_MLA does not suit this vLLM: {theirs.__name__}.{name} takes {taken}")


_check_methods()


class JaxSparseMLABackend(FlashMLASparseBackend):
    """Its name stays FLASHMLA_SPARSE, by which vLLM chooses the cache's format and the metadata."""

    @staticmethod
    def get_impl_cls() -> type[JaxSparseMLAImpl]:
        return JaxSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[JaxSparseMLAMetadataBuilder]:
        return JaxSparseMLAMetadataBuilder
