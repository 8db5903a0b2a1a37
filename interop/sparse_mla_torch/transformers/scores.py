"""A Triton kernel for the index scores of bfloat16 keys that lie side by side, as transformers' caches hold them."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jax_sparse_mla.launch.describe import Launch, Output
from sparse_mla_torch.launch.executor import DirectLaunch

_KEYS, _WARPS = 128, 8


@triton.jit
def index_scores_kernel(
    q_ptr,  # bfloat16 [batch, rows, HEADS, DIM]
    weights_ptr,  # float32 [batch, rows, HEADS]
    keys_ptr,  # bfloat16 [batch, columns, DIM], a sequence's keys side by side
    lengths_ptr,  # int32 [batch, rows]
    rows,
    columns,
    apart,  # columns from one sequence's first key to the next one's
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
        at = (batch * apart + key)[None, :] * DIM + d[:, None]
        keys = tl.load(keys_ptr + at, mask=(key < columns)[None, :], other=0.0)
        lines = (batch * rows + row) * HEADS
        score = tl.zeros((ROWS, KEYS), tl.float32)
        for head in range(HEADS):
            q = tl.load(q_ptr + (lines + head)[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
            weight = tl.load(weights_ptr + lines + head, mask=inside, other=0.0)
            score += tl.maximum(tl.dot(q, keys), 0.0) * weight[:, None]
        out = out_ptr + (batch * rows + row)[:, None] * columns + key[None, :]
        tl.store(out, score, mask=inside[:, None] & (key < columns)[None, :])


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """float32 `[batch, rows, columns]`; no size is zero, the keys' dim is a power of two.

    All are contiguous, but for the keys of different sequences. In a cache that has room for more keys pass its whole
    capacity: then later steps find this launch prepared.
    """
    (batch, rows, heads, dim), columns = q.shape, keys.shape[1]
    out = q.new_empty((batch, rows, columns), dtype=torch.float32)
    apart = keys.stride(0) // dim if batch > 1 else columns
    _launch(batch, rows, heads, dim, columns, apart, q.device)((q, weights, keys, lengths), (out,))
    return out


@functools.lru_cache(maxsize=256)
def _launch(*sizes: int | torch.device) -> DirectLaunch:
    """The launch of these sizes on a device, the last argument."""
    return DirectLaunch(described(*sizes[:-1]))


def described(batch: int, rows: int, heads: int, dim: int, columns: int, apart: int) -> Launch:
    tile = 64 if rows > 16 else 16  # a tensor core takes 16 rows at least
    grid = triton.cdiv(rows, tile), triton.cdiv(columns, _KEYS), batch
    constants = {"HEADS": heads, "DIM": dim, "ROWS": tile, "KEYS": _KEYS, "num_warps": _WARPS}
    outputs = (Output((batch, rows, columns), "float32"),)
    return Launch(index_scores_kernel, "index_scores", grid, (rows, columns, apart), outputs, constants)
