"""The index merges on torch tensors, by the rules of `jax_sparse_mla.indices`, on the current stream."""

from __future__ import annotations

import torch

from jax_sparse_mla.indices import triton as kernels
from jax_sparse_mla.indices.merge import merged_width
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import check_tensor, output_or_new


def combine_swa_extra_indices(
    swa_indices: torch.Tensor,
    swa_lengths: torch.Tensor,
    extra_indices: torch.Tensor,
    extra_lengths: torch.Tensor,
    num_swa_rows: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.combine_swa_extra_indices`; all arguments int32 and contiguous, `num_swa_rows` of one element.

    Args:
      out: `(indices, lengths)` to write into, int32 `[T, width]` and `[T]`; allocated by default.

    Raises:
      TypeError: a tensor that is not int32.
      ValueError: a tensor of another shape, not contiguous, or on another device.
    """
    function, (n, swa_width), extra_width = "combine_swa_extra_indices", swa_indices.shape, extra_indices.shape[1]
    width = merged_width(swa_width + extra_width)
    out = _outputs(function, out, n, width, swa_indices)
    for name, x, shape in (
        ("swa_indices", swa_indices, (n, swa_width)),
        ("swa_lengths", swa_lengths, (n,)),
        ("extra_indices", extra_indices, (n, extra_width)),
        ("extra_lengths", extra_lengths, (n,)),
        ("num_swa_rows", num_swa_rows.reshape(-1), (1,)),
    ):
        check_tensor(function, name, x, shape, swa_indices)
    if n and width:
        arrays = swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows
        kernels.combine_swa_extra(executor(swa_indices.device), *arrays, width=width, out=out)
    return out


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_pos: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    compressed_base: torch.Tensor,
    swa_base: torch.Tensor,
    *,
    window: int,
    compress_ratio: int,
    topk: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.combine_topk_swa_indices`; all tensors int32 and contiguous.

    Args:
      out: `(indices, lengths)` to write into, int32 `[N, width]` and `[N]`; allocated by default.

    Raises:
      TypeError: a tensor that is not int32.
      ValueError: a tensor of another shape, not contiguous, or on another device; a static argument out of range.
    """
    function, (n, columns), requests = "combine_topk_swa_indices", topk_indices.shape, seq_lens.shape[0]
    if window < 1 or compress_ratio < 1 or not 0 <= topk <= columns:
        raise ValueError(
            f"{function}: needs window >= 1, compress_ratio >= 1 and 0 <= topk <= {columns}, "
            f"got {window}, {compress_ratio} and {topk}"
        )
    width = merged_width(topk + window)
    out = _outputs(function, out, n, width, topk_indices)
    check_tensor(function, "topk_indices", topk_indices, (n, columns), topk_indices)
    check_tensor(function, "query_start_loc", query_start_loc, (requests + 1,), topk_indices)
    check_tensor(function, "query_pos", query_pos, (n,), topk_indices)
    for name, x in (
        ("seq_lens", seq_lens),
        ("gather_lens", gather_lens),
        ("compressed_base", compressed_base),
        ("swa_base", swa_base),
    ):
        check_tensor(function, name, x, (requests,), topk_indices)
    if n:
        arrays = topk_indices, query_pos, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base
        static = {"window": window, "compress_ratio": compress_ratio, "topk": topk, "width": width}
        kernels.combine_topk_swa(executor(topk_indices.device), *arrays, **static, out=out)
    return out


def _outputs(function, out, n, width, like):
    indices, lengths = out or (None, None)
    return (
        output_or_new(function, "out[0]", indices, (n, width), like),
        output_or_new(function, "out[1]", lengths, (n,), like),
    )
