"""Triton kernel of a device's own part of index lists. The rule is `jax_sparse_mla.indices.ownership`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output

# Columns of a list that are scanned at a time, at most; a thread has 8 of them.
_MOST_COLUMNS = 4096


@triton.jit
def _pack_row(
    rank,
    arrays,  # pointers to indices and lengths, and to the results and their numbers
    last,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    indices_ptr, lengths_ptr, out_ptr, counts_ptr = arrays
    row = tl.program_id(0).to(tl.int64)
    scanned = TOPK
    if HAS_LENGTHS:
        scanned = tl.minimum(tl.load(lengths_ptr + row), TOPK)
    count = tl.zeros((), tl.int32)
    for start in range(0, scanned, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        # A mask that is the same for four neighbours keeps the loads 16 bytes wide.
        inside = (column // 4 < (scanned + 3) // 4) & (column < TOPK)
        index = tl.load(indices_ptr + row * TOPK + column, mask=inside, other=-1)
        mine = (column < scanned) & (index >= 0) & (index <= last) & (index // INTERLEAVE % SIZE == rank)
        local = index // (INTERLEAVE * SIZE) * INTERLEAVE + index % INTERLEAVE
        position = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(out_ptr + row * TOPK + position, local, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts_ptr + row, count)
    for start in range(count // COLUMNS * COLUMNS, TOPK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tl.store(out_ptr + row * TOPK + column, -1, mask=(column >= count) & (column < TOPK))


@triton.jit
def pack_kernel(
    rank_ptr,  # int32 scalar
    indices_ptr,  # int32 [rows, TOPK]
    lengths_ptr,  # int32 [rows]; not read without HAS_LENGTHS
    extra_ptr,  # int32 [rows, EXTRA_TOPK]; not read where EXTRA_TOPK is 0: there is one list a row
    extra_lengths_ptr,  # int32 [rows]; not read without EXTRA_HAS_LENGTHS
    last,  # the last index of the first list that any device has
    extra_last,  # and of the second list
    out_ptr,  # int32 [rows, TOPK]
    counts_ptr,  # int32 [rows]
    extra_out_ptr,  # int32 [rows, EXTRA_TOPK], or None
    extra_counts_ptr,  # int32 [rows], or None
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two
    INTERLEAVE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EXTRA_TOPK: tl.constexpr,
    EXTRA_COLUMNS: tl.constexpr,
    EXTRA_INTERLEAVE: tl.constexpr,
    EXTRA_HAS_LENGTHS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One list of one row: what is the rank's own, by the rank's own numbers and in its order, then -1."""
    rank = tl.load(rank_ptr)
    if tl.program_id(1) == 0:
        arrays = indices_ptr, lengths_ptr, out_ptr, counts_ptr
        _pack_row(rank, arrays, last, TOPK, COLUMNS, SIZE, INTERLEAVE, HAS_LENGTHS)
    elif EXTRA_TOPK > 0:
        extra = extra_ptr, extra_lengths_ptr, extra_out_ptr, extra_counts_ptr
        _pack_row(rank, extra, extra_last, EXTRA_TOPK, EXTRA_COLUMNS, SIZE, EXTRA_INTERLEAVE, EXTRA_HAS_LENGTHS)


def pack(execute: Executor, rank, *arrays, size: int, lists: Sequence[tuple[int, int, bool]]) -> tuple[Any, ...]:
    """Own parts of one or two index lists int32 `[rows, k]` a row, and their lengths, as `Ownership.pack` makes them.

    `arrays` are of each list its indices, then its lengths if it has any; `lists` are of each the indices of a turn,
    the last index that any rank has, and whether it has lengths.
    """
    remaining = list(arrays)
    operands = [(remaining.pop(0), remaining.pop(0) if has_lengths else None) for _, _, has_lengths in lists]
    (indices, lengths), (extra, extra_lengths) = (*operands, (None, None))[:2]
    (interleave, last, has_lengths), (extra_interleave, extra_last, _) = (*lists, (1, -1, False))[:2]
    outputs = []
    for positions in (indices, extra):
        if positions is None:
            outputs += [None, None]
        else:
            outputs += [Output(tuple(positions.shape), "int32"), Output(tuple(positions.shape[:1]), "int32")]
    columns = [min(triton.next_power_of_2(x.shape[1]), _MOST_COLUMNS) for x in (indices, extra) if x is not None]
    constants = {"TOPK": indices.shape[1], "EXTRA_TOPK": 0 if extra is None else extra.shape[1], "SIZE": size}
    constants |= {"COLUMNS": columns[0], "EXTRA_COLUMNS": columns[-1]}
    constants |= {"INTERLEAVE": interleave, "EXTRA_INTERLEAVE": extra_interleave}
    constants |= {"HAS_LENGTHS": has_lengths, "EXTRA_HAS_LENGTHS": extra_lengths is not None}
    constants["num_warps"] = min(max(max(columns) // 256, 4), 16)
    grid, scalars = (indices.shape[0], len(lists)), (last, extra_last)
    launch = Launch(pack_kernel, "pack_own", grid, scalars, outputs, constants)
    results = execute(launch, (rank, indices, lengths, extra, extra_lengths))
    return tuple(x for x in results if x is not None)
