"""Triton kernels of DeepSeek-V4's compressor, by the rules of `jax_sparse_mla.compressor`, in two launches.

First the entries: a program finds the row that completes its entry, pools the row's window, whose tokens come from this
step's rows or from the request's ring, and norms and rotates the result. Then the rings take this step's last tokens,
which replace tokens that other programs of the first launch may still have read.

A window is summed token by token, oldest first, in every channel by itself: an entry's bits do not depend on how a
kernel shares out the channels, nor on how a prompt is cut into steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.kernels.launch import Executor, Launch, Output

# Steps of at most so many rows are searched by every program; for longer ones a launch of one program does it once.
SEARCHED_ROWS = 1024

FIND_OPTIONS = {"CHUNK": 8192, "num_warps": 16}
CARRY_OPTIONS = {"COLUMNS": 512, "num_warps": 4}


def overlap_of(ratio: int) -> int:
    """Halves of a row, and groups of a window."""
    return 2 if ratio == 4 else 1


def entry_constants(ratio: int, head_dim: int, rope_dim: int, ring: int) -> dict[str, int]:
    """The constexpr arguments of `window_entry`, with num_warps."""
    window = overlap_of(ratio) * ratio
    return {
        "RATIO": ratio,
        "OVERLAP": overlap_of(ratio),
        "WINDOW_POW2": triton.next_power_of_2(window),
        "UNROLL": math.gcd(window, 8),
        "RING": ring,
        "HEAD_DIM": head_dim,
        "HEAD_POW2": triton.next_power_of_2(head_dim),
        "ROPE_DIM": rope_dim,
        "num_warps": 4 if window <= 32 else 8,  # a long window's loads must be in flight together
    }


# What the functions below share: `step` is the pointers of the rows' positions and requests, how many rows there are in
# memory, from which row on they are padding, and how many requests; `rows` the pointers of the step's kv and scores;
# `state` those of the ring's, and its row with which the layer's requests begin.


@triton.jit
def load_live(step, row):
    """(live, request, position) of rows."""
    positions_ptr, req_rows_ptr, num_rows, limit, max_requests = step
    inside = row < num_rows
    position = tl.load(positions_ptr + row, mask=inside, other=-1)
    request = tl.load(req_rows_ptr + row, mask=inside, other=-1)
    live = (row < limit) & (position >= 0) & (request >= 0) & (request < max_requests)
    return live, request, position


@triton.jit
def _completes(step, row, RATIO: tl.constexpr):
    """Whether rows are live and the last ones of a group."""
    live, _, position = load_live(step, row)
    return live & (position % RATIO == RATIO - 1)


@triton.jit
def num_live_rows(query_start_loc_ptr, num_rows, num_requests):
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
    limit = num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    step = positions_ptr, req_rows_ptr, num_rows, limit, max_requests
    found = num_rows * 0
    start = num_rows * 0
    while start < limit:
        row = start + tl.arange(0, CHUNK)
        completes = _completes(step, row, RATIO)
        index = found + tl.cumsum(completes.to(tl.int32), axis=0) - 1
        tl.store(rows_ptr + index, row, mask=completes & (index < num_entries))
        found += tl.sum(completes.to(tl.int32), axis=0)
        start += CHUNK
    while found < num_entries:
        index = found + tl.arange(0, CHUNK)
        tl.store(rows_ptr + index, -1, mask=index < num_entries)
        found += CHUNK


@triton.jit
def _load_token(step_ptr, ring_ptr, of_step, column, exists):
    """float32 values of a token of this step or of the ring; 0 where it does not exist."""
    if step_ptr.dtype.element_ty == tl.float32:
        return tl.load(tl.where(of_step, step_ptr, ring_ptr) + column, mask=exists, other=0.0)
    else:  # the one or the other is 0
        values = tl.load(step_ptr + column, mask=exists & of_step, other=0.0).to(tl.float32)
        return values + tl.load(ring_ptr + column, mask=exists & (of_step == 0), other=0.0)


@triton.jit
def window_entry(
    rows,  # each bfloat16 or float32 [num_rows, OVERLAP * HEAD_DIM]
    state,  # each float32 [requests, RING, OVERLAP * HEAD_DIM]
    step,
    params,  # (ape, float32 [RATIO, OVERLAP * HEAD_DIM]; norm weight [HEAD_DIM]; inv_freq [ROPE_DIM / 2]; norm_eps)
    row,  # the row that completes the entry
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW_POW2: tl.constexpr,
    UNROLL: tl.constexpr,  # tokens whose loads are in flight together; divides the window
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # even
    HEAD_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """The entry, bfloat16 [HEAD_POW2]; what lies past HEAD_DIM is 0.

    Each sum of products says which product it rounds: where it is left to the compiler, two kernels with this code
    round differently, and their cached bytes differ.
    """
    window: tl.constexpr = OVERLAP * RATIO
    width: tl.constexpr = OVERLAP * HEAD_DIM
    kv_ptr, score_ptr = rows
    state_kv_ptr, state_score_ptr, first_request = state
    positions_ptr, req_rows_ptr, _, _, _ = step
    ape_ptr, norm_weight_ptr, inv_freq_ptr, norm_eps = params
    request = tl.load(req_rows_ptr + row)
    last_position = tl.load(positions_ptr + row)
    # Rows before may be another request's, or padding; those of this request follow each other.
    back = tl.arange(0, WINDOW_POW2)
    may_be = (back < window) & (back <= row)
    in_step = may_be & (tl.load(req_rows_ptr + row - back, mask=may_be, other=-1) == request)
    in_step &= tl.load(positions_ptr + row - back, mask=may_be, other=-1) == last_position - back
    tokens_in_step = tl.min(tl.where(in_step, window, back), axis=0)

    channel = tl.arange(0, HEAD_POW2)
    in_head = channel < HEAD_DIM
    ring = (request.to(tl.int64) + first_request) * RING
    top = tl.full([HEAD_POW2], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_POW2], tl.float32)
    pooled = tl.zeros([HEAD_POW2], tl.float32)
    for start in range(0, window, UNROLL):
        # All loads of a block are in flight before the first sum.
        kvs, scores, apes = (), (), ()
        for i in tl.static_range(UNROLL):
            token = start + i
            behind = window - 1 - token
            position = last_position - behind
            column = token // RATIO * HEAD_DIM + channel  # A of the group before, B of the last one
            exists = in_head & (position >= 0)
            of_step = behind < tokens_in_step
            step_at = (row - behind).to(tl.int64) * width
            ring_at = (ring + position % RING) * width
            kv = _load_token(kv_ptr + step_at, state_kv_ptr + ring_at, of_step, column, exists)
            score = _load_token(score_ptr + step_at, state_score_ptr + ring_at, of_step, column, exists)
            kvs, scores = kvs + (kv,), scores + (score,)  # noqa: RUF005  Triton knows no other way
            ape = tl.load(ape_ptr + token % RATIO * width + column, mask=exists, other=0.0)
            apes = apes + (tl.where(exists, ape, float("-inf")),)  # noqa: RUF005
        higher = top
        for i in tl.static_range(UNROLL):
            higher = tl.maximum(higher, scores[i] + apes[i])
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - base)
        total *= kept
        pooled *= kept
        for i in tl.static_range(UNROLL):
            weight = tl.exp(scores[i] + apes[i] - base)
            total += weight
            pooled = tl.fma(weight, kvs[i], pooled)
        top = higher
    pooled = pooled / tl.where(total == 0, 1.0, total)

    scale = tl.rsqrt(tl.sum(tl.fma(pooled, pooled, 0.0), axis=0) / HEAD_DIM + norm_eps)
    normed = pooled * scale * tl.load(norm_weight_ptr + channel, mask=in_head, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(normed, [HEAD_POW2 // 2, 2]))
    pair = tl.arange(0, HEAD_POW2 // 2) - (HEAD_DIM - ROPE_DIM) // 2
    rotates = (pair >= 0) & (pair < ROPE_DIM // 2)
    angle = (last_position - (RATIO - 1)).to(tl.float32) * tl.load(inv_freq_ptr + pair, mask=rotates, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    first, second = tl.fma(even, cos, -(odd * sin)), tl.fma(even, sin, odd * cos)
    rotated = tl.join(tl.where(rotates, first, even), tl.where(rotates, second, odd))
    return tl.reshape(rotated, [HEAD_POW2]).to(tl.bfloat16)


@triton.jit
def carry_row(
    rows,  # each bfloat16 or float32 [num_rows, WIDTH]
    state,  # each float32 [requests, RING, WIDTH]
    step,
    row,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    EAGER: tl.constexpr,  # loads do not wait for what decides of the row
):
    """Copies a row into its request's ring, unless a later row of the step has the same place."""
    kv_ptr, score_ptr = rows
    state_kv_ptr, state_score_ptr, first_request = state
    _, _, num_rows, _, _ = step
    live, request, position = load_live(step, row)
    later_live, later_request, _ = load_live(step, row + RING)
    carried = live & ((later_live == 0) | (later_request != request))
    source = row.to(tl.int64) * WIDTH
    target = ((request.to(tl.int64) + first_request) * RING + position % RING) * WIDTH
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < WIDTH) & (row < num_rows)
        loaded = inside if EAGER else inside & carried
        kv = tl.load(kv_ptr + source + column, mask=loaded, other=0.0)
        score = tl.load(score_ptr + source + column, mask=loaded, other=0.0)
        tl.store(state_kv_ptr + target + column, kv.to(tl.float32), mask=inside & carried)
        tl.store(state_score_ptr + target + column, score.to(tl.float32), mask=inside & carried)


@triton.jit
def entries_kernel(
    kv_ptr,  # bfloat16 or float32 [num_rows, OVERLAP * HEAD_DIM]
    score_ptr,  # the same
    state_kv_ptr,  # float32 [requests, RING, OVERLAP * HEAD_DIM]
    state_score_ptr,  # the same
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    ape_ptr,  # float32 [RATIO, OVERLAP * HEAD_DIM]
    norm_weight_ptr,  # bfloat16 or float32 [HEAD_DIM]
    inv_freq_ptr,  # float32 [ROPE_DIM / 2]
    found_ptr,  # int32 [num_entries], what find_rows_kernel found; not read with ROWS_POW2
    num_rows,
    num_requests,
    max_requests,  # of the layer, whose rows of the state begin with first_request
    first_request,
    norm_eps,
    entries_ptr,  # bfloat16 [num_entries, HEAD_DIM]
    rows_ptr,  # int32 [num_entries]
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW_POW2: tl.constexpr,
    UNROLL: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROWS_POW2: tl.constexpr,  # at least num_rows, or 0: the rows were found before
):
    """An entry per program."""
    entry = tl.program_id(0)
    limit = num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    step = positions_ptr, req_rows_ptr, num_rows, limit, max_requests
    if ROWS_POW2 > 0:
        candidate = tl.arange(0, ROWS_POW2)
        completes = _completes(step, candidate, RATIO)
        index = tl.cumsum(completes.to(tl.int32), axis=0) - 1
        row = tl.max(tl.where(completes & (index == entry), candidate, -1), axis=0)
    else:
        row = tl.load(found_ptr + entry)
    tl.store(rows_ptr + entry, row)

    channel = tl.arange(0, HEAD_POW2)
    target = entries_ptr + entry.to(tl.int64) * HEAD_DIM + channel
    if row >= 0:
        values = window_entry(
            (kv_ptr, score_ptr),
            (state_kv_ptr, state_score_ptr, first_request),
            step,
            (ape_ptr, norm_weight_ptr, inv_freq_ptr, norm_eps),
            row,
            RATIO,
            OVERLAP,
            WINDOW_POW2,
            UNROLL,
            RING,
            HEAD_DIM,
            HEAD_POW2,
            ROPE_DIM,
        )
        tl.store(target, values, mask=channel < HEAD_DIM)
    else:
        tl.store(target, tl.zeros([HEAD_POW2], tl.bfloat16), mask=channel < HEAD_DIM)


@triton.jit
def carry_kernel(
    kv_ptr,  # bfloat16 or float32 [num_rows, WIDTH]
    score_ptr,  # the same
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    after_ptr,  # what a launch made that has read the state; not read
    state_kv_in_ptr,  # the same buffers as the two of the state below
    state_score_in_ptr,
    num_rows,
    num_requests,
    max_requests,
    first_request,
    state_kv_ptr,  # float32 [requests, RING, WIDTH]
    state_score_ptr,  # the same
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    EAGER: tl.constexpr,
):
    """A row per program."""
    row = tl.program_id(0)
    limit = num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    carry_row(
        (kv_ptr, score_ptr),
        (state_kv_ptr, state_score_ptr, first_request),
        (positions_ptr, req_rows_ptr, num_rows, limit, max_requests),
        row,
        RING,
        WIDTH,
        COLUMNS,
        EAGER,
    )


# --- launches: sizes are not zero ------------------------------------------------------------------
# `requests` are the first row and the number of rows of the layer's requests in the state; None: all of them.


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
    """(entries, rows, state_kv, state_score), as `jax_sparse_mla.compress_kv`; `out` are entries and rows to write."""
    num_rows, num_requests = positions.shape[0], query_start_loc.shape[0] - 1
    first_request, max_requests = requests or (0, state_kv.shape[0])
    ring, head_dim = state_kv.shape[1], norm_weight.shape[0]
    step = positions, req_rows, query_start_loc
    found, rows_output = positions if out[1] is None else out[1], Output((num_entries,), "int32")
    if num_rows > SEARCHED_ROWS:
        constants, scalars = {"RATIO": ratio, **FIND_OPTIONS}, (num_rows, num_requests, num_entries, max_requests)
        find = Launch(find_rows_kernel, "compress_find_rows", (1,), scalars, (rows_output,), constants)
        found = execute(find, step, (out[1],))[0]
    constants = entry_constants(ratio, head_dim, 2 * inv_freq.shape[0], ring)
    constants["ROWS_POW2"] = triton.next_power_of_2(num_rows) if num_rows <= SEARCHED_ROWS else 0
    scalars = num_rows, num_requests, max_requests, first_request, norm_eps
    outputs = Output((num_entries, head_dim), "bfloat16"), rows_output
    entries = Launch(entries_kernel, "compress_entries", (num_entries,), scalars, outputs, constants)
    inputs = (kv, score, state_kv, state_score, *step, ape, norm_weight, inv_freq, found)
    entries, rows = execute(entries, inputs, out)
    return entries, rows, *carry(execute, state_kv, state_score, kv, score, *step, rows, requests=requests)


def carry(
    execute: Executor,
    state_kv,
    state_score,
    kv,
    score,
    positions,
    req_rows,
    query_start_loc,
    after,
    *,
    requests: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """(state_kv, state_score) with the last tokens of each request.

    `after` is what another launch made: so XLA sees that the launch has read the state before it is written.
    """
    num_rows, num_requests = positions.shape[0], query_start_loc.shape[0] - 1
    first_request, max_requests = requests or (0, state_kv.shape[0])
    scalars = num_rows, num_requests, max_requests, first_request
    outputs = tuple(Output(state_kv.shape, "float32", alias=alias) for alias in (6, 7))
    constants = {"RING": state_kv.shape[1], "WIDTH": state_kv.shape[2], **CARRY_OPTIONS}
    constants["EAGER"] = num_rows <= SEARCHED_ROWS  # of many rows, few are carried
    launch = Launch(carry_kernel, "compress_carry", (num_rows,), scalars, outputs, constants)
    return execute(launch, (kv, score, positions, req_rows, query_start_loc, after, state_kv, state_score))
