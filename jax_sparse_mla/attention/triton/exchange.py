"""Triton kernels around the exchange of context parallel decode, `jax_sparse_mla.attention.exchange`."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output, dtype_of

# Heads of a program, which copies or merges their outputs.
SEND_OPTIONS = {"ITEMS": 8, "num_warps": 4}
MERGE_OPTIONS = {"ITEMS": 4, "num_warps": 4}


@triton.jit
def send_kernel(
    out_ptr,  # bf16 or float32 [rows, HEADS, WORDS · 4 bytes]
    lse_ptr,  # float32 [rows, HEADS]
    rows,
    quads,
    words_ptr,  # int32 [HEADS // OWN, quads · 4]
    HEADS: tl.constexpr,
    OWN: tl.constexpr,  # heads of a device
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, at least WORDS
    ITEMS: tl.constexpr,
):
    """Heads of rows, copied to the part of the device that merges them: all of a part's outputs, then their lse."""
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    rows = tl.cast(rows, tl.int64)
    inside = item < rows * HEADS
    head = item % HEADS
    part = words_ptr + head // OWN * (tl.cast(quads, tl.int64) * 4)
    target = item // HEADS * OWN + head % OWN
    column = tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None] & (column < WORDS)
    source = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(source + item[:, None] * WORDS + column, mask=mask)
    tl.store((part + target * WORDS)[:, None] + column, words, mask=mask)
    source = lse_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(part + rows * OWN * WORDS + target, tl.load(source + item, mask=inside), mask=inside)


@triton.jit
def merge_received_kernel(
    words_ptr,  # int32 [PARTS, quads · 4]: as send_kernel writes them
    sink_ptr,  # float32 [OWN], read if HAS_SINK
    rows,
    quads,
    out_ptr,  # bf16 or float32 [rows, OWN, V_DIM]
    lse_ptr,  # float32 [rows, OWN]
    OWN: tl.constexpr,
    V_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, at least V_DIM
    IN_WORD: tl.constexpr,  # values of out in a word
    PARTS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Heads of rows: the parts' outputs weighted by their lse, summed in the parts' order, and the sink."""
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    rows, stride = tl.cast(rows, tl.int64), tl.cast(quads, tl.int64) * 4
    inside = item < rows * OWN
    lses = words_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + rows * OWN * (V_DIM // IN_WORD) + item
    top = tl.full((ITEMS,), float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        lse = tl.load(lses + part * stride, mask=inside, other=float("-inf"))
        top = tl.maximum(top, lse, propagate_nan=tl.PropagateNan.ALL)
    empty = top == float("-inf")
    shift = tl.where(empty, 0.0, top)
    total = tl.zeros((ITEMS,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.exp(tl.load(lses + part * stride, mask=inside, other=float("-inf")) - shift)
    factor = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    merged = tl.where(empty, float("-inf"), shift + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + item, merged, mask=inside)
    if HAS_SINK:
        sink = tl.load(sink_ptr + item % OWN)
        factor = tl.where(empty, 0.0, factor / (1.0 + tl.exp(sink - merged)))

    column = tl.arange(0, COLUMNS)[None, :]
    outs = words_ptr.to(tl.pointer_type(out_ptr.dtype.element_ty), bitcast=True) + item[:, None] * V_DIM + column
    mask = inside[:, None] & (column < V_DIM)
    acc = tl.zeros((ITEMS, COLUMNS), tl.float32)
    for part in tl.static_range(PARTS):
        lse = tl.load(lses + part * stride, mask=inside, other=float("-inf"))
        there = mask & (lse != float("-inf"))[:, None]  # what an absent part holds may be anything
        values = tl.load(outs + part * (stride * IN_WORD), mask=there, other=0.0).to(tl.float32)
        acc += values * (tl.exp(lse - shift) * factor)[:, None]
    tl.store(out_ptr + item[:, None] * V_DIM + column, acc.to(out_ptr.dtype.element_ty), mask=mask)


# --- launches: no size is zero ---


def send(execute: Executor, out, lse, *, words: tuple[int, int]) -> Any:
    """The words that each device gets, int32 of the shape `words`; `exchange.send` says what is in them."""
    *leading, heads, v_dim = out.shape
    parts, stride = words
    rows = math.prod(leading)
    width = v_dim * _bytes(dtype_of(out)) // 4
    constants = {"HEADS": heads, "OWN": heads // parts, "WORDS": width, "COLUMNS": triton.next_power_of_2(width)}
    grid, scalars = (triton.cdiv(rows * heads, SEND_OPTIONS["ITEMS"]),), (rows, stride // 4)
    outputs = (Output(words, "int32"),)
    launch = Launch(send_kernel, "send_parts", grid, scalars, outputs, constants | SEND_OPTIONS)
    return execute(launch, (out, lse))[0]


def merge_received(execute: Executor, words, sink=None, *, shape: tuple[int, ...], dtype: str) -> tuple[Any, ...]:
    """out of the shape `[..., own heads, v_dim]` and its lse float32, of the words that all devices sent."""
    *leading, heads, v_dim = shape
    parts, stride = words.shape
    rows, in_word = math.prod(leading), 4 // _bytes(dtype)
    constants = {"OWN": heads, "V_DIM": v_dim, "COLUMNS": triton.next_power_of_2(v_dim), "IN_WORD": in_word}
    grid, scalars = (triton.cdiv(rows * heads, MERGE_OPTIONS["ITEMS"]),), (rows, stride // 4)
    outputs = Output(shape, dtype), Output(shape[:-1], "float32")
    constants |= {"PARTS": parts, "HAS_SINK": sink is not None, **MERGE_OPTIONS}
    launch = Launch(merge_received_kernel, "merge_received", grid, scalars, outputs, constants)
    return execute(launch, (words, sink))


def _bytes(dtype: str) -> int:
    return {"bfloat16": 2, "float32": 4}[dtype]
