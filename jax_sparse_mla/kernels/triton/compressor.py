"""Triton kernels of DeepSeek-V4's compressor, by the rules of `jax_sparse_mla.compressor`, in two launches.

First the pooling: a program finds the row that completes its entry and pools some channels of the row's window, whose
tokens come from this step's rows or from the request's ring. Few groups end in a step, so that an entry is shared out
among programs. Then entries are normed and rotated, which takes all channels, and the rings take this step's last
tokens, which replace tokens that other programs of the first launch may still have read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.kernels.launch import Executor, Launch, Output

# Steps of at most so many rows are searched by every program; for longer ones a launch of one program does it once.
SEARCHED_ROWS = 1024

FIND_OPTIONS = {"CHUNK": 8192, "num_warps": 16}

# Channels of an entry that a program pools.
CHANNELS = 128


def pool_constants(ratio: int, head_dim: int, ring: int, rows: int) -> dict[str, int]:
    """The constexpr arguments of `pool_kernel`, with num_warps."""
    overlap = 2 if ratio == 4 else 1
    window_pow2 = triton.next_power_of_2(overlap * ratio)
    return {
        "RATIO": ratio,
        "WINDOW": overlap * ratio,
        "WINDOW_POW2": window_pow2,
        "OVERLAP": overlap,
        "RING": ring,
        "HEAD_DIM": head_dim,
        "CHANNELS": CHANNELS,
        "TOKENS": min(window_pow2, 32),
        "ROWS_POW2": triton.next_power_of_2(rows) if rows <= SEARCHED_ROWS else 0,
        "num_warps": 4,
    }


def finish_constants(ratio: int, head_dim: int, rope_dim: int, ring: int) -> dict[str, int]:
    """The constexpr arguments of `finish_kernel`, with num_warps."""
    return {
        "RATIO": ratio,
        "RING": ring,
        "WIDTH": (2 if ratio == 4 else 1) * head_dim,
        "HEAD_DIM": head_dim,
        "HEAD_POW2": triton.next_power_of_2(head_dim),
        "ROPE_DIM": rope_dim,
        "COLUMNS": 512,
        "num_warps": 4,
    }


@triton.jit
def _load_live(positions_ptr, req_rows_ptr, row, num_rows, max_requests):
    """(live, request, position) of rows; num_rows bounds the memory and the live rows."""
    inside = row < num_rows
    position = tl.load(positions_ptr + row, mask=inside, other=-1)
    request = tl.load(req_rows_ptr + row, mask=inside, other=-1)
    live = inside & (position >= 0) & (request >= 0) & (request < max_requests)
    return live, request, position


@triton.jit
def _completes(positions_ptr, req_rows_ptr, row, num_rows, max_requests, RATIO: tl.constexpr):
    """Whether rows are live and the last ones of a group."""
    live, _, position = _load_live(positions_ptr, req_rows_ptr, row, num_rows, max_requests)
    return live & (position % RATIO == RATIO - 1)


@triton.jit
def _num_live_rows(query_start_loc_ptr, num_rows, num_requests):
    """Rows from the last request's end on are padding."""
    return tl.minimum(tl.load(query_start_loc_ptr + num_requests), num_rows)


@triton.jit
def find_rows_kernel(
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    num_rows,
    num_requests,
    num_entries,
    max_requests,
    rows_ptr,  # int32 [num_entries]
    RATIO: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The rows that complete a group, ascending, then -1; one program."""
    limit = _num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    found = num_rows * 0
    start = num_rows * 0
    while start < limit:
        row = start + tl.arange(0, CHUNK)
        completes = _completes(positions_ptr, req_rows_ptr, row, limit, max_requests, RATIO)
        index = found + tl.cumsum(completes.to(tl.int32), axis=0) - 1
        tl.store(rows_ptr + index, row, mask=completes & (index < num_entries))
        found += tl.sum(completes.to(tl.int32), axis=0)
        start += CHUNK
    while found < num_entries:
        index = found + tl.arange(0, CHUNK)
        tl.store(rows_ptr + index, -1, mask=index < num_entries)
        found += CHUNK


@triton.jit
def pool_kernel(
    kv_ptr,  # bfloat16 or float32 [num_rows, OVERLAP * HEAD_DIM]
    score_ptr,  # the same
    state_kv_ptr,  # float32 [requests, RING, OVERLAP * HEAD_DIM]
    state_score_ptr,  # the same
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    ape_ptr,  # float32 [RATIO, OVERLAP * HEAD_DIM]
    found_ptr,  # int32 [num_entries], what find_rows_kernel found; not read with ROWS_POW2
    num_rows,
    num_requests,
    max_requests,  # of the layer, whose rows of the state begin with first_request
    first_request,
    pooled_ptr,  # float32 [num_entries, HEAD_DIM]; not written for unused entries
    rows_ptr,  # int32 [num_entries]
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_POW2: tl.constexpr,
    OVERLAP: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a window, taken at a time
    ROWS_POW2: tl.constexpr,  # at least num_rows, or 0: the rows were found before
):
    """Some channels of an entry per program."""
    parts: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    width: tl.constexpr = OVERLAP * HEAD_DIM
    entry, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    if ROWS_POW2 > 0:
        candidate = tl.arange(0, ROWS_POW2)
        limit = _num_live_rows(query_start_loc_ptr, num_rows, num_requests)
        completes = _completes(positions_ptr, req_rows_ptr, candidate, limit, max_requests, RATIO)
        index = tl.cumsum(completes.to(tl.int32), axis=0) - 1
        row = tl.max(tl.where(completes & (index == entry), candidate, -1), axis=0)
    else:
        row = tl.load(found_ptr + entry)
    if part == 0:
        tl.store(rows_ptr + entry, row)

    if row >= 0:
        request = tl.load(req_rows_ptr + row)
        last_position = tl.load(positions_ptr + row)
        # Rows before may be another request's, or padding; those of this request follow each other.
        back = tl.arange(0, WINDOW_POW2)
        may_be = (back < WINDOW) & (back <= row)
        in_step = may_be & (tl.load(req_rows_ptr + row - back, mask=may_be, other=-1) == request)
        in_step &= tl.load(positions_ptr + row - back, mask=may_be, other=-1) == last_position - back
        tokens_in_step = tl.min(tl.where(in_step, WINDOW, back), axis=0)

        channel = part * CHANNELS + tl.arange(0, CHANNELS)
        in_head = (channel < HEAD_DIM)[None, :]
        top = tl.full([CHANNELS], float("-inf"), tl.float32)
        total = tl.zeros([CHANNELS], tl.float32)
        pooled = tl.zeros([CHANNELS], tl.float32)
        for start in range(0, WINDOW, TOKENS):
            token = start + tl.arange(0, TOKENS)
            behind = WINDOW - 1 - token
            position = last_position - behind
            exists = (token < WINDOW) & (position >= 0)
            half = token // RATIO * HEAD_DIM  # A of the group before, B of the last one
            step_at = ((row - behind).to(tl.int64) * width + half)[:, None] + channel[None, :]
            ring_at = ((request.to(tl.int64) + first_request) * RING + position % RING) * width + half
            ring_at = ring_at[:, None] + channel[None, :]
            ape_at = (token % RATIO * width + half)[:, None] + channel[None, :]
            from_step = (exists & (behind < tokens_in_step))[:, None] & in_head
            from_ring = (exists & (behind >= tokens_in_step))[:, None] & in_head
            kv = tl.load(kv_ptr + step_at, mask=from_step, other=0.0).to(tl.float32)
            score = tl.load(score_ptr + step_at, mask=from_step, other=0.0).to(tl.float32)
            # The one or the other is 0.
            kv += tl.load(state_kv_ptr + ring_at, mask=from_ring, other=0.0)
            score += tl.load(state_score_ptr + ring_at, mask=from_ring, other=0.0)
            score += tl.load(ape_ptr + ape_at, mask=exists[:, None] & in_head, other=0.0)
            score = tl.where(exists[:, None], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp(score - base[None, :])
            kept = tl.exp(top - base)
            total = total * kept + tl.sum(weight, axis=0)
            pooled = pooled * kept + tl.sum(weight * kv, axis=0)
            top = higher
        pooled = pooled / tl.where(total == 0, 1.0, total)
        tl.store(pooled_ptr + entry.to(tl.int64) * HEAD_DIM + channel, pooled, mask=channel < HEAD_DIM)


@triton.jit
def finish_kernel(
    kv_ptr,  # bfloat16 or float32 [num_rows, WIDTH]
    score_ptr,  # the same
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    norm_weight_ptr,  # bfloat16 or float32 [HEAD_DIM]
    inv_freq_ptr,  # float32 [ROPE_DIM / 2]
    pooled_ptr,  # float32 [num_entries, HEAD_DIM]
    rows_ptr,  # int32 [num_entries]
    state_kv_in_ptr,  # the same buffers as the two of the state below
    state_score_in_ptr,
    norm_eps,
    num_rows,
    num_requests,
    max_requests,
    first_request,
    state_kv_ptr,  # float32 [requests, RING, WIDTH]
    state_score_ptr,  # the same
    entries_ptr,  # bfloat16 [num_entries, HEAD_DIM]
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # even
    HEAD_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A row to carry, or an entry, per program."""
    row = tl.program_id(0)
    if row < num_rows:
        limit = _num_live_rows(query_start_loc_ptr, num_rows, num_requests)
        live, request, position = _load_live(positions_ptr, req_rows_ptr, row, limit, max_requests)
        # A later row of the request that has the same place replaces this one.
        later_live, later_request, _ = _load_live(positions_ptr, req_rows_ptr, row + RING, limit, max_requests)
        if live & ((later_live == 0) | (later_request != request)):
            source = row.to(tl.int64) * WIDTH
            target = ((request.to(tl.int64) + first_request) * RING + position % RING) * WIDTH
            for start in range(0, WIDTH, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                inside = column < WIDTH
                kv = tl.load(kv_ptr + source + column, mask=inside, other=0.0)
                score = tl.load(score_ptr + source + column, mask=inside, other=0.0)
                tl.store(state_kv_ptr + target + column, kv.to(tl.float32), mask=inside)
                tl.store(state_score_ptr + target + column, score.to(tl.float32), mask=inside)
    else:
        entry = row - num_rows
        completing = tl.load(rows_ptr + entry)
        channel = tl.arange(0, HEAD_POW2)
        used = (channel < HEAD_DIM) & (completing >= 0)
        pooled = tl.load(pooled_ptr + entry.to(tl.int64) * HEAD_DIM + channel, mask=used, other=0.0)
        position = tl.load(positions_ptr + tl.maximum(completing, 0)) - (RATIO - 1)
        scale = tl.rsqrt(tl.sum(pooled * pooled, axis=0) / HEAD_DIM + norm_eps)
        normed = pooled * scale * tl.load(norm_weight_ptr + channel, mask=used, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(normed, [HEAD_POW2 // 2, 2]))
        pair = tl.arange(0, HEAD_POW2 // 2) - (HEAD_DIM - ROPE_DIM) // 2
        rotates = (pair >= 0) & (pair < ROPE_DIM // 2)
        angle = position.to(tl.float32) * tl.load(inv_freq_ptr + pair, mask=rotates, other=0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)
        rotated = tl.join(
            tl.where(rotates, even * cos - odd * sin, even), tl.where(rotates, even * sin + odd * cos, odd)
        )
        rotated = tl.where(completing >= 0, tl.reshape(rotated, [HEAD_POW2]), 0.0).to(tl.bfloat16)  # not -0.0
        tl.store(entries_ptr + entry.to(tl.int64) * HEAD_DIM + channel, rotated, mask=channel < HEAD_DIM)


def compress(
    execute: Executor,
    state_kv,
    state_score,
    kv,
    score,
    positions,
    req_rows,
    query_start_loc,
    ape,
    norm_weight,
    inv_freq,
    *,
    ratio: int,
    norm_eps: float,
    num_entries: int,
    requests: tuple[int, int] | None = None,
    out: Sequence[Any] = (None, None),
) -> tuple[Any, Any, Any, Any]:
    """(entries, rows, state_kv, state_score), as `jax_sparse_mla.compress_kv`; no size is zero.

    `requests` are the first row and the number of rows of the layer's requests in the state; None: all of them. `out`
    are entries and rows to write into.
    """
    num_rows, num_requests = positions.shape[0], query_start_loc.shape[0] - 1
    first_request, max_requests = requests or (0, state_kv.shape[0])
    ring, head_dim = state_kv.shape[1], norm_weight.shape[0]
    sizes = num_rows, num_requests, max_requests, first_request
    step, rows = (positions, req_rows, query_start_loc), out[1]
    rows_output, entries_shape = Output((num_entries,), "int32"), (num_entries, head_dim)
    constants = pool_constants(ratio, head_dim, ring, num_rows)
    found = positions if rows is None else rows
    if not constants["ROWS_POW2"]:
        find_constants, scalars = {"RATIO": ratio, **FIND_OPTIONS}, (num_rows, num_requests, num_entries, max_requests)
        find = Launch(find_rows_kernel, "compress_find_rows", (1,), scalars, (rows_output,), find_constants)
        found = execute(find, step, (rows,))[0]
    outputs = Output(entries_shape, "float32"), rows_output
    grid = (num_entries * triton.cdiv(head_dim, CHANNELS),)
    pool = Launch(pool_kernel, "compress_pool", grid, sizes, outputs, constants)
    pooled, rows = execute(pool, (kv, score, state_kv, state_score, *step, ape, found), (None, rows))
    # It reads what the pooling made, so XLA sees that the pooling has read the state before it is written.
    state = tuple(Output(state_kv.shape, "float32", alias=alias) for alias in (9, 10))
    outputs = (*state, Output(entries_shape, "bfloat16"))
    constants, grid = finish_constants(ratio, head_dim, 2 * inv_freq.shape[0], ring), (num_rows + num_entries,)
    finish = Launch(finish_kernel, "compress_finish", grid, (norm_eps, *sizes), outputs, constants)
    inputs = (kv, score, *step, norm_weight, inv_freq, pooled, rows, state_kv, state_score)
    state_kv, state_score, entries = execute(finish, inputs, (None, None, out[0]))
    return entries, rows, state_kv, state_score
