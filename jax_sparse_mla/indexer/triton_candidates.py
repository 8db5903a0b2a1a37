"""Triton kernels of V4.1's candidate blocks: their scores, and where the keys of a row's blocks lie.

The rules are those of `jax_sparse_mla.indexer.candidates`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output

_F32_MAX = tl.constexpr(3.4028234663852886e38)
SCORE_OPTIONS = {"BLOCKS": 256, "num_warps": 4}
RUN_WARPS = 8


@triton.jit
def block_scores_kernel(
    logits_ptr,  # float32 or bfloat16 [rows, columns]
    lengths_ptr,  # int32 [rows]
    columns,
    blocks,  # of a row of all columns
    scores_ptr,  # float32 [rows, blocks]
    BLOCK_SIZE: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Writes the scores of the blocks that a length reaches into, and no others."""
    chunks = tl.cdiv(blocks, BLOCKS)
    row, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BLOCKS
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + row), 0), columns)
    count = tl.cdiv(length, BLOCK_SIZE)
    if first < count:
        block, place = first + tl.arange(0, BLOCKS), tl.arange(0, SIZE_POW2)
        column = block[:, None] * BLOCK_SIZE + place[None, :]
        counts = (place < BLOCK_SIZE)[None, :] & (column < length)
        logits = tl.load(logits_ptr + row.to(tl.int64) * columns + column, mask=counts, other=float("-inf"))
        logits = logits.to(tl.float32)
        scores = tl.max(tl.where(logits == logits, logits, float("-inf")), axis=1)
        scores = tl.where(block == count - 1, float("inf"), tl.minimum(scores, _F32_MAX))
        tl.store(scores_ptr + row.to(tl.int64) * blocks + block, scores, mask=block < count)


@triton.jit
def candidate_runs_kernel(
    blocks_ptr,  # int32 [rows, n]
    page_table_ptr,  # int32 [rows, width]
    lengths_ptr,  # int32 [rows]
    n,
    width,
    num_pages,
    kept_ptr,  # int32 [rows, n]
    runs_ptr,  # int32 [rows, n]
    held_ptr,  # int32 [rows]
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    N_POW2: tl.constexpr,
):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, N_POW2)
    block = tl.load(blocks_ptr + row * n + i, mask=i < n, other=-1)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + row), 0), width * PAGE_SIZE)
    exists = (block >= 0) & (block < tl.cdiv(length, BLOCK_SIZE))
    first = tl.where(exists, block, 0) * BLOCK_SIZE
    page = tl.load(page_table_ptr + row * width + first // PAGE_SIZE, mask=exists, other=-1)
    run = page * (PAGE_SIZE // BLOCK_SIZE) + first % PAGE_SIZE // BLOCK_SIZE
    run = tl.where((page >= 0) & (page < num_pages), run, -1)
    place, count = tl.cumsum(exists.to(tl.int32), axis=0) - 1, tl.sum(exists.to(tl.int32), axis=0)
    tl.store(kept_ptr + row * n + place, block, mask=exists)
    tl.store(runs_ptr + row * n + place, run, mask=exists)
    behind = (i >= count) & (i < n)
    tl.store(kept_ptr + row * n + i, -1, mask=behind)
    tl.store(runs_ptr + row * n + i, -1, mask=behind)
    tl.store(held_ptr + row, tl.sum(tl.where(exists, tl.minimum(length - first, BLOCK_SIZE), 0), axis=0))


# --- launches: sizes are not zero ------------------------------------------------------------------


def block_scores(execute: Executor, logits, lengths, *, block_size: int) -> Any:
    """float32 `[rows, blocks]`; unwritten from the row's last block on."""
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, block_size)
    constants = {"BLOCK_SIZE": block_size, "SIZE_POW2": triton.next_power_of_2(block_size), **SCORE_OPTIONS}
    grid, outputs = (rows * triton.cdiv(blocks, SCORE_OPTIONS["BLOCKS"]),), (Output((rows, blocks), "float32"),)
    launch = Launch(block_scores_kernel, "block_scores", grid, (columns, blocks), outputs, constants)
    return execute(launch, (logits, lengths))[0]


def candidate_runs(
    execute: Executor, blocks, page_table, lengths, *, block_size: int, page_size: int, num_pages: int
) -> tuple[Any, ...]:
    """As `candidates.candidate_runs_reference`."""
    (rows, n), width = blocks.shape, page_table.shape[1]
    constants = {"BLOCK_SIZE": block_size, "PAGE_SIZE": page_size, "N_POW2": triton.next_power_of_2(n)}
    constants["num_warps"] = RUN_WARPS
    outputs = Output((rows, n), "int32"), Output((rows, n), "int32"), Output((rows,), "int32")
    launch = Launch(candidate_runs_kernel, "candidate_runs", (rows,), (n, width, num_pages), outputs, constants)
    return execute(launch, (blocks, page_table, lengths))
