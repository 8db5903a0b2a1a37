"""Triton kernels of a step's metadata, by the rules of `jax_sparse_mla.metadata` and `jax_sparse_mla.indices.window`.

One launch makes a V4 step's metadata: per query row, a program for the window and the row's scalars and one for each
block of its pages; one program more for what concerns the whole batch. EXTEND needs a launch before it, for a row's
request is known by where each request's rows start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.kernels.triton.metadata.schedules import count_at_most
from jax_sparse_mla.metadata.batch import ForwardMode
from jax_sparse_mla.metadata.v4 import INDEXED_RATIO, CompressedMetadata, V4Metadata
from jax_sparse_mla.models import ModelSpec

_INT_MAX = tl.constexpr(2**31 - 1)

# The outputs of `v4_metadata_kernel` that every model has, in its order, as fields of V4Metadata.
V4_OUTPUTS = (
    "seq_lens_causal",
    "positions",
    "row_to_request",
    "out_cache_loc",
    "swa_topk_lengths",
    "swa_out_cache_loc",
    "page_table",
    "swa_page_indices",
    "query_start_loc",
    "overflow",
)
OVERFLOW = V4_OUTPUTS.index("overflow")
# Those of a compress ratio, as fields of CompressedMetadata.
_RATIO_OUTPUTS = ("out_loc", "lengths", "topk_lengths", "page_indices")

SWA_OPTIONS = {"num_warps": 4}
GATHER_OPTIONS = {"COLUMNS": 256, "num_warps": 4}
V4_OPTIONS = {"PAGES": 256, "num_warps": 4}
# FlashMLA's paged decode scans indices in blocks of 64.
_WIDTH_MULTIPLE = 64


def request_options(num_requests: int) -> dict[str, int]:
    """Constants of the kernels that one program runs over all requests."""
    block = min(triton.next_power_of_2(num_requests + 1), 1024)
    return {"REQUESTS": block, "CHUNKS": triton.cdiv(num_requests + 1, block), "num_warps": 4}


def swa_constants(window: int) -> dict[str, int]:
    """Constants of `swa_slots_kernel`."""
    return {"WINDOW": window, "BLOCK": triton.next_power_of_2(window)}


def v4_constants(
    spec: ModelSpec, mode: ForwardMode, num_draft_tokens: int | None, num_requests: int, tokens: int
) -> dict[str, Any]:
    """Constants of `v4_metadata_kernel` for a step whose page table covers `tokens`."""
    full = [ratio for ratio in spec.compress_ratios if ratio not in (0, INDEXED_RATIO)]
    pages = -(-tokens // spec.page_size)
    window_width = _round_up(spec.window)
    return {
        "ROWS_EACH": 0 if mode is ForwardMode.EXTEND else (num_draft_tokens or 1),
        "DRAFTS_TO_ADD": num_draft_tokens if mode is ForwardMode.TARGET_VERIFY else 0,
        "IDLE": mode is ForwardMode.IDLE,
        "SEARCH_STEPS": num_requests.bit_length() if mode is ForwardMode.EXTEND else 0,
        "PAGE_SIZE": spec.page_size,
        "NUM_PAGES": pages,
        "WINDOW": spec.window,
        "WINDOW_WIDTH": window_width,
        "WINDOW_BLOCK": triton.next_power_of_2(window_width),
        "INDEXED_RATIO": INDEXED_RATIO if INDEXED_RATIO in spec.compress_ratios else 0,
        "INDEX_TOPK": spec.index_topk or 0,
        "INDEXED_WIDTH": _round_up(spec.index_topk or 0),
        "RATIO": full[0] if full else 0,
        "FULL_WIDTH": _round_up(pages * (spec.page_size // full[0])) if full else 0,
        **request_options(num_requests),
        **V4_OPTIONS,
    }


def v4_shapes(constants: dict[str, Any], num_requests: int, num_rows: int) -> list[tuple[int, ...]]:
    """Shapes of the kernel's outputs, in its order. All int32 but OVERFLOW, a bool."""
    rows = (num_rows,)
    shapes = [rows] * 6
    shapes += [(num_rows, constants["NUM_PAGES"]), (num_rows, constants["WINDOW_WIDTH"]), (num_requests + 1,), ()]
    for ratio, width in (("INDEXED_RATIO", "INDEXED_WIDTH"), ("RATIO", "FULL_WIDTH")):
        if constants[ratio]:
            shapes += [rows] * 3 + [(num_rows, constants[width])]
    return shapes


def v4_absent_outputs(constants: dict[str, Any]) -> dict[str, None]:
    """The kernel's parameters for compress ratios that the model does not have."""
    absent = [name for name, ratio in (("indexed", "INDEXED_RATIO"), ("full", "RATIO")) if not constants[ratio]]
    return {f"{name}_{output}_ptr": None for name in absent for output in _RATIO_OUTPUTS}


def v4_metadata(outputs: Sequence[Any], constants: dict[str, Any]) -> V4Metadata:
    """The kernel's outputs under their names."""
    compressed, rest = {}, list(outputs[10:])
    for ratio in (constants["INDEXED_RATIO"], constants["RATIO"]):
        if ratio:
            compressed[ratio] = CompressedMetadata(**dict(zip(_RATIO_OUTPUTS, rest)))
            del rest[:4]
    return V4Metadata(**dict(zip(V4_OUTPUTS, outputs)), compressed=compressed)


def v4_output_names(constants: dict[str, Any]) -> list[str]:
    """What the kernel's outputs are called in errors."""
    ratios = [ratio for ratio in (constants["INDEXED_RATIO"], constants["RATIO"]) if ratio]
    return [*V4_OUTPUTS, *(f"compressed[{ratio}].{name}" for ratio in ratios for name in _RATIO_OUTPUTS)]


def v4_outputs(metadata: V4Metadata, constants: dict[str, Any]) -> list[Any]:
    """The opposite of `v4_metadata`."""
    ratios = [ratio for ratio in (constants["INDEXED_RATIO"], constants["RATIO"]) if ratio]
    return [getattr(metadata, name) for name in V4_OUTPUTS] + [
        getattr(metadata.compressed[ratio], name) for ratio in ratios for name in _RATIO_OUTPUTS
    ]


def v4_grid(constants: dict[str, Any], num_rows: int) -> tuple[int, int]:
    """Programs of `v4_metadata_kernel`."""
    return num_rows + 1, 1 + triton.cdiv(constants["NUM_PAGES"], constants["PAGES"])


def _round_up(columns: int) -> int:
    return -(-columns // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


# ---- look-ups: -1 where an index is outside its table, or the entry negative ----


@triton.jit
def _take(table_ptr, index, size, mask):
    valid = mask & (index >= 0) & (index < size)
    return tl.maximum(tl.load(table_ptr + index, mask=valid, other=-1), -1)


@triton.jit
def take_2d(table_ptr, row, column, rows, columns, mask):
    valid = mask & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return tl.maximum(tl.load(table_ptr + row.to(tl.int64) * columns + column, mask=valid, other=-1), -1)


@triton.jit
def divide(slot, divisor):
    """Floor division, which keeps -1 at -1."""
    return tl.where(slot >= 0, slot // divisor, -1)


@triton.jit
def _window_slots(
    position, table_row, req_to_token_ptr, full_to_swa_ptr, table_rows, table_columns, swa_entries,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slots of the last WINDOW tokens up to `position`, newest first, -1 padded to BLOCK."""
    back = tl.arange(0, BLOCK)
    column = tl.maximum(position, -1) - back
    full = take_2d(req_to_token_ptr, table_row, column, table_rows, table_columns, back < WINDOW)
    return _take(full_to_swa_ptr, full, swa_entries, back < WINDOW)


@triton.jit
def swa_slots_kernel(
    positions_ptr,  # int32 [rows], as the next
    req_rows_ptr,
    req_to_token_ptr,  # int32 [table_rows, table_columns]
    full_to_swa_ptr,  # int32 [swa_entries]
    table_rows,
    table_columns,
    swa_entries,
    out_ptr,  # int32 [rows, WINDOW]
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slots = _window_slots(
        tl.load(positions_ptr + row), tl.load(req_rows_ptr + row), req_to_token_ptr, full_to_swa_ptr,
        table_rows, table_columns, swa_entries, WINDOW, BLOCK,
    )  # fmt: skip
    back = tl.arange(0, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * WINDOW + back, slots, mask=back < WINDOW)


@triton.jit
def gather_lens_kernel(
    seq_lens_ptr,  # int32 [num_requests], as the next
    extend_lens_ptr,
    num_requests,
    first_pos_ptr,  # int32 [num_requests], as the next
    gather_lens_ptr,
    offsets_ptr,  # int32 [num_requests + 1]
    WINDOW: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    total = tl.zeros((), tl.int64)
    tl.store(offsets_ptr, 0)
    for chunk in range(CHUNKS):
        request = chunk * REQUESTS + tl.arange(0, REQUESTS)
        known = request < num_requests
        length = tl.maximum(tl.load(seq_lens_ptr + request, mask=known, other=0), 0)
        wanted = tl.minimum(tl.load(extend_lens_ptr + request, mask=known, other=0), _INT_MAX - (WINDOW - 1))
        gathered = tl.minimum(tl.maximum(wanted + (WINDOW - 1), 0), length)
        tl.store(first_pos_ptr + request, length - gathered, mask=known)
        tl.store(gather_lens_ptr + request, gathered, mask=known)
        ends = total + tl.cumsum(gathered.to(tl.int64))
        tl.store(offsets_ptr + 1 + request, tl.minimum(ends, _INT_MAX).to(tl.int32), mask=known)
        total += tl.sum(gathered.to(tl.int64))


@triton.jit
def gather_slots_kernel(
    first_pos_ptr,  # int32 [num_requests]
    offsets_ptr,  # int32 [num_requests + 1]
    req_rows_ptr,  # int32 [num_requests]
    req_to_token_ptr,
    full_to_swa_ptr,
    num_requests,
    table_rows,
    table_columns,
    swa_entries,
    capacity,
    slots_ptr,  # int32 [capacity]
    SEARCH_STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    held = (element < capacity) & (element < tl.load(offsets_ptr + num_requests))
    # The last request that starts at or before the element: those without tokens repeat its start.
    request = count_at_most(offsets_ptr, 1, num_requests, element, SEARCH_STEPS) - 1
    start = tl.load(offsets_ptr + request, mask=held, other=0)
    position = tl.load(first_pos_ptr + request, mask=held, other=0) + (element - start)
    row = tl.load(req_rows_ptr + request, mask=held, other=-1)
    full = take_2d(req_to_token_ptr, row, position, table_rows, table_columns, held)
    tl.store(slots_ptr + element, _take(full_to_swa_ptr, full, swa_entries, held), mask=element < capacity)


# ---- V4 ----


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
def batch_facts(
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
def row_facts(
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
    # Of the ratio with an indexer, INDEXED_RATIO; None where that is 0, as the next four with RATIO.
    indexed_out_loc_ptr,  # int32 [num_rows], as the next two
    indexed_lengths_ptr,
    indexed_topk_lengths_ptr,
    indexed_page_indices_ptr,  # int32 [num_rows, INDEXED_WIDTH]
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
    INDEXED_RATIO: tl.constexpr,
    INDEX_TOPK: tl.constexpr,
    INDEXED_WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    FULL_WIDTH: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAGES: tl.constexpr,
):
    row = tl.program_id(0)
    if row == num_rows:
        if tl.program_id(1) == 0:
            batch_facts(
                seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests, num_rows, max_tokens,
                query_start_loc_ptr, overflow_ptr, ROWS_EACH, DRAFTS_TO_ADD, IDLE, REQUESTS, CHUNKS,
            )  # fmt: skip
    else:
        request, causal, table_row = row_facts(
            row, req_pool_indices_ptr, seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests,
            ROWS_EACH, DRAFTS_TO_ADD, IDLE, SEARCH_STEPS,
        )  # fmt: skip
        wide_row = row.to(tl.int64)
        if tl.program_id(1) == 0:
            column = tl.arange(0, WINDOW_BLOCK)
            if INDEXED_RATIO > 0:
                # Each layer's indexer fills these.
                for start in tl.static_range(0, INDEXED_WIDTH, WINDOW_BLOCK):
                    unfilled = indexed_page_indices_ptr + wide_row * INDEXED_WIDTH + start + column
                    tl.store(unfilled, column * 0 - 1, mask=start + column < INDEXED_WIDTH)
            slots = _window_slots(
                causal - 1, table_row, req_to_token_ptr, full_to_swa_ptr,
                table_rows, table_columns, swa_entries, WINDOW, WINDOW_BLOCK,
            )  # fmt: skip
            tl.store(swa_page_indices_ptr + wide_row * WINDOW_WIDTH + column, slots, mask=column < WINDOW_WIDTH)
            live = causal > 0
            write_slot = tl.where(live, tl.load(out_cache_loc_in_ptr + row), 0)
            swa_slot = _take(full_to_swa_ptr, write_slot, swa_entries, live)
            tl.store(seq_lens_causal_ptr + row, causal)
            tl.store(positions_ptr + row, causal - 1)
            tl.store(row_to_request_ptr + row, request)
            tl.store(out_cache_loc_ptr + row, write_slot)
            tl.store(swa_topk_lengths_ptr + row, tl.minimum(causal, WINDOW))
            tl.store(swa_out_cache_loc_ptr + row, tl.where(live, swa_slot, 0))
            if INDEXED_RATIO > 0:
                _store_compressed(
                    row, causal, write_slot, indexed_out_loc_ptr, indexed_lengths_ptr, indexed_topk_lengths_ptr,
                    INDEXED_RATIO, INDEX_TOPK,
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
