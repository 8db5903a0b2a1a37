"""Triton kernels of a step's metadata, by the rules of `jax_sparse_mla.metadata`.

One launch makes a V4 step's metadata: per query row, a program for the window and the row's scalars and one for each
block of its pages; one program more for what concerns the whole batch. EXTEND needs a launch before it, for a row's
request is known by where each request's rows start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output
from jax_sparse_mla.metadata.triton.schedules import count_at_most
from jax_sparse_mla.metadata.triton.window import divide, request_options, take, take_2d, window_slots
from jax_sparse_mla.models import ModelSpec

if TYPE_CHECKING:
    from jax_sparse_mla.metadata.batch import ForwardBatch, RequestTables

_INT_MAX = tl.constexpr(2**31 - 1)

V4_OPTIONS = {"PAGES": 256, "num_warps": 4}
# FlashMLA's paged decode scans indices in blocks of 64.
_WIDTH_MULTIPLE = 64
_MOST_OUTPUTS = 18  # of a model with both kinds of compress ratios

# The name of an output: a field of V4Metadata, or a compress ratio and a field of its CompressedMetadata.
Name = str | tuple[int, str]


def v4_constants(spec: ModelSpec, mode: dict[str, int], num_requests: int, tokens: int) -> dict[str, Any]:
    """Constants of `v4_metadata_kernel`; `mode` as `metadata.batch.row_constants`, the page table covers `tokens`."""
    compressed = [kind for kind in spec.kinds if kind.ratio]
    selected = next((kind.ratio for kind in compressed if kind.selected), 0)
    full = next((kind.ratio for kind in compressed if not kind.selected), 0)
    pages = -(-tokens // spec.page_size)
    window_width = _round_up(spec.window)
    return {
        **mode,
        "SEARCH_STEPS": 0 if mode["ROWS_EACH"] else num_requests.bit_length(),
        "PAGE_SIZE": spec.page_size,
        "NUM_PAGES": pages,
        "WINDOW": spec.window,
        "WINDOW_WIDTH": window_width,
        "WINDOW_BLOCK": triton.next_power_of_2(window_width),
        "SELECTED_RATIO": selected,
        "INDEX_TOPK": spec.index_topk or 0,
        "SELECTED_WIDTH": _round_up(spec.index_topk or 0),
        "RATIO": full,
        "FULL_WIDTH": _round_up(pages * (spec.page_size // full)) if full else 0,
        **request_options(num_requests),
        **V4_OPTIONS,
    }


def v4_outputs(constants: dict[str, Any], num_requests: int, num_rows: int) -> dict[Name, Output]:
    """The kernel's outputs, in its order; the last four or eight are absent where the model lacks their ratio."""
    rows = Output((num_rows,), "int32")
    row_fields = ("seq_lens_causal", "positions", "row_to_request", "out_cache_loc")
    outputs = dict.fromkeys((*row_fields, "swa_topk_lengths", "swa_out_cache_loc"), rows)
    outputs |= {
        "page_table": Output((num_rows, constants["NUM_PAGES"]), "int32"),
        "swa_page_indices": Output((num_rows, constants["WINDOW_WIDTH"]), "int32"),
        "query_start_loc": Output((num_requests + 1,), "int32"),
        "overflow": Output((), "bool"),
    }
    for name, width in (("SELECTED_RATIO", "SELECTED_WIDTH"), ("RATIO", "FULL_WIDTH")):
        if ratio := constants[name]:
            outputs |= {(ratio, name): rows for name in ("out_loc", "lengths", "topk_lengths")}
            outputs[ratio, "page_indices"] = Output((num_rows, constants[width]), "int32")
    return outputs


def _round_up(columns: int) -> int:
    return -(-columns // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


@triton.jit
def request_lens(seq_lens_ptr, request, mask, DRAFTS_TO_ADD: tl.constexpr, IDLE: tl.constexpr):
    """Tokens of requests with this step's; 0 for a padding request."""
    length = tl.maximum(tl.load(seq_lens_ptr + request, mask=mask, other=0), 0)
    if DRAFTS_TO_ADD > 0:
        # Test before adding: the sum wraps.
        length = tl.where(length > 0, tl.minimum(length, _INT_MAX - DRAFTS_TO_ADD) + DRAFTS_TO_ADD, 0)
    return length * (0 if IDLE else 1)


@triton.jit
def row_starts_kernel(
    extend_lens_ptr,  # int32 [num_requests]
    num_requests,
    starts_ptr,  # int32 [num_requests + 1]
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    total = tl.zeros((), tl.int64)
    tl.store(starts_ptr, 0)
    for chunk in range(CHUNKS):
        request = chunk * REQUESTS + tl.arange(0, REQUESTS)
        known = request < num_requests
        count = tl.maximum(tl.load(extend_lens_ptr + request, mask=known, other=0), 0).to(tl.int64)
        end = total + tl.cumsum(count)
        tl.store(starts_ptr + 1 + request, tl.minimum(end, _INT_MAX).to(tl.int32), mask=known)
        total += tl.sum(count)


@triton.jit
def batch_bounds(
    seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests, num_rows, max_tokens, query_start_loc_ptr, overflow_ptr,
    ROWS_EACH: tl.constexpr, DRAFTS_TO_ADD: tl.constexpr, IDLE: tl.constexpr,
    REQUESTS: tl.constexpr, CHUNKS: tl.constexpr, WHOLE_REQUESTS: tl.constexpr = False,
):  # fmt: skip
    """Where requests start, and whether a row, or with WHOLE_REQUESTS a request, is longer than `max_tokens`."""
    rows_end = 0
    overflow = 0
    for chunk in range(CHUNKS):
        request = chunk * REQUESTS + tl.arange(0, REQUESTS)
        known = request < num_requests
        length = request_lens(seq_lens_ptr, request, known, DRAFTS_TO_ADD, IDLE)
        # How many tokens the longest of the request's rows attends to: its last row, of those that the step has.
        longest = length
        if ROWS_EACH == 0:
            count = tl.maximum(tl.load(extend_lens_ptr + request, mask=known, other=0), 0)
            end = tl.load(starts_ptr + request, mask=known, other=0).to(tl.int64) + count
            dropped = tl.maximum(end - num_rows, 0)
            longest = tl.where(dropped < count, longest - dropped, 0)
            last_row = tl.minimum(end, num_rows).to(tl.int32)
        else:
            last_row = (request + 1) * ROWS_EACH
        rows_end = tl.maximum(rows_end, tl.max(tl.where(longest > 0, last_row, 0)))
        overflow |= tl.max(((length if WHOLE_REQUESTS else longest) > max_tokens).to(tl.int32))
    if ROWS_EACH == 0:
        overflow |= (tl.load(starts_ptr + num_requests) > num_rows).to(tl.int32)
    tl.store(overflow_ptr, overflow > 0)

    if query_start_loc_ptr is not None:
        for chunk in range(CHUNKS):
            request = chunk * REQUESTS + tl.arange(0, REQUESTS)
            if ROWS_EACH == 0:
                start = tl.load(starts_ptr + request, mask=request <= num_requests, other=0)
            else:
                start = request * ROWS_EACH
            tl.store(query_start_loc_ptr + request, tl.minimum(start, rows_end), mask=request <= num_requests)


@triton.jit
def locate_row(
    row, req_pool_indices_ptr, seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests,
    ROWS_EACH: tl.constexpr, DRAFTS_TO_ADD: tl.constexpr, IDLE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """A row's request, its causal length and its row of the request tables; 0, 0 and -1 for a padding row."""
    if ROWS_EACH == 0:
        request = count_at_most(starts_ptr, 1, num_requests, row, SEARCH_STEPS) - 1
        held = row < tl.load(starts_ptr + num_requests)
        start = tl.load(starts_ptr + request)
        count = tl.maximum(tl.load(extend_lens_ptr + request), 0)
    else:
        request = row // ROWS_EACH
        held = request < num_requests
        start = request * ROWS_EACH
        count = ROWS_EACH
    length = request_lens(seq_lens_ptr, request, held, DRAFTS_TO_ADD, IDLE)
    table_row = tl.load(req_pool_indices_ptr + request, mask=held, other=-1)
    # A row k rows before its request's last one ends k tokens earlier.
    causal = length - (count - 1 - (row - start))
    live = held & (causal > 0)
    return tl.where(live, request, 0), tl.where(live, causal, 0), tl.where(live, tl.maximum(table_row, -1), -1)


@triton.jit
def _store_compressed(
    row, causal, write_slot, out_loc_ptr, lengths_ptr, topk_lengths_ptr, RATIO: tl.constexpr, MAX_TOPK: tl.constexpr
):
    length = causal // RATIO
    completes_group = (causal > 0) & (causal % RATIO == 0)
    tl.store(out_loc_ptr + row, tl.where(completes_group, divide(write_slot, RATIO), 0))
    tl.store(lengths_ptr + row, length)
    tl.store(topk_lengths_ptr + row, tl.where(causal > 0, tl.minimum(tl.maximum(length, 1), MAX_TOPK), 0))


@triton.jit
def v4_metadata_kernel(
    req_pool_indices_ptr,  # int32 [num_requests], as the next
    seq_lens_ptr,
    extend_lens_ptr,  # int32 [num_requests], read where ROWS_EACH is 0, as the next
    starts_ptr,  # int32 [num_requests + 1], of row_starts_kernel
    out_cache_loc_in_ptr,  # int32 [num_rows]
    req_to_token_ptr,  # int32 [table_rows, table_columns]
    full_to_swa_ptr,  # int32 [swa_entries]
    num_requests,
    num_rows,
    max_tokens,
    table_rows,
    table_columns,
    swa_entries,
    # The fields of V4Metadata.
    seq_lens_causal_ptr,  # int32 [num_rows], as the next five
    positions_ptr,
    row_to_request_ptr,
    out_cache_loc_ptr,
    swa_topk_lengths_ptr,
    swa_out_cache_loc_ptr,
    page_table_ptr,  # int32 [num_rows, NUM_PAGES]
    swa_page_indices_ptr,  # int32 [num_rows, WINDOW_WIDTH]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    overflow_ptr,  # bool scalar
    # The fields of the ratio whose layers select, SELECTED_RATIO, then those of RATIO; None where the ratio is 0.
    selected_out_loc_ptr,  # int32 [num_rows], as the next two
    selected_lengths_ptr,
    selected_topk_lengths_ptr,
    selected_page_indices_ptr,  # int32 [num_rows, SELECTED_WIDTH]
    full_out_loc_ptr,
    full_lengths_ptr,
    full_topk_lengths_ptr,
    full_page_indices_ptr,  # int32 [num_rows, FULL_WIDTH]
    ROWS_EACH: tl.constexpr,  # query rows of every request; 0 in EXTEND
    DRAFTS_TO_ADD: tl.constexpr,
    IDLE: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_WIDTH: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    SELECTED_RATIO: tl.constexpr,
    INDEX_TOPK: tl.constexpr,
    SELECTED_WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    FULL_WIDTH: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAGES: tl.constexpr,
):
    row = tl.program_id(0)
    if row == num_rows:
        if tl.program_id(1) == 0:
            batch_bounds(
                seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests, num_rows, max_tokens,
                query_start_loc_ptr, overflow_ptr, ROWS_EACH, DRAFTS_TO_ADD, IDLE, REQUESTS, CHUNKS,
            )  # fmt: skip
    else:
        request, causal, table_row = locate_row(
            row, req_pool_indices_ptr, seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests,
            ROWS_EACH, DRAFTS_TO_ADD, IDLE, SEARCH_STEPS,
        )  # fmt: skip
        wide_row = row.to(tl.int64)
        if tl.program_id(1) == 0:
            column = tl.arange(0, WINDOW_BLOCK)
            if SELECTED_RATIO > 0:
                # Each layer's indexer fills these.
                for start in tl.static_range(0, SELECTED_WIDTH, WINDOW_BLOCK):
                    unfilled = selected_page_indices_ptr + wide_row * SELECTED_WIDTH + start + column
                    tl.store(unfilled, column * 0 - 1, mask=start + column < SELECTED_WIDTH)
            slots = window_slots(
                causal - 1, table_row, req_to_token_ptr, full_to_swa_ptr,
                table_rows, table_columns, swa_entries, WINDOW, WINDOW_BLOCK,
            )  # fmt: skip
            tl.store(swa_page_indices_ptr + wide_row * WINDOW_WIDTH + column, slots, mask=column < WINDOW_WIDTH)
            live = causal > 0
            write_slot = tl.where(live, tl.load(out_cache_loc_in_ptr + row), 0)
            swa_slot = take(full_to_swa_ptr, write_slot, swa_entries, live)
            tl.store(seq_lens_causal_ptr + row, causal)
            tl.store(positions_ptr + row, causal - 1)
            tl.store(row_to_request_ptr + row, request)
            tl.store(out_cache_loc_ptr + row, write_slot)
            tl.store(swa_topk_lengths_ptr + row, tl.minimum(causal, WINDOW))
            tl.store(swa_out_cache_loc_ptr + row, tl.where(live, swa_slot, 0))
            if SELECTED_RATIO > 0:
                _store_compressed(
                    row, causal, write_slot, selected_out_loc_ptr, selected_lengths_ptr, selected_topk_lengths_ptr,
                    SELECTED_RATIO, INDEX_TOPK,
                )  # fmt: skip
            if RATIO > 0:
                _store_compressed(
                    row, causal, write_slot, full_out_loc_ptr, full_lengths_ptr, full_topk_lengths_ptr,
                    RATIO, _INT_MAX,
                )  # fmt: skip
        else:
            first_page = (tl.program_id(1) - 1) * PAGES
            page = first_page + tl.arange(0, PAGES)
            first_slot = take_2d(
                req_to_token_ptr, table_row, page * PAGE_SIZE, table_rows, table_columns, page < NUM_PAGES
            )
            if RATIO > 0:
                entries: tl.constexpr = PAGE_SIZE // RATIO
                for part in tl.static_range(entries):
                    entry = first_page * entries + part * PAGES + tl.arange(0, PAGES)
                    scanned = (entry < causal // RATIO) & (entry < NUM_PAGES * entries)
                    slot = take_2d(
                        req_to_token_ptr, table_row, entry // entries * PAGE_SIZE, table_rows, table_columns, scanned
                    )
                    slot = tl.where(slot >= 0, slot // PAGE_SIZE * entries + entry % entries, -1)
                    listed = full_page_indices_ptr + wide_row * FULL_WIDTH + entry
                    tl.store(listed, slot, mask=entry < FULL_WIDTH)
            tl.store(page_table_ptr + wide_row * NUM_PAGES + page, divide(first_slot, PAGE_SIZE), mask=page < NUM_PAGES)


# ---- launches: sizes are not zero ----


def v4_metadata(
    execute: Executor,
    constants: dict[str, Any],
    batch: ForwardBatch,
    tables: RequestTables,
    *,
    tokens: int,
    out: dict[Name, Any] | None = None,
) -> dict[Name, Any]:
    """The arrays of a V4 step's metadata; constants as `v4_constants`, `tokens` those that the page table covers."""
    seq_lens, extend_lens, out_cache_loc = batch.seq_lens, batch.extend_lens, batch.out_cache_loc
    requests, rows = seq_lens.shape[0], out_cache_loc.shape[0]
    outputs = v4_outputs(constants, requests, rows)
    starts = seq_lens  # not read, like extend_lens
    if constants["ROWS_EACH"] == 0:
        each = (Output((requests + 1,), "int32"),)
        row_starts = Launch(row_starts_kernel, "row_starts", (1,), (requests,), each, request_options(requests))
        starts = execute(row_starts, (extend_lens,))[0]
    sizes = (requests, rows, tokens, *tables.req_to_token.shape, tables.full_to_swa.shape[0])
    absent = [None] * (_MOST_OUTPUTS - len(outputs))
    grid = rows + 1, 1 + triton.cdiv(constants["NUM_PAGES"], constants["PAGES"])
    launch = Launch(v4_metadata_kernel, "v4_metadata", grid, sizes, [*outputs.values(), *absent], constants)
    by_request = batch.req_pool_indices, seq_lens, seq_lens if extend_lens is None else extend_lens, starts
    buffers = None if out is None else [*(out[name] for name in outputs), *absent]
    arrays = *by_request, out_cache_loc, tables.req_to_token, tables.full_to_swa
    return dict(zip(outputs, execute(launch, arrays, buffers)))
