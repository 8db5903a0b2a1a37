"""Triton kernels of DeepSeek-V4's compressor, by the rules of `jax_sparse_mla.compressor`, in two launches.

First the entries: a program finds the row that completes its entry, pools the row's window channel by channel, norms
and rotates. A window's tokens come from this step's rows or from the requests' rings. Then the rings take this step's
last tokens: a launch of its own, because they replace tokens that other programs of the first one may still read.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Steps of at most so many rows are searched by every program; for longer ones a launch of one program does it once.
SEARCHED_ROWS = 1024

FIND_OPTIONS = {"CHUNK": 2048, "num_warps": 8}
CARRY_OPTIONS = {"COLUMNS": 512, "num_warps": 4}


def compress_constants(ratio: int, head_dim: int, rope_dim: int, ring: int, rows: int) -> dict[str, int]:
    """The constexpr arguments of `compress_kernel`, with num_warps."""
    overlap = 2 if ratio == 4 else 1
    head_pow2 = triton.next_power_of_2(head_dim)
    return {
        "RATIO": ratio,
        "WINDOW": overlap * ratio,
        "OVERLAP": overlap,
        "RING": ring,
        "HEAD_DIM": head_dim,
        "HEAD_POW2": head_pow2,
        "ROPE_DIM": rope_dim,
        "TOKENS": min(triton.next_power_of_2(overlap * ratio), 16),
        "ROWS_POW2": triton.next_power_of_2(rows) if rows <= SEARCHED_ROWS else 0,
        "num_warps": 8 if head_pow2 >= 256 else 4,
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
def compress_kernel(
    kv_ptr,  # bfloat16 or float32 [num_rows, OVERLAP * HEAD_DIM]
    score_ptr,  # the same
    state_kv_ptr,  # float32 [max_requests, RING, OVERLAP * HEAD_DIM]
    state_score_ptr,  # the same
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    ape_ptr,  # float32 [RATIO, OVERLAP * HEAD_DIM]
    norm_weight_ptr,  # bfloat16 or float32 [HEAD_DIM]
    inv_freq_ptr,  # float32 [ROPE_DIM / 2]
    found_ptr,  # int32 [num_entries], what find_rows_kernel found; not read with ROWS_POW2
    norm_eps,
    num_rows,
    num_requests,
    max_requests,
    entries_ptr,  # bfloat16 [num_entries, HEAD_DIM]
    rows_ptr,  # int32 [num_entries]
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # even
    HEAD_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,  # of a window, taken at a time
    ROWS_POW2: tl.constexpr,  # at least num_rows, or 0: the rows were found before
):
    """One entry per program."""
    entry = tl.program_id(0)
    if ROWS_POW2 > 0:
        candidate = tl.arange(0, ROWS_POW2)
        limit = _num_live_rows(query_start_loc_ptr, num_rows, num_requests)
        completes = _completes(positions_ptr, req_rows_ptr, candidate, limit, max_requests, RATIO)
        index = tl.cumsum(completes.to(tl.int32), axis=0) - 1
        row = tl.max(tl.where(completes & (index == entry), candidate, -1), axis=0)
    else:
        row = tl.load(found_ptr + entry)
    tl.store(rows_ptr + entry, row)

    channel = tl.arange(0, HEAD_POW2)
    in_head = channel < HEAD_DIM
    out_ptr = entries_ptr + entry.to(tl.int64) * HEAD_DIM
    if row < 0:
        tl.store(out_ptr + channel, tl.zeros([HEAD_POW2], tl.bfloat16), mask=in_head)
    else:
        request = tl.load(req_rows_ptr + row)
        last_position = tl.load(positions_ptr + row)
        top = tl.full([HEAD_POW2], float("-inf"), tl.float32)
        total = tl.zeros([HEAD_POW2], tl.float32)
        pooled = tl.zeros([HEAD_POW2], tl.float32)
        for start in range(0, WINDOW, TOKENS):
            token = start + tl.arange(0, TOKENS)
            position = last_position - (WINDOW - 1) + token
            exists = (token < WINDOW) & (position >= 0)
            source = row - (WINDOW - 1) + token
            may_be = exists & (source >= 0)
            # The row before may be another request's, or padding.
            in_step = may_be & (tl.load(req_rows_ptr + source, mask=may_be, other=-1) == request)
            in_step &= tl.load(positions_ptr + source, mask=may_be, other=-1) == position
            half = token // RATIO * HEAD_DIM  # A of the group before, B of the last one
            width: tl.constexpr = OVERLAP * HEAD_DIM
            step_at = (source.to(tl.int64) * width + half)[:, None] + channel[None, :]
            ring_at = (request.to(tl.int64) * RING + position % RING) * width + half
            ring_at = ring_at[:, None] + channel[None, :]
            from_step = in_step[:, None] & in_head[None, :]
            from_ring = (exists & (in_step == 0))[:, None] & in_head[None, :]
            kv = tl.load(kv_ptr + step_at, mask=from_step, other=0.0).to(tl.float32)
            score = tl.load(score_ptr + step_at, mask=from_step, other=0.0).to(tl.float32)
            kv = tl.where(from_ring, tl.load(state_kv_ptr + ring_at, mask=from_ring, other=0.0), kv)
            score = tl.where(from_ring, tl.load(state_score_ptr + ring_at, mask=from_ring, other=0.0), score)
            ape_at = (token % RATIO * width + half)[:, None] + channel[None, :]
            score += tl.load(ape_ptr + ape_at, mask=(token < WINDOW)[:, None] & in_head[None, :], other=0.0)
            score = tl.where(exists[:, None], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp(score - base[None, :])
            kept = tl.exp(top - base)
            total = total * kept + tl.sum(weight, axis=0)
            pooled = pooled * kept + tl.sum(weight * kv, axis=0)
            top = higher
        pooled = pooled / tl.where(total == 0, 1.0, total)

        pooled = tl.where(in_head, pooled, 0.0)
        scale = tl.rsqrt(tl.sum(pooled * pooled, axis=0) / HEAD_DIM + norm_eps)
        normed = pooled * scale * tl.load(norm_weight_ptr + channel, mask=in_head, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(normed, [HEAD_POW2 // 2, 2]))
        pair = tl.arange(0, HEAD_POW2 // 2) - (HEAD_DIM - ROPE_DIM) // 2
        rotates = (pair >= 0) & (pair < ROPE_DIM // 2)
        angle = tl.load(inv_freq_ptr + pair, mask=rotates, other=0.0)
        angle = (last_position - (RATIO - 1)).to(tl.float32) * angle
        cos, sin = tl.cos(angle), tl.sin(angle)
        rotated = tl.join(
            tl.where(rotates, even * cos - odd * sin, even), tl.where(rotates, even * sin + odd * cos, odd)
        )
        tl.store(out_ptr + channel, tl.reshape(rotated, [HEAD_POW2]).to(tl.bfloat16), mask=in_head)


@triton.jit
def carry_kernel(
    kv_ptr,  # bfloat16 or float32 [num_rows, WIDTH]
    score_ptr,  # the same
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    after_ptr,  # of the entries, which come before: an order that XLA sees
    state_kv_in_ptr,  # the same buffers as the last two
    state_score_in_ptr,
    num_rows,
    num_requests,
    max_requests,
    state_kv_ptr,  # float32 [max_requests, RING, WIDTH]
    state_score_ptr,  # the same
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row per program."""
    row = tl.program_id(0)
    limit = _num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    live, request, position = _load_live(positions_ptr, req_rows_ptr, row, limit, max_requests)
    # A later row of the request that has the same place replaces this one.
    later_live, later_request, _ = _load_live(positions_ptr, req_rows_ptr, row + RING, limit, max_requests)
    if live & ((later_live == 0) | (later_request != request)):
        source = row.to(tl.int64) * WIDTH
        target = (request.to(tl.int64) * RING + position % RING) * WIDTH
        for start in range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < WIDTH
            kv = tl.load(kv_ptr + source + column, mask=inside, other=0.0)
            score = tl.load(score_ptr + source + column, mask=inside, other=0.0)
            tl.store(state_kv_ptr + target + column, kv.to(tl.float32), mask=inside)
            tl.store(state_score_ptr + target + column, score.to(tl.float32), mask=inside)
