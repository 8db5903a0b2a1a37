"""Triton kernels of a V3.2 step's metadata, by the rules of `jax_sparse_mla.metadata.v32`.

Two launches make it: one program over all requests sums up where each one's rows and keys start; then a program for
each block of query rows, one for each block of a request's pages, and one for what concerns the whole batch. RAGGED
steps take a third, which lists the slots of all requests' tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output
from jax_sparse_mla.metadata.triton.schedules import count_at_most
from jax_sparse_mla.metadata.triton.v4 import batch_bounds, locate_row, request_lens
from jax_sparse_mla.metadata.triton.window import divide, request_options, take_2d
from jax_sparse_mla.models import ModelSpec

if TYPE_CHECKING:
    from jax_sparse_mla.metadata.batch import ForwardBatch, RequestTables

_INT_MAX = tl.constexpr(2**31 - 1)

SLOTS_OPTIONS = {"COLUMNS": 256, "num_warps": 4}
_BLOCKS = {"ROWS": 128, "PAGES": 256, "num_warps": 4}
# The fields of V32Metadata that `v32_metadata_kernel` writes, in its order.
_FIELDS = (
    *("seqlens_expanded", "topk_lengths", "positions", "out_cache_loc", "row_to_request", "index_row_starts"),
    *("index_row_ends", "topk_indices_offset", "cu_seqlens_q", "page_table", "overflow"),
)


def v32_outputs(
    spec: ModelSpec, mode: dict[str, int], ragged: bool, num_requests: int, num_rows: int, tokens: int
) -> dict[str, Output]:
    """The fields of V32Metadata; those that a step lacks which is not RAGGED are absent.

    `mode` as `metadata.batch.row_constants`, `tokens` are those that the page table covers.
    """
    rows, requests = Output((num_rows,), "int32"), Output((num_requests + 1,), "int32")
    outputs = dict.fromkeys(_FIELDS, rows) | {
        "cache_seqlens": Output((num_requests,), "int32"),
        "cu_seqlens_q": Output((num_rows + 1,), "int32") if mode["ROWS_EACH"] else requests,
        "cu_seqlens_k": requests,
        "page_table": Output((num_requests, -(-tokens // spec.page_size)), "int32"),
        "overflow": Output((), "bool"),
    }
    if ragged:
        return outputs | {"kv_slots": Output((num_requests * tokens,), "int32")}
    del outputs["topk_indices_offset"]
    return outputs


def v32_constants(spec: ModelSpec, mode: dict[str, int], num_requests: int, tokens: int) -> dict[str, Any]:
    """Constants of `v32_metadata_kernel` for a step whose page table covers `tokens`."""
    return {
        **mode,
        **request_options(num_requests),
        "SEARCH_STEPS": 0 if mode["ROWS_EACH"] else num_requests.bit_length(),
        "PAGE_SIZE": spec.page_size,
        "NUM_PAGES": -(-tokens // spec.page_size),
        "INDEX_TOPK": spec.index_topk,
        **_BLOCKS,
    }


@triton.jit
def request_starts_kernel(
    seq_lens_ptr,  # int32 [num_requests]
    extend_lens_ptr,  # int32 [num_requests], read where ROWS_EACH is 0
    num_requests,
    cache_seqlens_ptr,  # int32 [num_requests]
    cu_seqlens_k_ptr,  # int32 [num_requests + 1]
    starts_ptr,  # int32 [num_requests + 1], the first row of each request; written where ROWS_EACH is 0
    ROWS_EACH: tl.constexpr,
    DRAFTS_TO_ADD: tl.constexpr,
    IDLE: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    keys = tl.zeros((), tl.int64)
    rows = tl.zeros((), tl.int64)
    tl.store(cu_seqlens_k_ptr, 0)
    if ROWS_EACH == 0:
        tl.store(starts_ptr, 0)
    for chunk in range(CHUNKS):
        request = chunk * REQUESTS + tl.arange(0, REQUESTS)
        known = request < num_requests
        length = request_lens(seq_lens_ptr, request, known, DRAFTS_TO_ADD, IDLE)
        tl.store(cache_seqlens_ptr + request, length, mask=known)
        keys_end = keys + tl.cumsum(length.to(tl.int64))
        tl.store(cu_seqlens_k_ptr + 1 + request, tl.minimum(keys_end, _INT_MAX).to(tl.int32), mask=known)
        keys += tl.sum(length.to(tl.int64))
        if ROWS_EACH == 0:
            count = tl.maximum(tl.load(extend_lens_ptr + request, mask=known, other=0), 0).to(tl.int64)
            rows_end = rows + tl.cumsum(count)
            tl.store(starts_ptr + 1 + request, tl.minimum(rows_end, _INT_MAX).to(tl.int32), mask=known)
            rows += tl.sum(count)


@triton.jit
def v32_metadata_kernel(
    req_pool_indices_ptr,  # int32 [num_requests], as the next
    seq_lens_ptr,
    extend_lens_ptr,  # int32 [num_requests], read where ROWS_EACH is 0, as the next
    starts_ptr,  # int32 [num_requests + 1], of request_starts_kernel, as the next two
    cache_seqlens_ptr,
    cu_seqlens_k_ptr,
    out_cache_loc_in_ptr,  # int32 [num_rows]
    req_to_token_ptr,  # int32 [table_rows, table_columns]
    num_requests,
    num_rows,
    max_tokens,
    table_rows,
    table_columns,
    # The fields of V32Metadata.
    seqlens_expanded_ptr,  # int32 [num_rows], as the next six
    topk_lengths_ptr,
    positions_ptr,
    out_cache_loc_ptr,
    row_to_request_ptr,
    index_row_starts_ptr,
    index_row_ends_ptr,
    topk_indices_offset_ptr,  # int32 [num_rows]; None where the step is not RAGGED
    cu_seqlens_q_ptr,  # int32 [num_requests + 1] where ROWS_EACH is 0, else [num_rows + 1]
    page_table_ptr,  # int32 [num_requests, NUM_PAGES]
    overflow_ptr,  # bool scalar
    ROWS_EACH: tl.constexpr,  # query rows of every request; 0 in EXTEND
    DRAFTS_TO_ADD: tl.constexpr,
    IDLE: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    INDEX_TOPK: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
):
    row_blocks = tl.cdiv(num_rows + 1, ROWS)
    program = tl.program_id(0)
    if program == row_blocks:
        batch_bounds(
            seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests, num_rows, max_tokens,
            cu_seqlens_q_ptr if ROWS_EACH == 0 else None, overflow_ptr,
            ROWS_EACH, DRAFTS_TO_ADD, IDLE, REQUESTS, CHUNKS, True,
        )  # fmt: skip
    elif program < row_blocks:
        row = program * ROWS + tl.arange(0, ROWS)
        in_step = row < num_rows
        request, causal, _ = locate_row(
            row, req_pool_indices_ptr, seq_lens_ptr, extend_lens_ptr, starts_ptr, num_requests,
            ROWS_EACH, DRAFTS_TO_ADD, IDLE, SEARCH_STEPS,
        )  # fmt: skip
        live = in_step & (causal > 0)
        first_key = tl.load(cu_seqlens_k_ptr + request, mask=live, other=0)
        tl.store(seqlens_expanded_ptr + row, causal, mask=in_step)
        tl.store(topk_lengths_ptr + row, tl.minimum(causal, INDEX_TOPK), mask=in_step)
        tl.store(positions_ptr + row, causal - 1, mask=in_step)
        tl.store(out_cache_loc_ptr + row, tl.load(out_cache_loc_in_ptr + row, mask=live, other=0), mask=in_step)
        tl.store(row_to_request_ptr + row, request, mask=in_step)
        tl.store(index_row_starts_ptr + row, first_key, mask=in_step)
        # Saturates like cu_seqlens_k. The constant stands behind: Triton 3.8's interpreter takes no tensor after one.
        tl.store(index_row_ends_ptr + row, first_key + tl.minimum(causal, -first_key + _INT_MAX), mask=in_step)
        if topk_indices_offset_ptr is not None:
            tl.store(topk_indices_offset_ptr + row, first_key, mask=in_step)
        if ROWS_EACH > 0:
            tl.store(cu_seqlens_q_ptr + row, row, mask=row <= num_rows)
    else:
        page_blocks: tl.constexpr = (NUM_PAGES + PAGES - 1) // PAGES
        block = program - row_blocks - 1
        owner = block // page_blocks
        page = block % page_blocks * PAGES + tl.arange(0, PAGES)
        in_use = tl.load(cache_seqlens_ptr + owner) > 0
        table_row = tl.where(in_use, tl.load(req_pool_indices_ptr + owner), -1)
        first_slot = take_2d(
            req_to_token_ptr, table_row, page * PAGE_SIZE, table_rows, table_columns, page < NUM_PAGES
        )  # fmt: skip
        listed = page_table_ptr + owner.to(tl.int64) * NUM_PAGES + page
        tl.store(listed, divide(first_slot, PAGE_SIZE), mask=page < NUM_PAGES)


@triton.jit
def kv_slots_kernel(
    req_pool_indices_ptr,  # int32 [num_requests]
    cu_seqlens_k_ptr,  # int32 [num_requests + 1]
    req_to_token_ptr,  # int32 [table_rows, table_columns]
    num_requests,
    table_rows,
    table_columns,
    capacity,
    kv_slots_ptr,  # int32 [capacity]
    SEARCH_STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    element = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    held = (element < capacity) & (element < tl.load(cu_seqlens_k_ptr + num_requests))
    # The last request that starts at or before the element: those without tokens repeat its start.
    request = count_at_most(cu_seqlens_k_ptr, 1, num_requests, element, SEARCH_STEPS) - 1
    position = element - tl.load(cu_seqlens_k_ptr + request, mask=held, other=0)
    table_row = tl.load(req_pool_indices_ptr + request, mask=held, other=-1)
    slots = take_2d(req_to_token_ptr, table_row, position, table_rows, table_columns, held)
    tl.store(kv_slots_ptr + element, slots, mask=element < capacity)


# ---- launches: there are requests ----


def v32_metadata(
    execute: Executor,
    spec: ModelSpec,
    mode: dict[str, int],
    batch: ForwardBatch,
    tables: RequestTables,
    *,
    tokens: int,
    out: dict[str, Any],
) -> None:
    """Writes the arrays of a V3.2 step's metadata; `out` has a tensor for each of `v32_outputs`."""
    seq_lens, extend_lens, req_to_token = batch.seq_lens, batch.extend_lens, tables.req_to_token
    requests, rows = seq_lens.shape[0], batch.out_cache_loc.shape[0]
    outputs = v32_outputs(spec, mode, "kv_slots" in out, requests, rows, tokens)
    absent = seq_lens if extend_lens is None else None  # neither read nor written
    lens, sums, table = outputs["cache_seqlens"], outputs["cu_seqlens_k"], req_to_token.shape
    starts = Launch(
        *(request_starts_kernel, "request_starts", (1,), (requests,), (lens, sums, sums)),
        {**mode, **request_options(requests)},
    )
    by_request = (batch.req_pool_indices, seq_lens, seq_lens if extend_lens is None else extend_lens)
    bounds = execute(starts, by_request[1:], (out["cache_seqlens"], out["cu_seqlens_k"], absent))
    cache_seqlens, cu_seqlens_k, row_starts = bounds

    constants = v32_constants(spec, mode, requests, tokens)
    pages = requests * triton.cdiv(constants["NUM_PAGES"], constants["PAGES"])
    grid, sizes = (1 + triton.cdiv(rows + 1, constants["ROWS"]) + pages,), (requests, rows, tokens, *table)
    written = [outputs.get(name) for name in _FIELDS]
    launch = Launch(v32_metadata_kernel, "v32_metadata", grid, sizes, written, constants)
    inputs = (*by_request, row_starts, cache_seqlens, cu_seqlens_k, batch.out_cache_loc, req_to_token)
    execute(launch, inputs, [out.get(name) for name in _FIELDS])

    capacity = requests * tokens
    if "kv_slots" in out and capacity:
        grid, sizes = (triton.cdiv(capacity, SLOTS_OPTIONS["COLUMNS"]),), (requests, *table, capacity)
        constants = {"SEARCH_STEPS": requests.bit_length(), **SLOTS_OPTIONS}
        slots = Launch(kv_slots_kernel, "kv_slots", grid, sizes, (outputs["kv_slots"],), constants)
        execute(slots, (batch.req_pool_indices, cu_seqlens_k, req_to_token), (out["kv_slots"],))
