"""From index queries to the selected entries in bounded memory, by the rules of `jax_sparse_mla.index_topk`."""

from __future__ import annotations

import torch

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.select import SCRATCH_BYTES, rows_at_once
from jax_sparse_mla.indices import TopkTransform
from sparse_mla_torch.operations.checks import check_tensor, output_or_new
from sparse_mla_torch.operations.indexer import check_logits, launch_logits
from sparse_mla_torch.operations.topk import topk_transform


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    *,
    method: TopkTransform,
    kv_page_table: torch.Tensor | None = None,
    page_size: int = 1,
    row_to_request: torch.Tensor | None = None,
    topk_indices_offset: torch.Tensor | None = None,
    batch_invariant: bool = False,
    format: IndexFormat = IndexFormat.FP8,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `jax_sparse_mla.index_topk`; tensors contiguous.

    Args:
      q: float8_e4m3fn `[rows, heads, 128]`, at most 64 heads; bfloat16 over FP4 keys.
      page_table: int32 `[rows, P]`, with `row_to_request` `[R, P]`.
      kv_page_table: int32 `[rows, K]`, with `row_to_request` `[R, K]`; needed by PAGED.
      batch_invariant: a row's logits do not depend on how many rows there are: at most 128 are computed together.
      format: of the keys.
      out: int32 `[rows, topk]` to write into; allocated by default.
      scratch: float32, for the logits of at least one row; more of it takes more rows at a time. By default 256 MiB are
        allocated, or what all rows need.

    Returns:
      `out`, padded with −1.

    Raises:
      TypeError: a wrong dtype, a method that is not a TopkTransform.
      ValueError: a wrong shape, an argument missing that the method needs, a scratch smaller than a row, or a tensor
        that is not contiguous or on another device.
    """
    function = "index_topk"
    requests = None if row_to_request is None else page_table.shape[0]
    rows, capacity = check_logits(
        function, q, weights, index_cache, page_table, lengths, format=format, requests=requests
    )
    if row_to_request is not None:
        check_tensor(function, "row_to_request", row_to_request, (rows,), index_cache)
    if not isinstance(method, TopkTransform):
        raise TypeError(f"{function}: method must be a TopkTransform, got {method!r}")
    needed = "kv_page_table" if method is TopkTransform.PAGED else "topk_indices_offset"
    if {"kv_page_table": kv_page_table, "topk_indices_offset": topk_indices_offset}[needed] is None:
        raise ValueError(f"{function}: {needed} is missing, and {method} needs it")
    out = output_or_new(function, "out", out, (rows, topk), index_cache)
    if not rows or not page_table.shape[0]:
        return out.fill_(-1)
    if scratch is None:
        elements = min(rows, rows_at_once(capacity, SCRATCH_BYTES, batch_invariant)) * capacity
        scratch = torch.empty(elements, dtype=torch.float32, device=q.device)
    fits = scratch.dtype == torch.float32 and scratch.numel() >= capacity and scratch.device == q.device
    if not fits or not scratch.is_contiguous():
        raise ValueError(
            f"{function}: scratch must be contiguous float32 with at least {capacity} elements on {q.device}"
        )
    chunk = min(rows, rows_at_once(capacity, 4 * scratch.numel(), batch_invariant)) if capacity else rows

    if row_to_request is not None:
        # A row of no request has no keys.
        known = (row_to_request >= 0) & (row_to_request < page_table.shape[0])
        lengths, request = lengths * known, row_to_request.clamp(0, page_table.shape[0] - 1)
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        some = part.stop - first
        pages = page_table[part] if row_to_request is None else page_table[request[part]]
        logits = scratch.view(-1)[: some * capacity].view(some, capacity)
        arrays = q[part], weights[part], index_cache, pages, lengths[part]
        if not index_cache.numel():
            logits.fill_(float("-inf"))
        elif capacity:
            launch_logits(*arrays, logits, rows_of_call=some if batch_invariant else rows, fill=False, format=format)
        tables = {}
        if method is TopkTransform.PAGED:
            of_rows = row_to_request is None
            tables = {"page_table": kv_page_table[part] if of_rows else kv_page_table, "page_size": page_size}
            tables["row_to_request"] = None if of_rows else row_to_request[part]
        else:
            tables["topk_indices_offset"] = topk_indices_offset[part]
        topk_transform(logits, lengths[part], topk, method=method, out=out[part], **tables)
    return out
