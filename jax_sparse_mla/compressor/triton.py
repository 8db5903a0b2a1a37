"""Triton kernels of DeepSeek-V4's compressor, by the rules of `jax_sparse_mla.compressor.api`, in two launches.

First the entries: a program finds the row that completes its entry, pools the row's window, whose tokens come from this
step's rows or from the request's ring, and norms and rotates the result. Then the rings take this step's last tokens,
which replace tokens that other programs of the first launch may still have read.

A window is summed block by block of tokens, oldest first, in every channel by itself: an entry's bits do not depend on
how a kernel shares out the channels, nor on how a prompt is cut into steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.compressor.state import CompressorArrays
from jax_sparse_mla.launch.describe import Executor, Launch, Output

# Steps of at most so many rows are searched by every program; for longer ones a launch of its own does it once.
SEARCHED_ROWS = 1024

FIND_OPTIONS = {"CHUNK": 1024, "COUNTED": 8192, "num_warps": 8}
CARRY_OPTIONS = {"COLUMNS": 512, "num_warps": 4}
CARRY_ROWS = 4  # A program of a long step looks at so many rows and carries few of them.


def entry_constants(
    ratio: int, halves: int, head_dim: int, rope_dim: int, ring: int, loaded: int = 32
) -> dict[str, int]:
    """The constexpr arguments of `window_entry`, with num_warps. A row has `halves`, 2 where windows overlap.

    More tokens `loaded` together, a multiple of 8, take less time and more registers: with a window of 128 tokens of
    512 channels in bfloat16, `entries_kernel` has on SM90 76 registers a thread for 8 tokens and 166 for 32, or 80 and
    171 where MOST is "step". The bits do not depend on it.
    """
    window = halves * ratio
    return {
        "RATIO": ratio,
        "OVERLAP": halves,
        "WINDOW_POW2": triton.next_power_of_2(window),
        "UNROLL": math.gcd(window, 8),
        "LOADED": math.gcd(window, loaded),
        "RING": ring,
        "HEAD_DIM": head_dim,
        "HEAD_POW2": triton.next_power_of_2(head_dim),
        "ROPE_DIM": rope_dim,
        "num_warps": 4 if window <= 32 else 8,
    }


# Parameters that the functions below share. `step`: the pointers of the rows' positions and requests, the number of
# rows in memory, the row where padding begins, the number of requests. `rows`: the pointers of the step's kv and
# scores. `state`: the pointers of the ring's kv and scores, and the first ring row of this layer.


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
    COUNTED: tl.constexpr,  # rows that are counted at a time
):
    """The rows that complete a group, ascending, then -1; a program per CHUNK rows, or entries where they are more.

    Every program reads all live rows, so the reads grow with their square: 0.5 MB for 8,192 rows, 32 MB for 65,536.
    """
    limit = num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    step = positions_ptr, req_rows_ptr, num_rows, limit, max_requests
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    completes = _completes(step, row, RATIO)
    before = num_rows * 0
    total = num_rows * 0
    start = num_rows * 0
    while start < limit:
        other = start + tl.arange(0, COUNTED)
        counts = _completes(step, other, RATIO).to(tl.int32)
        before += tl.sum(tl.where(other < tl.program_id(0) * CHUNK, counts, 0), axis=0)
        total += tl.sum(counts, axis=0)
        start += COUNTED
    index = before + tl.cumsum(completes.to(tl.int32), axis=0) - 1
    tl.store(rows_ptr + index, row, mask=completes & (index < num_entries))
    index = total + row
    tl.store(rows_ptr + index, -1, mask=index < num_entries)


@triton.jit
def _load(ptr, mask, MASKED: tl.constexpr):
    """float32 values; 0 where the mask says no. A mask that is known to say yes costs instructions."""
    if MASKED:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(ptr).to(tl.float32)


@triton.jit
def _load_token(step_ptr, ring_ptr, of_step, exists, SOURCE: tl.constexpr, MASKED: tl.constexpr):
    """Values of a token of this step or, unless SOURCE is "step", of the ring; 0 where it does not exist."""
    if SOURCE == "step":
        return _load(step_ptr, exists, MASKED)
    elif step_ptr.dtype.element_ty == tl.float32:
        return _load(tl.where(of_step, step_ptr, ring_ptr), exists, MASKED)
    else:  # the one or the other is 0; a sum takes fewer registers than a choice
        of_ring = of_step == 0
        if MASKED:
            of_step, of_ring = exists & of_step, exists & of_ring
        return _load(step_ptr, of_step, True) + _load(ring_ptr, of_ring, True)


@triton.jit
def _pool_tokens(
    sums,  # (highest score, sum of the weights, sum of the weighted kv) of the tokens before
    start,  # the first token
    pointers,  # (kv, score) of the window's first token in the step, those of the state, ape; with the channels
    window_at,  # (position of the window's first token, first row of the request's ring, tokens in the ring)
    in_head,  # channels
    SOURCE: tl.constexpr,  # of the tokens' values: "step"; "either"; "tail", the ring but for the last UNROLL
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    UNROLL: tl.constexpr,
    LOADED: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_POW2: tl.constexpr,
):
    """The sums with LOADED more tokens, UNROLL at a time; all their loads are in flight before the first sum."""
    tl.static_assert(LOADED % UNROLL == 0)
    width: tl.constexpr = OVERLAP * HEAD_DIM
    # Only a window that overlaps can begin before the request does.
    MASKED: tl.constexpr = OVERLAP > 1 or HEAD_DIM < HEAD_POW2
    # AHEAD: the tokens lie side by side in the ring, since the window begins at a multiple of RATIO and so of LOADED.
    AHEAD: tl.constexpr = OVERLAP == 1 and RING % LOADED == 0
    kv_ptr, score_ptr, state_kv_ptr, state_score_ptr, ape_ptr = pointers
    first_position, ring, of_ring = window_at
    top, total, pooled = sums
    first_slot = ring + (first_position + start) % RING
    kvs, scores = (), ()
    for i in tl.static_range(LOADED):
        token = start + i
        half = token // RATIO * HEAD_DIM if OVERLAP > 1 else 0  # A of the group before, B of the last one
        position = first_position + token
        exists = in_head & (position >= 0) if OVERLAP > 1 else in_head
        of_step = token >= of_ring
        # Constants are added last: they become part of the loads.
        slot = first_slot + i if AHEAD else ring + position % RING
        step_at, ring_at = start * width, slot * width
        at = i * width + half
        kv_at, score_at = kv_ptr + step_at + at, score_ptr + step_at + at
        ring_at += half
        if SOURCE == "tail" and i < LOADED - UNROLL:
            kv = _load(state_kv_ptr + ring_at, exists, MASKED)
            score = _load(state_score_ptr + ring_at, exists, MASKED)
        else:
            kv = _load_token(kv_at, state_kv_ptr + ring_at, of_step, exists, SOURCE, MASKED)
            score = _load_token(score_at, state_score_ptr + ring_at, of_step, exists, SOURCE, MASKED)
        if SOURCE != "either" and kv_ptr.dtype.element_ty != tl.float32:
            kv += 0.0  # -0 becomes 0, as in the sum of either
        ape_at = start * width + i * width if OVERLAP == 1 else token % RATIO * width + half
        ape = _load(ape_ptr + ape_at, exists, MASKED)
        if MASKED:
            ape = tl.where(exists, ape, float("-inf"))
        kvs, scores = kvs + (kv,), scores + (score + ape,)  # noqa: RUF005  Triton knows no other way
    for block in tl.static_range(0, LOADED, UNROLL):
        higher = top
        for i in tl.static_range(UNROLL):
            higher = tl.maximum(higher, scores[block + i])
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - base)
        total *= kept
        pooled *= kept
        for i in tl.static_range(UNROLL):
            weight = tl.exp(scores[block + i] - base)
            total += weight
            pooled = tl.fma(weight, kvs[block + i], pooled)
        top = higher
    return top, total, pooled


@triton.jit
def window_entry(
    rows,  # each bfloat16 or float32 [num_rows, OVERLAP * HEAD_DIM]
    state,  # each float32 [requests, RING, OVERLAP * HEAD_DIM]
    step,
    params,  # (ape, float32 [RATIO, OVERLAP * HEAD_DIM]; norm weight [HEAD_DIM]; inv_freq [ROPE_DIM / 2]; norm_eps)
    row,  # a live row that completes a group: without overlap its window begins at a multiple of RATIO, 0 or more
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW_POW2: tl.constexpr,
    UNROLL: tl.constexpr,  # tokens that are summed at a time; divides LOADED
    LOADED: tl.constexpr,  # tokens whose loads are in flight together; divides the window
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # even
    HEAD_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    MOST: tl.constexpr,  # "ring" or "step": most tokens of most windows are there. It changes speed alone
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
    of_ring = window - tokens_in_step  # the oldest tokens; the newest are of this step
    # These pointers may be before the arrays' begin; what lies there is not loaded.
    at_first = (row - (window - 1)).to(tl.int64) * width + channel
    pointers = kv_ptr + at_first, score_ptr + at_first, state_kv_ptr + channel, state_score_ptr + channel
    pointers = pointers + (ape_ptr + channel,)  # noqa: RUF005
    window_at = last_position - (window - 1), (request.to(tl.int64) + first_request) * RING, of_ring
    sums = tl.full([HEAD_POW2], float("-inf"), tl.float32), tl.zeros([HEAD_POW2], tl.float32)
    sums = sums + (tl.zeros([HEAD_POW2], tl.float32),)  # noqa: RUF005
    # Triton's time to compile grows with the third power of the loads: no kernel has all three kinds of blocks.
    # fmt: off
    if window == LOADED:  # One block is the whole window: its tokens may be in both.
        sums = _pool_tokens(
            sums, 0, pointers, window_at, in_head,
            "either", RATIO, OVERLAP, UNROLL, LOADED, RING, HEAD_DIM, HEAD_POW2,
        )
    elif MOST == "ring":
        ring_end = of_ring // LOADED * LOADED if of_ring < window - UNROLL else window
        for start in tl.range(0, ring_end, LOADED):
            sums = _pool_tokens(
                sums, start, pointers, window_at, in_head,
                "tail", RATIO, OVERLAP, UNROLL, LOADED, RING, HEAD_DIM, HEAD_POW2,
            )
        for start in tl.range(ring_end, window, UNROLL):
            sums = _pool_tokens(
                sums, start, pointers, window_at, in_head,
                "either", RATIO, OVERLAP, UNROLL, UNROLL, RING, HEAD_DIM, HEAD_POW2,
            )
    else:
        step_begin = tl.cdiv(of_ring, LOADED) * LOADED
        for start in tl.range(0, step_begin, UNROLL):
            sums = _pool_tokens(
                sums, start, pointers, window_at, in_head,
                "either", RATIO, OVERLAP, UNROLL, UNROLL, RING, HEAD_DIM, HEAD_POW2,
            )
        for start in tl.range(step_begin, window, LOADED):
            sums = _pool_tokens(
                sums, start, pointers, window_at, in_head,
                "step", RATIO, OVERLAP, UNROLL, LOADED, RING, HEAD_DIM, HEAD_POW2,
            )
    # fmt: on
    _, total, pooled = sums
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
def carry_rows(
    rows,  # each bfloat16 or float32 [num_rows, WIDTH]
    state,  # each float32 [requests, RING, WIDTH]
    step,
    row,  # a block of rows
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    EAGER: tl.constexpr,  # loads do not wait for what decides of the rows
):
    """Copies rows into their requests' rings, unless a later row of the step has the same place."""
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
        inside = (column < WIDTH)[None, :] & (row < num_rows)[:, None]
        stored = inside & carried[:, None]
        source_at, target_at = source[:, None] + column[None, :], target[:, None] + column[None, :]
        kv = tl.load(kv_ptr + source_at, mask=inside if EAGER else stored, other=0.0)
        score = tl.load(score_ptr + source_at, mask=inside if EAGER else stored, other=0.0)
        tl.store(state_kv_ptr + target_at, kv.to(tl.float32), mask=stored)
        tl.store(state_score_ptr + target_at, score.to(tl.float32), mask=stored)


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
    completing_ptr,  # int32 [num_entries], the rows of find_rows_kernel; not read with ROWS_POW2
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
    LOADED: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_POW2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROWS_POW2: tl.constexpr,  # at least num_rows, or 0: the rows were found before
    MOST: tl.constexpr,  # as of window_entry
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
        row = tl.load(completing_ptr + entry)
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
            LOADED,
            RING,
            HEAD_DIM,
            HEAD_POW2,
            ROPE_DIM,
            MOST,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EAGER: tl.constexpr,
):
    """ROWS rows per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    limit = num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    carry_rows(
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
    *arrays,
    ratio: int,
    norm_eps: float,
    num_entries: int,
    requests: tuple[int, int] | None = None,
    out: Sequence[Any] = (None, None),
) -> tuple[Any, Any, Any, Any]:
    """(entries, rows, state_kv, state_score), as `jax_sparse_mla.compress_kv`, of the fields of `CompressorArrays`.

    `out` are entries and rows to write.
    """
    arrays = CompressorArrays(*arrays)
    state_kv, state_score, kv, score, positions, req_rows, query_start_loc, ape, norm_weight, inv_freq = arrays
    num_rows, num_requests = positions.shape[0], query_start_loc.shape[0] - 1
    first_request, max_requests = requests or (0, state_kv.shape[0])
    ring, head_dim = state_kv.shape[1], norm_weight.shape[0]
    step = positions, req_rows, query_start_loc
    completing, rows_output = positions if out[1] is None else out[1], Output((num_entries,), "int32")
    if num_rows > SEARCHED_ROWS:
        constants, scalars = {"RATIO": ratio, **FIND_OPTIONS}, (num_rows, num_requests, num_entries, max_requests)
        grid = (triton.cdiv(max(num_rows, num_entries), FIND_OPTIONS["CHUNK"]),)
        find = Launch(find_rows_kernel, "compress_find_rows", grid, scalars, (rows_output,), constants)
        completing = execute(find, step, (out[1],))[0]
    constants = entry_constants(ratio, kv.shape[1] // head_dim, head_dim, 2 * inv_freq.shape[0], ring)
    # A request that decodes has a row and its drafts, fewer than 16. Where requests have more on average, a prompt is
    # among them, and it completes most of the windows.
    constants["MOST"] = "step" if num_rows > 16 * num_requests else "ring"
    constants["ROWS_POW2"] = triton.next_power_of_2(num_rows) if num_rows <= SEARCHED_ROWS else 0
    scalars = num_rows, num_requests, max_requests, first_request, norm_eps
    outputs = Output((num_entries, head_dim), "bfloat16"), rows_output
    entries = Launch(entries_kernel, "compress_entries", (num_entries,), scalars, outputs, constants)
    inputs = (kv, score, state_kv, state_score, *step, ape, norm_weight, inv_freq, completing)
    entries, rows = execute(entries, inputs, out)
    return entries, rows, *_carry(execute, arrays, rows, (num_rows, num_requests, max_requests, first_request))


def _carry(execute: Executor, arrays: CompressorArrays, after, scalars: tuple[int, ...]) -> tuple[Any, Any]:
    """(state_kv, state_score) with the last tokens of each request; `scalars` are the kernel's.

    `after` is what another launch made: so XLA sees that the launch has read the state before it is written.
    """
    state_kv, state_score, kv, score, positions, req_rows, query_start_loc, *_ = arrays
    num_rows, *_ = scalars
    outputs = tuple(Output(state_kv.shape, "float32", alias=alias) for alias in (6, 7))
    constants = {"RING": state_kv.shape[1], "WIDTH": state_kv.shape[2], **CARRY_OPTIONS}
    few = num_rows <= SEARCHED_ROWS
    constants |= {"ROWS": 1 if few else CARRY_ROWS, "EAGER": few}
    grid = (triton.cdiv(num_rows, constants["ROWS"]),)
    launch = Launch(carry_kernel, "compress_carry", grid, scalars, outputs, constants)
    return execute(launch, (kv, score, positions, req_rows, query_start_loc, after, state_kv, state_score))
