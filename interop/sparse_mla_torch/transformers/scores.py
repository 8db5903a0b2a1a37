"""Index scores of transformers' indexers: bfloat16 queries and keys that lie one after the other, no page, no scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from jax_sparse_mla.launch.describe import Launch, Output
from sparse_mla_torch.launch.executor import executor

_KEYS, _WARPS = 128, 8


@triton.jit
def index_scores_kernel(
    q_ptr,  # bfloat16 [batch, rows, HEADS, DIM]
    weights_ptr,  # float32 [batch, rows, HEADS]
    keys_ptr,  # bfloat16 [batch, columns, DIM]
    lengths_ptr,  # int32 [batch, rows]
    rows,
    columns,
    out_ptr,  # float32 [batch, rows, columns], unwritten behind the block that holds a row's last key
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Programs of the same keys follow each other.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    batch = tl.program_id(2).to(tl.int64)
    inside = row < rows
    length = tl.load(lengths_ptr + batch * rows + row, mask=inside, other=0)
    if tl.program_id(1) * KEYS < tl.max(length, axis=0):
        d = tl.arange(0, DIM)
        at = (batch * columns + key)[None, :] * DIM + d[:, None]
        keys = tl.load(keys_ptr + at, mask=(key < columns)[None, :], other=0.0)
        lines = (batch * rows + row) * HEADS
        score = tl.zeros((ROWS, KEYS), tl.float32)
        for head in range(HEADS):
            q = tl.load(q_ptr + (lines + head)[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
            weight = tl.load(weights_ptr + lines + head, mask=inside, other=0.0)
            score += tl.maximum(tl.dot(q, keys), 0.0) * weight[:, None]
        out = out_ptr + (batch * rows + row)[:, None] * columns + key[None, :]
        tl.store(out, score, mask=inside[:, None] & (key < columns)[None, :])


def launch_of(batch: int, rows: int, heads: int, dim: int, columns: int) -> Launch:
    """Sizes are not zero, dim is a power of two."""
    tile = 64 if rows > 16 else 16
    grid = triton.cdiv(rows, tile), triton.cdiv(columns, _KEYS), batch
    constants = {"HEADS": heads, "DIM": dim, "ROWS": tile, "KEYS": _KEYS, "num_warps": _WARPS}
    outputs = (Output((batch, rows, columns), "float32"),)
    return Launch(index_scores_kernel, "index_scores", grid, (rows, columns), outputs, constants)


def by_kernel(keys: Tensor) -> bool:
    """Whether the kernel serves these keys; elsewhere scores take the heads' products too."""
    dim = keys.shape[-1]
    return keys.is_cuda and keys.dtype == torch.bfloat16 and dim >= 16 and dim & (dim - 1) == 0


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """float32 `[batch, rows, columns]`, arguments as of `select`; what stands behind a row's length is not to be read.

    transformers multiplies float32 copies. Products of bfloat16 numbers are exact in float32, so that the scores differ
    by the order of their sums only.
    """
    if by_kernel(keys):
        launch = launch_of(*q.shape, keys.shape[1])
        arrays = (x.contiguous() for x in (q, weights, keys, lengths))
        return executor(q.device)(launch, tuple(arrays))[0]
    products = torch.matmul(q.float(), keys.float().transpose(1, 2)[:, None])
    logits = torch.matmul(weights[:, :, None], F.relu_(products))[:, :, 0]
    behind = torch.arange(keys.shape[1], device=keys.device) >= lengths[..., None]
    return logits.masked_fill_(behind, -torch.inf)
