"""From index queries to the selected entries in bounded memory, on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.select import SCRATCH_BYTES, rows_at_once
from jax_sparse_mla.indices import TopkTransform
from sparse_mla_torch.operations.checks import TensorChecks
from sparse_mla_torch.operations.indexer import check_logits, launch_logits
from sparse_mla_torch.operations.topk import topk_transform


def index_topk(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    topk: int,
    *,
    method: TopkTransform,
    kv_page_table: Tensor | None = None,
    page_size: int = 1,
    row_to_request: Tensor | None = None,
    topk_indices_offset: Tensor | None = None,
    batch_invariant: bool = False,
    format: IndexFormat = IndexFormat.FP8,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Torch's `jax_sparse_mla.index_topk`, padded with −1; q and index_cache as in `indexer.index_logits`.

    Args:
      batch_invariant: a row's logits do not depend on how many rows there are: at most 128 are computed together.
      scratch: float32, for the logits of at least one row; more of it takes more rows at a time. By default 256 MiB are
        allocated, or what all rows need.
    """
    check = TensorChecks("index_topk", index_cache)
    rows, capacity = check_logits(
        *(check, q, weights, index_cache, page_table, lengths),
        format=format,
        requests="rows" if row_to_request is None else "requests",
    )
    check.optional("row_to_request", row_to_request, ("rows",))
    if not isinstance(method, TopkTransform):
        raise TypeError(f"index_topk: method must be a TopkTransform, got {method!r}")
    paged = method is TopkTransform.PAGED
    if (kv_page_table if paged else topk_indices_offset) is None:
        raise check.fail(f"{'kv_page_table' if paged else 'topk_indices_offset'} is missing, and {method} needs it")
    out = check.out(out, (rows, topk))
    if not rows or not page_table.shape[0]:
        return out.fill_(-1)
    if scratch is None:
        elements = min(rows, rows_at_once(capacity, SCRATCH_BYTES, batch_invariant)) * capacity
        scratch = torch.empty(elements, dtype=torch.float32, device=q.device)
    fits = scratch.dtype == torch.float32 and scratch.numel() >= capacity and scratch.device == q.device
    if not fits or not scratch.is_contiguous():
        raise check.fail(f"scratch must be contiguous float32 with at least {capacity} elements on {q.device}")
    chunk = min(rows, rows_at_once(capacity, 4 * scratch.numel(), batch_invariant)) if capacity else rows

    if row_to_request is not None:
        # A row of no request has no keys.
        known = (row_to_request >= 0) & (row_to_request < page_table.shape[0])
        lengths, request = lengths * known, row_to_request.clamp(0, page_table.shape[0] - 1)
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        count = part.stop - first
        pages = page_table[part] if row_to_request is None else page_table[request[part]]
        logits = scratch.view(-1)[: count * capacity].view(count, capacity)
        if not index_cache.numel():
            logits.fill_(float("-inf"))
        elif capacity:
            launch_logits(
                *(q[part], weights[part], index_cache, pages, lengths[part], logits),
                rows_of_call=count if batch_invariant else rows,
                fill=False,
                format=format,
            )
        topk_transform(
            *(logits, lengths[part], topk),
            method=method,
            page_table=kv_page_table[part] if paged and row_to_request is None else kv_page_table,
            page_size=page_size,
            row_to_request=row_to_request[part] if paged and row_to_request is not None else None,
            topk_indices_offset=None if paged else topk_indices_offset[part],
            out=out[part],
        )
    return out
