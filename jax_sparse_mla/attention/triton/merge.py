"""Triton kernel that joins partial attention results, by the rules of `jax_sparse_mla.merge_attention`."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Executor, Launch, Output, dtype_of


def constants(v_dim: int, num_parts: int, has_sink: bool) -> dict[str, Any]:
    """The constexpr arguments of `merge_kernel`."""
    parts = triton.next_power_of_2(num_parts)
    columns = triton.next_power_of_2(v_dim)
    return {"V_DIM": v_dim, "COLUMNS": columns, "PARTS": parts, "SOME_PARTS": min(parts, 4), "HAS_SINK": has_sink}


@triton.jit
def merge_kernel(
    outs_ptr,  # bf16 or float32 [parts, rows · heads, V_DIM]; a part whose lse is −inf is not read
    lses_ptr,  # float32 [parts, rows · heads], natural
    sink_ptr,  # float32 [heads], read if HAS_SINK
    num_parts,
    num_heads,
    out_ptr,  # [rows · heads, V_DIM], of the parts' dtype
    lse_ptr,  # float32 [rows · heads], or None
    V_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, at least V_DIM
    PARTS: tl.constexpr,  # a power of two, at least num_parts
    SOME_PARTS: tl.constexpr,  # how many are added at a time
    HAS_SINK: tl.constexpr,
):
    """One head of one row: the parts' outputs, weighted by their lse, and the sink in the denominator only."""
    item = tl.program_id(0).to(tl.int64)
    items = tl.num_programs(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    lses = tl.load(lses_ptr + parts * items + item, mask=parts < num_parts, other=float("-inf"))
    top = tl.max(lses, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - shift), 0)
    factor = tl.where(total == 0, 0.0, 1.0 / total)
    lse = tl.where(total == 0, float("-inf"), shift + tl.log(total))
    if lse_ptr is not None:
        tl.store(lse_ptr + item, lse)
    if HAS_SINK:
        sink = tl.load(sink_ptr + item % num_heads)
        factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp(sink - lse)))
    column = tl.arange(0, COLUMNS)
    inside = column < V_DIM
    acc = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_parts, SOME_PARTS):
        at = (start + tl.arange(0, SOME_PARTS)) * items + item
        part_lse = tl.load(lses_ptr + at, mask=at < num_parts * items, other=float("-inf"))
        used = (part_lse != float("-inf"))[:, None] & inside[None, :]
        values = tl.load(outs_ptr + at[:, None] * V_DIM + column[None, :], mask=used, other=0.0)
        acc += tl.sum(values.to(tl.float32) * (tl.exp(part_lse - shift) * factor)[:, None], 0)
    tl.store(out_ptr + item * V_DIM + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


def merge(execute: Executor, outs, lses, sink=None) -> tuple[Any, ...]:
    """out and lse of parts `[parts, ..., heads, v_dim]` and `[parts, ..., heads]`; with a sink lse is None."""
    num_parts, *shape, v_dim = outs.shape
    outputs = Output((*shape, v_dim), dtype_of(outs)), Output(shape, "float32") if sink is None else None
    grid, scalars = (math.prod(shape),), (num_parts, shape[-1])
    launch = Launch(merge_kernel, "merge", grid, scalars, outputs, constants(v_dim, num_parts, sink is not None))
    return execute(launch, (outs, lses, sink))
