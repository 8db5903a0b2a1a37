"""The gradient of sparse MLA prefill in Triton: dq and dkv, from what the forward pass saved.

A program takes one query row and one tile of heads, and goes through the row's keys in blocks of BLOCK_N. With
p = exp(s − lse), the probabilities without the sink, and for each head `factor`, the share that the sink leaves, and
`offset` = factor · Σ g · out − g_lse, a block adds

    ds = p · (factor · g Vᵀ − offset)     dq += ds K     dK = dsᵀ q, and to its first 512 columns (p · factor)ᵀ g

dq stays in registers. dK is summed over the tile's heads by the products, and then added to the keys' rows in global
memory, where the rows of all programs meet. Float32 additions come in any order, so the last bits differ from run to
run. With FIXED_POINT the numbers are integers of 64 bits, at a power of two for each key: their sum has no order.

Tiles must be powers of two, so rows are read in segments of SEGMENT values and, at dimension 576, one of 64 that is no
part of V. A tile's queries and gradients lie in shared memory as one tile of 2 · BLOCK_H rows: then S and dP are one
product, whose rows fill two warpgroups, and so are the two parts of dK.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton
import triton.language as tl

from jax_sparse_mla.attention.backend import GradientArrays
from jax_sparse_mla.launch.describe import Device, Executor, Launch, Output

LOG2_E = tl.constexpr(1.4426950408889634)
V_DIM = tl.constexpr(512)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The work of one program, and how Triton compiles it."""

    block_h: int
    block_n: int
    segment: int
    num_warps: int
    num_stages: int = 1


def choose_tile(num_heads: int, device: Device) -> Tile:
    """Heads, keys and columns that are added at a time; for SM90 by measurement, elsewhere by what fits.

    64 heads × 64 keys, with one block in flight, take 224 of SM90's 227 KiB of shared memory: 576 values leave no room
    for more than 64 columns at a time on their way to the atomics. 16 heads × 32 keys fit into 99 KiB.
    """
    if device.compute_capability[0] != 9 or num_heads <= 16:
        return Tile(16, 32, 128, 4)
    return Tile(64, 64, 64, 8)


@triton.jit
def _rows(at, exist, START: tl.constexpr, WIDTH: tl.constexpr):
    """Columns START … of rows of bfloat16, from pointers to them; 0 for rows that do not exist."""
    columns = START + tl.arange(0, WIDTH)
    return tl.load(at[:, None] + columns[None, :], mask=exist[:, None], other=0.0)


@triton.jit
def _add(
    dkv,
    slot,
    valid,
    values,
    scale,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    QK_DIM: tl.constexpr,
    FIXED_POINT: tl.constexpr,
):
    """Adds values [BLOCK_N, WIDTH] to columns START … of the rows `slot`."""
    columns = START + tl.arange(0, WIDTH)
    at = slot.to(tl.int64)[:, None] * QK_DIM + columns[None, :]
    if FIXED_POINT:
        whole = (values * scale[:, None]).to(tl.int64)
        tl.atomic_add(dkv.to(tl.pointer_type(tl.int64)) + at, whole, mask=valid[:, None], sem="relaxed")
    else:
        tl.atomic_add(dkv + at, values, mask=valid[:, None], sem="relaxed")


@triton.jit
def backward_kernel(
    q,  # bf16 [rows, heads, QK_DIM]
    kv,  # bf16 [num_keys, QK_DIM]
    indices,  # int32 [rows, topk]
    lengths,  # int32 [rows], or None
    grad,  # bf16 [rows, heads, 512], of out
    lse,  # float32 [rows, heads], natural, without the sink
    factor,  # float32 [rows, heads]
    offset,  # float32 [rows, heads]
    key_scales,  # float32 [num_keys], powers of two; None without FIXED_POINT
    softmax_scale,
    num_heads,
    topk,
    num_keys,
    dq,  # bf16 [rows, heads, QK_DIM]
    dkv,  # float32 [num_keys, QK_DIM], zeros; FIXED_POINT: int64, as int32 [num_keys, 2 · QK_DIM]
    QK_DIM: tl.constexpr,
    FIXED_POINT: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    SEGMENTS: tl.constexpr = V_DIM // SEGMENT
    HAS_ROPE: tl.constexpr = QK_DIM > V_DIM
    # Row-wise offsets are 64-bit: rows · heads · dim passes 2^31.
    tiles = (num_heads + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first_head = (tl.program_id(0) % tiles) * BLOCK_H
    span = topk
    if lengths is not None:
        span = tl.minimum(tl.maximum(tl.load(lengths + row), 0), topk)

    pair_lane = tl.arange(0, 2 * BLOCK_H)  # queries, then gradients
    is_query = pair_lane < BLOCK_H
    exists = first_head + pair_lane % BLOCK_H < num_heads
    pair_head = row * num_heads + first_head + pair_lane % BLOCK_H
    pair = tl.where(is_query, q + pair_head * QK_DIM, grad + pair_head * V_DIM)
    both, dqs = (), ()
    for i in tl.static_range(SEGMENTS):
        both += (_rows(pair, exists, i * SEGMENT, SEGMENT),)
        dqs += (tl.zeros((BLOCK_H, SEGMENT), tl.float32),)
    if HAS_ROPE:
        dq_rope = tl.zeros((BLOCK_H, 64), tl.float32)

    heads = first_head + tl.arange(0, BLOCK_H)
    live = heads < num_heads
    at = row * num_heads + heads
    head_lse = tl.load(lse + at, mask=live, other=float("inf"))
    head_lse = tl.where(head_lse == float("-inf"), float("inf"), head_lse) * LOG2_E
    head_factor = tl.load(factor + at, mask=live, other=0.0)
    head_offset = tl.load(offset + at, mask=live, other=0.0)
    table = indices + row * topk

    for start in range(0, span, BLOCK_N):
        lane = tl.arange(0, BLOCK_N)
        slot = tl.load(table + start + lane, mask=start + lane < span, other=-1)
        valid = (slot >= 0) & (slot < num_keys)
        slot = tl.where(valid, slot, 0)
        rows = kv + slot.to(tl.int64) * QK_DIM
        keys = ()
        for i in tl.static_range(SEGMENTS):
            keys += (_rows(rows, valid, i * SEGMENT, SEGMENT),)
        scale = valid
        if FIXED_POINT:
            scale = tl.load(key_scales + slot, mask=valid, other=0.0)

        scores = tl.zeros((2 * BLOCK_H, BLOCK_N), tl.float32)
        if HAS_ROPE:
            rope = _rows(pair, exists & is_query, V_DIM, 64)
            scores = tl.dot(rope, tl.trans(_rows(rows, valid, V_DIM, 64)), scores)
        for i in tl.static_range(SEGMENTS):
            scores = tl.dot(both[i], tl.trans(keys[i]), scores)
        s, dp = tl.split(tl.permute(tl.reshape(scores, (2, BLOCK_H, BLOCK_N)), (1, 2, 0)))
        p = tl.exp2(s * (softmax_scale * LOG2_E) - head_lse[:, None])
        p = tl.where(valid[None, :], p, 0.0)
        ds = (p * (dp * head_factor[:, None] - head_offset[:, None]) * softmax_scale).to(tl.bfloat16)
        p = (p * head_factor[:, None]).to(tl.bfloat16)
        weights = tl.reshape(tl.permute(tl.join(ds, p), (1, 2, 0)), (BLOCK_N, 2 * BLOCK_H))

        moved = ()
        for i in tl.static_range(SEGMENTS):
            moved += (tl.dot(ds, keys[i], dqs[i]),)
        dqs = moved
        for i in tl.static_range(SEGMENTS):
            dk = tl.dot(weights, both[i])
            _add(dkv, slot, valid, dk, scale, i * SEGMENT, SEGMENT, QK_DIM, FIXED_POINT)
        if HAS_ROPE:
            # Read again, from the L2: shared memory has no room for them besides the segments.
            dq_rope = tl.dot(ds, _rows(rows, valid, V_DIM, 64), dq_rope)
            dk = tl.dot(weights, _rows(pair, exists & is_query, V_DIM, 64))
            _add(dkv, slot, valid, dk, scale, V_DIM, 64, QK_DIM, FIXED_POINT)

    dq_row = dq + at[:, None] * QK_DIM
    for i in tl.static_range(SEGMENTS):
        columns = i * SEGMENT + tl.arange(0, SEGMENT)
        tl.store(dq_row + columns[None, :], dqs[i].to(tl.bfloat16), mask=live[:, None])
    if HAS_ROPE:
        columns = tl.arange(0, 64) + V_DIM
        tl.store(dq_row + columns[None, :], dq_rope.to(tl.bfloat16), mask=live[:, None])


@triton.jit
def statistics_kernel(
    attn_sink,  # float32 [heads], or None
    out,  # bf16 [items, 512]: a head of a row is an item
    lse,  # float32 [items]; infinite, of either sign, where there is no key
    grad,  # bf16 [items, 512], of out
    grad_lse,  # float32 [items]
    items,
    num_heads,
    factor,  # float32 [items]
    offset,  # float32 [items]
    of_sink,  # float32 [items], of the sink's gradient; None without a sink
    BLOCK: tl.constexpr,
):
    """What `statistics` of `attention/gradient.py` has, of BLOCK items."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = item < items
    value = item[:, None] * V_DIM + tl.arange(0, V_DIM)[None, :]
    values = tl.load(out + value, mask=exists[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(values * tl.load(grad + value, mask=exists[:, None], other=0.0).to(tl.float32), 1)
    item_lse = tl.load(lse + item, mask=exists, other=float("inf"))
    empty = tl.abs(item_lse) == float("inf")
    share = tl.where(empty, 0.0, 1.0)
    if attn_sink is not None:
        sink = tl.load(attn_sink + item % num_heads, mask=exists, other=0.0)
        share = tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp(sink - item_lse)))
        taken = 1.0 / (1.0 + tl.exp(item_lse - sink))  # 1 − share, without its rounding
        none = empty | (tl.abs(sink) == float("inf"))
        tl.store(of_sink + item, tl.where(none, 0.0, -taken * delta), mask=exists)
    own = tl.load(grad_lse + item, mask=exists, other=0.0)
    tl.store(factor + item, share, mask=exists)
    tl.store(offset + item, share * delta - tl.where(empty, 0.0, own), mask=exists)


@triton.jit
def probabilities_kernel(
    q,  # bf16 [rows, heads, QK_DIM]
    kv,  # bf16 [num_keys, QK_DIM]
    indices,  # int32 [rows, topk]
    lengths,  # int32 [rows], or None
    lse,  # float32 [rows, heads]
    qk_scale,  # softmax_scale · log2 e
    num_heads,
    topk,
    num_keys,
    out,  # float32 [rows, topk]
    QK_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """exp(score − lse), summed over the heads, of one row and one block of its columns; 0 for those without a key."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    span = topk
    if lengths is not None:
        span = tl.minimum(tl.maximum(tl.load(lengths + row), 0), topk)
    slot = tl.load(indices + row * topk + column, mask=column < span, other=-1)
    valid = (slot >= 0) & (slot < num_keys)
    rows = kv + tl.where(valid, slot, 0).to(tl.int64) * QK_DIM
    keys = ()
    for i in tl.static_range(4):
        keys += (_rows(rows, valid, i * 128, 128),)
    if QK_DIM > V_DIM:
        k_rope = _rows(rows, valid, V_DIM, 64)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, num_heads, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        live = heads < num_heads
        queries = q + (row * num_heads + heads) * QK_DIM
        s = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
        for i in tl.static_range(4):
            s = tl.dot(_rows(queries, live, i * 128, 128), tl.trans(keys[i]), s)
        if QK_DIM > V_DIM:
            s = tl.dot(_rows(queries, live, V_DIM, 64), tl.trans(k_rope), s)
        head_lse = tl.load(lse + row * num_heads + heads, mask=live, other=float("inf"))
        head_lse = tl.where(head_lse == float("-inf"), float("inf"), head_lse) * LOG2_E
        total += tl.sum(tl.exp2(s * qk_scale - head_lse[:, None]), 0)
    tl.store(out + row * topk + column, tl.where(valid, total, 0.0), mask=column < topk)


def backward(
    execute: Executor, arrays: GradientArrays, *, softmax_scale: float, tile: Tile | None = None
) -> tuple[Any, Any]:
    """dq, and dkv in float32 `[num_keys, qk_dim]`; with `key_scales` as int64 in int32 `[num_keys, 2 · qk_dim]`.

    `tile` overrides `choose_tile` (tests, tuning).
    """
    (rows, heads, qk_dim), (num_keys, _) = arrays.q.shape, arrays.kv.shape
    fixed_point = arrays.key_scales is not None
    tile = tile or choose_tile(heads, execute.device)
    constants = {"QK_DIM": qk_dim, "FIXED_POINT": fixed_point, "SEGMENT": tile.segment}
    constants |= {"BLOCK_H": tile.block_h, "BLOCK_N": tile.block_n}
    constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    sums = Output((num_keys, (1 + fixed_point) * qk_dim), "int32" if fixed_point else "float32", zeroed=True)
    outputs = Output((rows, heads, qk_dim), "bfloat16"), sums
    scalars = float(softmax_scale), heads, arrays.indices.shape[1], num_keys
    grid = (rows * -(-heads // tile.block_h),)
    return execute(Launch(backward_kernel, "sparse_mla_backward", grid, scalars, outputs, constants), arrays)


def statistics(execute: Executor, attn_sink: Any | None, out: Any, lse: Any, grad: Any, grad_lse: Any) -> tuple:
    """factor, offset, and of each row what it adds to the sink's gradient, or None: float32 `[rows, heads]`.

    In XLA's programs `attention/gradient.py` has the same as a fusion; torch would write every product to memory.
    """
    rows, heads, _ = out.shape
    shape, block = Output((rows, heads), "float32"), 8
    outputs, grid = (shape, shape, None if attn_sink is None else shape), (-(-rows * heads // block),)
    launch = Launch(
        *(statistics_kernel, "sparse_mla_statistics", grid, (rows * heads, heads), outputs),
        {"BLOCK": block, "num_warps": 4},
    )
    return execute(launch, (attn_sink, out, lse, grad, grad_lse))


def probabilities(
    execute: Executor, q: Any, kv: Any, indices: Any, lengths: Any | None, lse: Any, *, softmax_scale: float
) -> Any:
    """exp(score − lse), summed over the heads: float32 `[rows, topk]`."""
    (rows, heads, qk_dim), topk = q.shape, indices.shape[1]
    wide = execute.device.compute_capability[0] == 9 and heads > 16
    block_h, block_n, num_warps = (64, 64, 4) if wide else (16, 32, 4)
    constants = {"QK_DIM": qk_dim, "BLOCK_H": block_h, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": 1}
    scalars = softmax_scale * LOG2_E.value, heads, topk, kv.shape[0]
    grid, outputs = (rows, -(-topk // block_n)), (Output((rows, topk), "float32"),)
    launch = Launch(probabilities_kernel, "sparse_mla_probabilities", grid, scalars, outputs, constants)
    return execute(launch, (q, kv, indices, lengths, lse))[0]
