"""Triton kernel of the hyper-connections: the mixing weights of residual streams, all Sinkhorn steps at once.

XLA launches a kernel or two for each of the 39 divisions by a sum. Here a row stays in registers for all of them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output

BLOCK = 32  # rows of a program
OPTIONS = {"BLOCK": BLOCK, "num_warps": 1}


@triton.jit
def doubly_stochastic_kernel(
    logits_ptr,  # float32 [rows, N, N]
    rows,
    eps,
    out_ptr,  # float32 [rows, N, N]
    N: tl.constexpr,  # a power of two
    ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax of each line; then columns and lines in turn over their sums, columns first and last. eps is added."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, j = tl.arange(0, N), tl.arange(0, N)
    at = row[:, None, None] * (N * N) + i[None, :, None] * N + j[None, None, :]
    live = (row < rows)[:, None, None]
    x = tl.load(logits_ptr + at, mask=live, other=0.0)
    x = tl.exp(x - tl.max(x, 2)[:, :, None])
    x = x / tl.sum(x, 2)[:, :, None] + eps
    x = x / (tl.sum(x, 1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        x = x / (tl.sum(x, 2)[:, :, None] + eps)
        x = x / (tl.sum(x, 1)[:, None, :] + eps)
    tl.store(out_ptr + at, x, mask=live)


def doubly_stochastic(execute: Executor, logits, *, iterations: int, eps: float) -> Any:
    """float32 `[rows, n, n]` of logits of this shape; n is a power of two."""
    rows, n, _ = logits.shape
    constants = {"N": n, "ITERATIONS": iterations} | OPTIONS
    grid, outputs = (triton.cdiv(rows, BLOCK),), (Output(logits.shape, "float32"),)
    launch = Launch(doubly_stochastic_kernel, "doubly_stochastic", grid, (rows, eps), outputs, constants)
    return execute(launch, (logits,))[0]
