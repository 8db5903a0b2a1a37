"""The indexer's logits of keys in one piece on torch tensors, and their gradient: torch's own products, block by block.

The formulas stand in `jax_sparse_mla.indexer.contiguous`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS
from jax_sparse_mla.indexer.contiguous import block_sizes
from jax_sparse_mla.indexer.keys import INDEX_DIM
from sparse_mla_torch.operations.checks import TensorChecks
from sparse_mla_torch.operations.indexer import quantize_index_q


def contiguous_index_logits(
    q: Tensor, weights: Tensor, keys: Tensor, row_starts: Tensor, lengths: Tensor, *, fp8: bool = False
) -> Tensor:
    """Torch's `jax_sparse_mla.indexer.contiguous_index_logits`, which `torch.autograd` differentiates.

    Blocks that no row sees are computed, too: to leave them out the host would have to wait.
    """
    check = TensorChecks("contiguous_index_logits", q)
    check("q", q, ("rows", "heads", INDEX_DIM), FLOATS)
    check("weights", weights, ("rows", "heads"), FLOAT32)
    check("keys", keys, ("n", INDEX_DIM), (str(q.dtype).removeprefix("torch."),))
    check("row_starts", row_starts, ("rows",))
    check("lengths", lengths, ("rows",))
    if 0 in (len(q), len(keys)):
        return q.new_full((len(q), len(keys)), -torch.inf, dtype=torch.float32)
    if not fp8:
        return _Logits.apply(q, weights, keys, row_starts, lengths)
    q, q_scale = _Rounded.apply(q)
    keys, k_scale = _Rounded.apply(keys[:, None])
    return _Logits.apply(q, weights * q_scale, keys[:, 0], row_starts, lengths) * k_scale[:, 0]


class _Rounded(torch.autograd.Function):
    """FP8 values `[rows, heads, 128]` in the dtype of x, and their scales."""

    @staticmethod
    def forward(ctx, x):
        values, scale = quantize_index_q(x)
        ctx.save_for_backward(scale)
        ctx.mark_non_differentiable(scale)
        return values.to(x.dtype), scale

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _):
        (scale,) = ctx.saved_tensors
        return (g.float() / scale[..., None]).to(g.dtype)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, weights, keys, row_starts, lengths):
        ctx.save_for_backward(q, weights, keys, row_starts, lengths)
        logits = q.new_empty((len(q), len(keys)), dtype=torch.float32)
        for rows, columns, seen in _blocks(q, keys, row_starts, lengths):
            scores = _scores(q[rows], keys[columns]).clamp_(min=0)
            values = scores.mul_(weights[rows][..., None]).sum(1)
            logits[rows, columns] = values.masked_fill_(~seen, -torch.inf)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        q, weights, keys, row_starts, lengths = ctx.saved_tensors
        keys = torch.where(_seen_by_any(len(keys), row_starts, lengths)[:, None], keys, 0)  # others may be NaN
        dq, dw, dk = (torch.zeros_like(x, dtype=torch.float32) for x in (q, weights, keys))
        for rows, columns, seen in _blocks(q, keys, row_starts, lengths):
            scores = _scores(q[rows], keys[columns])
            of_block = torch.where(seen, g[rows, columns], 0)[:, None]
            dw[rows] += (of_block * scores.clamp(min=0)).sum(-1)
            ds = torch.where(scores > 0, of_block * weights[rows][..., None], 0).to(q.dtype).flatten(0, 1)
            dq[rows] += _product(ds, keys[columns]).view(q[rows].shape)
            dk[columns] += _product(ds.T, q[rows].flatten(0, 1))
        return dq.to(q.dtype), dw, dk.to(keys.dtype), None, None


def _blocks(q: Tensor, keys: Tensor, row_starts: Tensor, lengths: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, columns, and which of the rows see which of the columns."""
    (rows, heads, _), columns = q.shape, len(keys)
    of_rows, of_columns = block_sizes(rows, heads, columns)
    starts, ends = _windows(row_starts, lengths)
    at = torch.arange(columns, device=q.device)
    for row in range(0, rows, of_rows):
        part = slice(row, row + of_rows)
        for column in range(0, columns, of_columns):
            of_part = at[column : column + of_columns]
            seen = (of_part >= starts[part, None]) & (of_part < ends[part, None])
            yield part, slice(column, column + of_columns), seen


def _windows(row_starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    starts = row_starts.long()
    return starts, starts + lengths.long().clamp(min=0)


def _seen_by_any(columns: int, row_starts: Tensor, lengths: Tensor) -> Tensor:
    """bool `[columns]`, whether a row sees the key."""
    starts, ends = (x.clamp(0, columns) for x in _windows(row_starts, lengths))
    steps = torch.zeros(columns + 1, dtype=torch.int64, device=lengths.device)
    ones = torch.ones_like(starts)
    return steps.index_add_(0, starts, ones).index_add_(0, ends, -ones).cumsum(0)[:-1] > 0


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """float32 `[rows, heads, columns]`."""
    return _product(q.flatten(0, 1), keys.T).view(*q.shape[:2], len(keys))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """float32; bfloat16 products are exact and summed in float32."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
