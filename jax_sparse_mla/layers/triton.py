"""The Triton kernel of a V4 layer's writes, before it selects and attends: one launch, whatever the layer's ratio.

A program has one task: rows of the indexer's compressor (carried, and where they complete a group pooled, normed,
rotated, transformed and written as a key), rows of the compressor (the same, into the compressed cache), lines of the
indexer's queries, or a row of the sliding window. Each does what the kernels of `compressor`, `kv_cache` and `indexer`
do, to the bit. The tasks that take longest come first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jax_sparse_mla.compressor.triton import (
    CARRY_OPTIONS,
    carry_rows,
    entry_constants,
    load_live,
    num_live_rows,
    window_entry,
)
from jax_sparse_mla.indexer.triton import _DIM, _TOKEN_BYTES, TOKEN_BYTES, _hadamard, _quantize, store_keys
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.kv_cache.triton import at_page, load_bfloat16_bits, store_row
from jax_sparse_mla.launch.describe import Executor, Launch, Output, dtype_of

_CHUNK = tl.constexpr(64)

QUANTIZED_LINES = 32  # of index queries that a program takes


@triton.jit
def _load_signs(signs_ptr):
    """Sylvester's matrix. The kernel runs once a layer and finds no code in the caches: to make it takes more code."""
    i = tl.arange(0, _DIM)
    return tl.load(signs_ptr + i[:, None] * _DIM + i[None, :])


@triton.jit
def v4_layer_kernel(
    # the step
    positions_ptr,  # int32 [num_rows]
    req_rows_ptr,  # int32 [num_rows]
    query_start_loc_ptr,  # int32 [num_requests + 1]
    swa_slots_ptr,  # int32 [num_rows]
    entry_slots_ptr,  # int32 [num_rows], read where the row completes a group
    # the layer's rows and parameters; those of all layers of a kind follow each other
    kv_ptr,  # bfloat16 or float32 [num_rows, QK_DIM]
    attn_sink_ptr,  # float32 [layers * SINKS]
    compressed_kv_ptr,  # bfloat16 or float32 [num_rows, OVERLAP * QK_DIM]
    compressed_score_ptr,
    ape_ptr,  # float32 [layers * RATIO, OVERLAP * QK_DIM]
    norm_weight_ptr,  # bfloat16 or float32 [layers * QK_DIM]
    inv_freq_ptr,  # float32 [layers * ROPE_DIM / 2]
    index_kv_ptr,  # bfloat16 or float32 [num_rows, OVERLAP * 128]
    index_score_ptr,
    index_ape_ptr,  # float32 [layers * RATIO, OVERLAP * 128]
    index_norm_weight_ptr,  # bfloat16 or float32 [layers * 128]
    index_inv_freq_ptr,  # float32 [layers * ROPE_DIM / 2]
    index_q_ptr,  # bfloat16 or float32 [num_rows, INDEX_HEADS, 128]
    index_weights_ptr,  # float32 [num_rows, INDEX_HEADS]
    signs_ptr,  # bfloat16 [128, 128], Sylvester's matrix
    # the same buffers as the caches below; states are read here
    swa_in_ptr,
    compressed_in_ptr,
    state_kv_in_ptr,
    state_score_in_ptr,
    index_k_in_ptr,
    index_state_kv_in_ptr,
    index_state_score_in_ptr,
    num_rows,
    num_requests,
    max_requests,  # of the states
    layer,  # which of the layers
    params_layer,  # which of those whose parameters there are
    swa_pages,  # of a layer
    compressed_pages,
    index_pages,
    norm_eps,
    index_norm_eps,
    swa_ptr,  # uint8 [layers * swa_pages, SWA_PAGE_BYTES]
    compressed_ptr,  # uint8 [layers * compressed_pages, COMPRESSED_PAGE_BYTES]
    state_kv_ptr,  # float32 [layers * max_requests, RING, OVERLAP * QK_DIM]
    state_score_ptr,
    index_k_ptr,  # uint8 [layers * index_pages, INDEX_PAGE_SIZE * 132]
    index_state_kv_ptr,  # float32 [layers * max_requests, RING, OVERLAP * 128]
    index_state_score_ptr,
    sink_ptr,  # float32 [SINKS]
    index_values_ptr,  # e4m3 [num_rows, INDEX_HEADS, 128]
    scaled_weights_ptr,  # float32 [num_rows, INDEX_HEADS], times the scales of index_values
    RATIO: tl.constexpr,  # 0: the sliding window only
    INDEXED: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW_POW2: tl.constexpr,
    UNROLL: tl.constexpr,
    LOADED: tl.constexpr,
    RING: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    QK_DIM: tl.constexpr,  # a power of two
    FP8_DIM: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    FOOTER_BYTES: tl.constexpr,
    MIN_SCALE_EXPONENT: tl.constexpr,
    SWA_PAGE_SIZE: tl.constexpr,
    SWA_PAGE_BYTES: tl.constexpr,
    COMPRESSED_PAGE_SIZE: tl.constexpr,
    COMPRESSED_PAGE_BYTES: tl.constexpr,
    INDEX_PAGE_SIZE: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    SINKS: tl.constexpr,  # heads, or 0: the sink is not copied
    SINKS_POW2: tl.constexpr,
    LINES: tl.constexpr,  # heads of queries that a program takes
    COLUMNS: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    task = tl.program_id(0)
    limit = num_live_rows(query_start_loc_ptr, num_rows, num_requests)
    step = positions_ptr, req_rows_ptr, num_rows, limit, max_requests
    first_request = layer * max_requests

    if INDEXED:
        if task < num_rows:
            rows = index_kv_ptr, index_score_ptr
            carry_rows(
                rows, (index_state_kv_ptr, index_state_score_ptr, first_request), step, task + tl.arange(0, 1),
                RING, OVERLAP * _DIM, OVERLAP * _DIM, True,
            )  # fmt: skip
            live, _, position = load_live(step, task)
            if live & (position % RATIO == RATIO - 1):
                params = (
                    index_ape_ptr + params_layer * (RATIO * OVERLAP * _DIM),
                    index_norm_weight_ptr + params_layer * _DIM,
                    index_inv_freq_ptr + params_layer * (ROPE_DIM // 2),
                    index_norm_eps,
                )
                entry = window_entry(
                    rows, (index_state_kv_in_ptr, index_state_score_in_ptr, first_request), step, params, task,
                    RATIO, OVERLAP, WINDOW_POW2, UNROLL, LOADED, RING, _DIM, _DIM, ROPE_DIM,
                )  # fmt: skip
                # If Triton sees that `entry` is two joined halves, it orders the dot's sums differently and the bits
                # differ from `write_index_k`. Summing over one element hides the join.
                entry = tl.sum(entry.to(tl.float32)[:, None], axis=1).to(tl.bfloat16)
                # A tensor core takes 16 rows; one of them has a slot.
                line = tl.arange(0, 16)
                slot = tl.where(line == 0, tl.load(entry_slots_ptr + task), -1)
                cache_ptr = at_page(index_k_ptr, layer * index_pages, INDEX_PAGE_SIZE * _TOKEN_BYTES)
                keys = tl.broadcast_to(entry[None, :], [16, _DIM])
                store_keys(
                    _hadamard(keys, _load_signs(signs_ptr)), slot, cache_ptr, index_pages, INDEX_PAGE_SIZE, HARDWARE_FP8
                )
        task -= num_rows

    if RATIO > 0:
        if (task >= 0) & (task < num_rows):
            rows = compressed_kv_ptr, compressed_score_ptr
            carry_rows(
                rows, (state_kv_ptr, state_score_ptr, first_request), step, task + tl.arange(0, 1),
                RING, OVERLAP * QK_DIM, COLUMNS, True,
            )  # fmt: skip
            live, _, position = load_live(step, task)
            if live & (position % RATIO == RATIO - 1):
                params = (
                    ape_ptr + params_layer * (RATIO * OVERLAP * QK_DIM),
                    norm_weight_ptr + params_layer * QK_DIM,
                    inv_freq_ptr + params_layer * (ROPE_DIM // 2),
                    norm_eps,
                )
                entry = window_entry(
                    rows, (state_kv_in_ptr, state_score_in_ptr, first_request), step, params, task,
                    RATIO, OVERLAP, WINDOW_POW2, UNROLL, LOADED, RING, QK_DIM, QK_DIM, ROPE_DIM,
                )  # fmt: skip
                bits = tl.reshape(entry, [QK_DIM // _CHUNK, _CHUNK]).to(tl.int16, bitcast=True).to(tl.int32)
                store_row(
                    bits & 0xFFFF,
                    at_page(compressed_ptr, layer * compressed_pages, COMPRESSED_PAGE_BYTES),
                    tl.load(entry_slots_ptr + task),
                    compressed_pages, COMPRESSED_PAGE_SIZE, COMPRESSED_PAGE_BYTES,
                    DATA_BYTES, FOOTER_BYTES, QK_DIM, FP8_DIM, MIN_SCALE_EXPONENT, HARDWARE_FP8,
                )  # fmt: skip
        task -= num_rows

    if INDEXED:
        lines = num_rows * INDEX_HEADS
        blocks = tl.cdiv(lines, LINES)
        if (task >= 0) & (task < blocks):
            line = task * LINES + tl.arange(0, LINES)
            inside = line < lines
            at = line.to(tl.int64)[:, None] * _DIM + tl.arange(0, _DIM)[None, :]
            q = tl.load(index_q_ptr + at, mask=inside[:, None], other=0.0)
            values, scale = _quantize(_hadamard(q, _load_signs(signs_ptr)), HARDWARE_FP8)
            weights = tl.load(index_weights_ptr + line, mask=inside, other=0.0)
            tl.store(index_values_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + at, values, mask=inside[:, None])
            tl.store(scaled_weights_ptr + line, weights * scale, mask=inside)
        task -= blocks

    if task >= 0:
        chunk, column = tl.arange(0, QK_DIM // _CHUNK), tl.arange(0, _CHUNK)
        at = task.to(tl.int64) * QK_DIM + chunk[:, None] * _CHUNK + column[None, :]
        store_row(
            load_bfloat16_bits(kv_ptr + at, (chunk >= 0)[:, None]),
            at_page(swa_ptr, layer * swa_pages, SWA_PAGE_BYTES),
            tl.load(swa_slots_ptr + task),
            swa_pages, SWA_PAGE_SIZE, SWA_PAGE_BYTES,
            DATA_BYTES, FOOTER_BYTES, QK_DIM, FP8_DIM, MIN_SCALE_EXPONENT, HARDWARE_FP8,
        )  # fmt: skip
        if SINKS > 0:  # noqa: SIM102  what is constant decides alone what is compiled
            if task == 0:
                head = tl.arange(0, SINKS_POW2)
                sink = tl.load(attn_sink_ptr + params_layer * SINKS + head, mask=head < SINKS, other=0.0)
                tl.store(sink_ptr + head, sink, mask=head < SINKS)


# --- launches: sizes are not zero ------------------------------------------------------------------


class Compressing(NamedTuple):
    """A compressor's rows and parameters, as `compress_kv` takes them, its state and the cache of its entries."""

    kv: Any
    score: Any
    ape: Any
    norm_weight: Any
    inv_freq: Any
    state_kv: Any
    state_score: Any
    cache: Any


class LayerConstants(NamedTuple):
    """A layer's constants when it is traced."""

    layout: KVLayout  # of the cached rows
    ratio: int  # tokens of an entry, 0 without a compressor
    page_sizes: tuple[int, int]  # tokens of a page of the sliding window, and entries of one of the compressed cache
    layers: tuple[int, int]  # layers whose caches and states are in the arrays, and which of them this one is
    params: tuple[int, int]  # layers whose parameters are in the arrays, and which of them this one is
    norm_eps: tuple[float, float]  # of the compressor's norm, and of the indexer's


NOTHING = Compressing(*[None] * 8)


def v4_layer(
    execute: Executor,
    step,
    kv,
    swa,
    attn_sink,
    compressor: Compressing = NOTHING,
    indexer: Compressing = NOTHING,
    queries: tuple[Any, Any, Any] = (None, None, None),
    *,
    constants: LayerConstants,
) -> tuple[Any, ...]:
    """Writes a layer's caches and states, and makes the inputs of its selection and its attention.

    No row of the step may replace in its ring a token that another row's window reads.

    Args:
      step: arrays as in `layers.write.Step`.
      compressor, indexer: the rows, parameters and caches of both, NOTHING without one.
      kv, swa: the rows of the sliding window, and its cache.
      attn_sink: float32, the sinks of all `constants.params` layers.
      queries: the indexer's queries and weights, and bfloat16 `[128, 128]` Sylvester's matrix.

    Returns:
      `(swa, compressed, state_kv, state_score, index_k, index_state_kv, index_state_score, sink, values, weights)`,
      None for what the layer has not: the arrays written, the layer's sink where there are several layers', and the
      quantised queries with the weights that their scales are multiplied into.
    """
    (num_rows, qk_dim), layout, ratio = kv.shape, constants.layout, constants.ratio
    (layers, layer), (params_layers, params_layer) = constants.layers, constants.params
    has_index, sinks = indexer.kv is not None, attn_sink.shape[0] // params_layers if params_layers > 1 else 0
    caches = swa, compressor.cache, *compressor[5:7], indexer.cache, *indexer[5:7]
    index_heads, lines = queries[0].shape[1] if has_index else 1, QUANTIZED_LINES
    grid = (num_rows * (1 + bool(ratio) + has_index) + triton.cdiv(num_rows * index_heads, lines) * has_index,)
    # Where every program has a multiprocessor of its own, its registers are of no other use.
    loaded = 32 if grid[0] <= execute.device.sm_count else 8
    options, requests = _compressor_options(compressor, constants, qk_dim, loaded)
    options |= {
        "INDEXED": has_index,
        "QK_DIM": qk_dim,
        "FP8_DIM": layout.fp8_dim,
        "DATA_BYTES": layout.data_bytes,
        "FOOTER_BYTES": layout.footer_scale_bytes,
        "MIN_SCALE_EXPONENT": layout.min_scale_exponent,
        "SWA_PAGE_SIZE": constants.page_sizes[0],
        "SWA_PAGE_BYTES": swa.shape[1],
        "COMPRESSED_PAGE_SIZE": constants.page_sizes[1],
        "COMPRESSED_PAGE_BYTES": compressor.cache.shape[1] if ratio else 1,
        "INDEX_PAGE_SIZE": indexer.cache.shape[1] // TOKEN_BYTES if has_index else 1,
        "INDEX_HEADS": index_heads,
        "SINKS": sinks,
        "SINKS_POW2": triton.next_power_of_2(max(sinks, 1)),
        "LINES": lines,
        "COLUMNS": CARRY_OPTIONS["COLUMNS"],
        "HARDWARE_FP8": execute.device.hardware_fp8,
    }
    outputs = [None if x is None else Output(x.shape, dtype_of(x), alias=20 + i) for i, x in enumerate(caches)]
    outputs += [
        Output((sinks,), "float32") if sinks else None,
        Output(queries[0].shape, "float8_e4m3fn") if has_index else None,
        Output(queries[1].shape, "float32") if has_index else None,
    ]
    pages = (0 if x is None else x.shape[0] // layers for x in (swa, compressor.cache, indexer.cache))
    scalars = num_rows, step.query_start_loc.shape[0] - 1, requests, layer, params_layer, *pages, *constants.norm_eps
    inputs = (*step, kv, attn_sink, *compressor[:5], *indexer[:5], *queries, *caches)
    launch = Launch(v4_layer_kernel, "v4_layer", grid, scalars, outputs, options)
    return execute(launch, inputs)


def _compressor_options(
    compressor: Compressing, constants: LayerConstants, qk_dim: int, loaded: int
) -> tuple[dict[str, int], int]:
    """The constants of `window_entry`, and the requests of the state."""
    if not constants.ratio:
        names = "RATIO", "OVERLAP", "WINDOW_POW2", "UNROLL", "LOADED", "RING", "ROPE_DIM"
        return dict.fromkeys(names, 0) | {"num_warps": 4}, 0
    halves, rope_dim = compressor.kv.shape[1] // qk_dim, 2 * compressor.inv_freq.shape[0] // constants.params[0]
    options = entry_constants(constants.ratio, halves, 0, rope_dim, compressor.state_kv.shape[1], loaded)
    del options["HEAD_DIM"], options["HEAD_POW2"]
    return options, compressor.state_kv.shape[0] // constants.layers[0]
