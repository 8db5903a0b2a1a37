"""A Triton kernel for the index scores of bfloat16 keys that lie side by side, as transformers' caches hold them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jax_sparse_mla.launch.describe import Executor, Launch, Output

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


def index_scores(execute: Executor, q: Tensor, weights: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """float32 `[batch, rows, columns]`, of contiguous tensors; no size is zero, the keys' dim is a power of two."""
    (batch, rows, heads, dim), columns = q.shape, keys.shape[1]
    tile = 64 if rows > 16 else 16  # a tensor core takes 16 rows at least
    grid = triton.cdiv(rows, tile), triton.cdiv(columns, _KEYS), batch
    constants = {"HEADS": heads, "DIM": dim, "ROWS": tile, "KEYS": _KEYS, "num_warps": _WARPS}
    outputs = (Output((batch, rows, columns), "float32"),)
    launch = Launch(index_scores_kernel, "index_scores", grid, (rows, columns), outputs, constants)
    return execute(launch, (q, weights, keys, lengths))[0]
