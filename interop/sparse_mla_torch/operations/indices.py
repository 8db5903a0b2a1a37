"""The index merges on torch tensors."""

from __future__ import annotations

from torch import Tensor

from jax_sparse_mla.indices import triton as kernels
from jax_sparse_mla.indices.merge import check_swa_extra, check_topk_swa, check_topk_swa_sizes, merged_width
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks


def combine_swa_extra_indices(
    swa_indices: Tensor,
    swa_lengths: Tensor,
    extra_indices: Tensor,
    extra_lengths: Tensor,
    num_swa_rows: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch's `jax_sparse_mla.combine_swa_extra_indices`; `num_swa_rows` has one element.

    `out` are `(indices, lengths)`, int32 `[T, width]` and `[T]`.
    """
    check = TensorChecks("combine_swa_extra_indices", swa_indices)
    lists = check_swa_extra(check, swa_indices, swa_lengths, extra_indices, extra_lengths)
    check("num_swa_rows", num_swa_rows.reshape(-1), (1,))
    n, width = len(swa_indices), merged_width(check.dims["Ws"] + check.dims["We"])
    out = check.outs(out, (n, width), (n,))
    if n and width:
        kernels.combine_swa_extra(executor(swa_indices.device), *lists, num_swa_rows, width=width, out=out)
    return out


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    query_pos: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    compressed_base: Tensor,
    swa_base: Tensor,
    *,
    window: int,
    compress_ratio: int,
    topk: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch's `jax_sparse_mla.combine_topk_swa_indices`; `out` as in `combine_swa_extra_indices`, of N rows."""
    check = TensorChecks("combine_topk_swa_indices", topk_indices)
    requests = query_start_loc, seq_lens, gather_lens, compressed_base, swa_base
    check_topk_swa(check, topk_indices, query_pos, requests)
    window, compress_ratio, topk = check_topk_swa_sizes(check, window, compress_ratio, topk)
    n, width = len(topk_indices), merged_width(topk + window)
    out = check.outs(out, (n, width), (n,))
    if n:
        kernels.combine_topk_swa(
            *(executor(topk_indices.device), topk_indices, query_pos, *requests),
            window=window,
            compress_ratio=compress_ratio,
            topk=topk,
            width=width,
            out=out,
        )
    return out
