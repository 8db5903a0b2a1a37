"""Which entries each query attends to, in memory that grows with entries and not with queries times entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_mla_torch import ops

_SCRATCH_BYTES = 2**28  # of scores
_MOST_ROWS = 2048  # whose queries and outputs, of all heads, are held at a time


class Seen(NamedTuple):
    """What a call's queries may see: tokens before the call, and which tokens of all are no padding (None: all)."""

    past: int
    tokens: Tensor | None  # bool [batch, tokens]


class Columns(NamedTuple):
    """Entries of a block of rows: int32 `[batch, rows, columns]`, −1 for none, and how many columns to look at."""

    indices: Tensor
    spans: Tensor  # int32 [batch, rows]


def by_kernel(keys: Tensor) -> bool:
    """Whether our kernel scores these index keys; elsewhere there are scores of every head."""
    dim = keys.shape[-1]
    return keys.is_cuda and keys.dtype == torch.bfloat16 and dim >= 16 and dim & (dim - 1) == 0


def blocks(batch: int, rows: int, keys: Tensor | None, heads: int) -> list[slice]:
    """Rows in blocks, by the scratch that their scores take; keys None: there are none."""
    each = 0 if keys is None else 4 * batch * keys.shape[1] * (1 if by_kernel(keys) else heads)
    size = max(1, min(_SCRATCH_BYTES // max(each, 1), _MOST_ROWS // batch))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@torch.no_grad()
def select(q: Tensor, weights: Tensor, keys: Tensor, lengths: Tensor, topk: int, seen: Tensor | None) -> Columns:
    """The `topk` highest of the index scores `Σ_h weights_h · relu(q_h · k)` of each row.

    Args:
      q: `[batch, rows, heads, dim]`. weights: float32 `[batch, rows, heads]`, scales included.
      keys: `[batch, columns, dim]`.
      lengths: `[batch, rows]`, how many leading columns a row sees.
      seen: bool `[batch, columns]`, the columns that any row sees; None: all.
    """
    (batch, rows), columns = lengths.shape, keys.shape[1]
    lengths = lengths.to(torch.int32).clamp(max=columns)
    if columns <= topk:
        indices = torch.arange(columns, device=q.device, dtype=torch.int32).expand(batch, rows, -1)
    else:
        with torch.cuda.device_of(q):
            logits = index_scores(q, weights, keys, lengths)
            if seen is not None:
                logits.masked_fill_(~seen[:, None], -torch.inf)
            indices = _highest(logits, lengths, topk)
    valid = (indices >= 0) & (indices < lengths[..., None])
    if seen is not None:
        rows_of = seen[:, None].expand(-1, rows, -1)
        valid &= rows_of.gather(2, indices.clamp(min=0).long())
    indices = indices.masked_fill(~valid, -1)
    return Columns(indices, lengths.clamp(max=topk))  # entries that a row does not see stand last


def _highest(logits: Tensor, lengths: Tensor, topk: int) -> Tensor:
    """int32 `[batch, rows, topk]`, those within the length first."""
    if not logits.is_cuda:
        return logits.topk(topk).indices.to(torch.int32)
    from sparse_mla_torch.operations.topk import topk_positions  # which imports Triton

    return topk_positions(logits.flatten(0, 1), lengths.flatten(), topk).unflatten(0, lengths.shape)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """float32 `[batch, rows, columns]`, arguments as of `select`; what stands behind a row's length is not to be read.

    transformers multiplies float32 copies. Products of bfloat16 numbers are exact in float32, so that the scores differ
    by the order of their sums only.
    """
    if by_kernel(keys):
        from sparse_mla_torch.launch.executor import executor
        from sparse_mla_torch.transformers import scores

        return scores.index_scores(executor(q.device), *(x.contiguous() for x in (q, weights, keys, lengths)))
    products = torch.matmul(q.float(), keys.float().transpose(1, 2)[:, None])
    logits = torch.matmul(weights[:, :, None], F.relu_(products))[:, :, 0]
    behind = torch.arange(keys.shape[1], device=keys.device) >= lengths[..., None]
    return logits.masked_fill_(behind, -torch.inf)


def attend(q: Tensor, kv: Tensor, columns: Columns, scale: float, attn_sink: Tensor | None = None) -> Tensor:
    """The attention of each query to its columns of its sequence's rows, by `ops.sparse_mla_prefill`.

    q `[batch, rows, heads, dim]`, kv `[batch, entries, dim]`; `[batch, rows, heads, 512]`.
    """
    (indices, spans), (batch, entries, _) = columns, kv.shape
    if not kv.is_cuda:  # where JAX compiles a program for each shape
        kv = F.pad(kv, (0, 0, 0, -entries % 256))
        indices = F.pad(indices, (0, -indices.shape[2] % 64), value=-1)
    first = torch.arange(batch, device=q.device, dtype=torch.int32) * kv.shape[1]
    indices = torch.where(indices < 0, -1, indices + first[:, None, None])
    tensors = q.flatten(0, 1).contiguous(), kv.flatten(0, 1), indices.flatten(0, 1)
    out, _, _ = ops.sparse_mla_prefill(*tensors, scale, spans.flatten(), attn_sink)
    return out.unflatten(0, (batch, -1))
