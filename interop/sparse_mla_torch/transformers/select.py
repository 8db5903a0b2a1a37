"""Which entries each query attends to, in memory that grows with entries and not with queries times entries."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_mla_torch import ops
from sparse_mla_torch.attention import prefill

T = TypeVar("T")

_SCRATCH_BYTES = 2**28  # of scores
_MOST_ROWS = 2048  # whose queries and outputs, of all heads, are held at a time


class Seen:
    """What a call's queries may see; and what its layers share, which the first of them makes.

    Attributes:
      past: tokens before the call.
      tokens: bool `[batch, tokens]`, which of all tokens are no padding; None: all.
    """

    def __init__(self, past: int, tokens: Tensor | None):
        self.past, self.tokens = past, tokens
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave for this key in this call."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


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
def leading(lengths: Tensor, count: int, tokens: Tensor | None) -> Tensor:
    """All of `count` entries of which a row sees the first ones: int32 `[batch, rows, count]`, those alone.

    lengths: int32 `[batch, rows]`. tokens: bool `[batch, count]`, the entries that any row sees; None: all.
    """
    entry = torch.arange(count, device=lengths.device, dtype=torch.int32)
    valid = entry < lengths[..., None]
    if tokens is not None:
        valid &= tokens[:, None]
    return torch.where(valid, entry, -1)


@torch.no_grad()
def select(
    q: Tensor, weights: Tensor, keys: Tensor, lengths: Tensor, topk: int, tokens: Tensor | None, first: Tensor | None
) -> Tensor:
    """The entries of the highest index scores `Σ_h weights_h · relu(q_h · k)`: int32 `[batch, rows, topk]`.

    Entries that a row does not see are −1; without `tokens` they stand last.

    Args:
      q: `[batch, rows, heads, dim]`. weights: float32 `[batch, rows, heads]`, scales included.
      keys: `[batch, columns, dim]`, columns >= topk; those that no row sees may hold anything.
      lengths: int32 `[batch, rows]`, how many leading columns a row sees, at most `columns`.
      tokens: bool `[batch, up to columns]`, the columns that any row sees; None: all.
      first: int32 `[batch * rows]`, what an entry's number is added to; None: nothing.
    """
    with torch.cuda.device_of(q):
        logits = index_scores(q, weights, keys, lengths)
        if tokens is not None:
            logits[..., : tokens.shape[1]].masked_fill_(~tokens[:, None], -torch.inf)
        if logits.is_cuda and tokens is None:
            return _highest_on_cuda(logits, lengths, topk, first)
        indices = logits.topk(topk).indices if not logits.is_cuda else _highest_on_cuda(logits, lengths, topk, None)
    indices = indices.to(torch.int32)
    valid = (indices >= 0) & (indices < lengths[..., None])
    if tokens is not None:
        rows_of = tokens[:, None].expand(-1, lengths.shape[1], -1)
        valid &= rows_of.gather(2, indices.clamp(0, tokens.shape[1] - 1).long())
    return torch.where(valid, indices if first is None else indices + first.view(*lengths.shape, 1), -1)


def _highest_on_cuda(logits: Tensor, lengths: Tensor, topk: int, first: Tensor | None) -> Tensor:
    from jax_sparse_mla.indices import TopkTransform
    from sparse_mla_torch.operations import topk as operations  # which imports Triton

    rows = logits.flatten(0, 1), lengths.flatten()
    if first is None:
        positions = operations.topk_positions(*rows, topk)
    else:
        positions = operations.topk_transform(*rows, topk, method=TopkTransform.RAGGED, topk_indices_offset=first)
    return positions.unflatten(0, lengths.shape)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """float32 `[batch, rows, columns]`, arguments as of `select`; what stands behind a row's length is not to be read.

    transformers multiplies float32 copies. Products of bfloat16 numbers are exact in float32, so that the scores differ
    by the order of their sums only.
    """
    if by_kernel(keys):
        from sparse_mla_torch.transformers import scores

        return scores.index_scores(q.contiguous(), weights.contiguous(), keys, lengths.contiguous())
    products = torch.matmul(q.float(), keys.float().transpose(1, 2)[:, None])
    logits = torch.matmul(weights[:, :, None], F.relu_(products))[:, :, 0]
    behind = torch.arange(keys.shape[1], device=keys.device) >= lengths[..., None]
    return logits.masked_fill_(behind, -torch.inf)


def attend(
    q: Tensor, kv: Tensor, columns: Columns, scale: float, seen: Seen, attn_sink: Tensor | None = None
) -> Tensor:
    """The attention of each query to its columns of its sequence's rows, by `ops.sparse_mla_prefill`.

    q `[batch, rows, heads, dim]`, kv `[batch, entries, dim]`; `[batch, rows, heads, 512]`.
    """
    (indices, spans), (batch, entries, _) = columns, kv.shape
    if not kv.is_cuda:  # where JAX compiles a program for each shape
        kv = F.pad(kv, (0, 0, 0, -entries % 256))
        indices = F.pad(indices, (0, -indices.shape[2] % 64), value=-1)
    if batch > 1:
        rows = kv.shape[1]
        first = seen.once(
            ("first", rows),
            lambda: torch.arange(0, batch * rows, rows, device=q.device, dtype=torch.int32)[:, None, None],
        )
        indices = torch.where(indices < 0, -1, indices + first)
    tensors = q.flatten(0, 1).contiguous(), kv.flatten(0, 1), indices.flatten(0, 1).contiguous()
    arguments = *tensors, scale, spans.flatten(), attn_sink
    # The operator is what autograd and graphs of torch.compile take; a call of it takes the host longer.
    through = ops.sparse_mla_prefill if torch.is_grad_enabled() or torch.compiler.is_compiling() else prefill.attend
    return through(*arguments)[0].unflatten(0, (batch, -1))
