"""The consumer's work: scores, weights and sums of a block of keys, an item's results."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from jax_sparse_mla.attention.hopper.prefill import ptx, tiles
from jax_sparse_mla.attention.hopper.prefill.few_heads.team import (
    BLOCK,
    SHARED_TYPES,
    SLICE,
    V_SLICES,
    Item,
    Shape,
    Shared,
    Team,
    head_of,
    thread_heads,
    warp_and_lane,
)
from jax_sparse_mla.attention.hopper.prefill.tiles import LEAST, LOG2_E, REF, SLACK, SPLAT, inline, scalar

_SCORE_SUMS = 2  # of a score
_SLICES_AT_ONCE = 2  # of the output


class _State(NamedTuple):
    """A thread's results over the blocks so far."""

    acc: list[list[ir.Value]]  # Oᵀ, slice by slice
    reference: list[ir.Value]
    total: list[ir.Value]  # sums of the weights of its keys
    maximum: list[ir.Value]  # largest scores of its keys

    @classmethod
    def unpacked(cls, shape: Shape, values: list[ir.Value]) -> _State:
        acc = [values[i * shape.sums : (i + 1) * shape.sums] for i in range(V_SLICES)]
        statistics = values[V_SLICES * shape.sums :]
        n = shape.per_thread
        return cls(acc, statistics[:n], statistics[n : 2 * n], statistics[2 * n :])

    def packed(self) -> list[ir.Value]:
        return [*itertools.chain(*self.acc), *self.reference, *self.total, *self.maximum]


def _f32(value: float) -> ir.Value:
    return arith.constant(ir.F32Type.get(), value)


def _initial(shape: Shape) -> jax.Array:
    @inline(returns=shape.state_type)
    def emit(ctx):
        zeros, n = _f32(0.0), shape.per_thread
        state = _State([[zeros] * shape.sums] * V_SLICES, [_f32(LEAST)] * n, [zeros] * n, [_f32(-math.inf)] * n)
        return tiles.per_thread_floats(state.packed())

    return emit()


def _wait_for_queries(shape: Shape, shared: Shared, team, number) -> None:
    @inline(*SHARED_TYPES, SPLAT, SPLAT)
    def emit(ctx, *args):
        *refs, team, number = args
        ptx.barrier_wait_at(Team(shape, refs, scalar(team)).barrier(shape.barriers.queries_full), scalar(number))

    emit(*shared, team, number)


def _step(shape: Shape, scale, shared: Shared, team, last_block, block, state: jax.Array) -> jax.Array:
    """A consumer's work on a block of keys; `scale` has log2(e) in it."""

    @inline(*SHARED_TYPES, SPLAT, SPLAT, SPLAT, SPLAT, shape.state_layout, returns=shape.state_type)
    def emit(ctx, *args):
        *refs, scale, team, last_block, block, state = args
        team, block = Team(shape, refs, scalar(team)), scalar(block)
        state = _State.unpacked(shape, tiles.from_per_thread(state))
        slots = team.slots(block)
        scores = _scores(team, slots)
        _release(team, slots[: shape.tails])
        is_last = arith.cmpi(arith.CmpIPredicate.eq, block, scalar(last_block))
        with mgpu_utils.when(is_last):
            ptx.barrier_arrive_by_warp(team.barrier(shape.barriers.queries_empty))
        scores = _masked(team, block, scores, scalar(scale))
        state = _weigh(team, block, scores, state)
        acc = _multiply(team, slots[shape.tails :], state.acc)
        ptx.barrier_arrive_by_warp(team.barrier(shape.barriers.weights_empty))
        return tiles.per_thread_floats(state._replace(acc=acc).packed())

    return emit(*shared, scale, team, last_block, block, state)


def _release(team: Team, slots) -> None:
    for slot, _ in slots:
        ptx.barrier_arrive_by_warp(team.slot_empty(slot))


def _steps() -> list[int]:
    """Byte offsets of a tile's four groups of 16 columns."""
    return [32 * i for i in range(SLICE // 16)]


def _scores(team: Team, slots) -> list[ir.Value]:
    """The thread's scalars of Sᵀ = K Qᵀ. Products go to several sums in turn: no product waits for the one before."""
    shape = team.shape
    queries = ptx.Operand.at(team.queries, 0, tiles.row_stride(shape.qk_dim))
    sums: list[list[ir.Value] | None] = [None] * _SCORE_SUMS
    half = shape.tails + V_SLICES // 2
    for part in (range(half), range(half, shape.slices)):
        for i in part:
            slot, uses = slots[i]
            ptx.barrier_wait_at(team.slot_full(slot), uses)
        ptx.fence_async_proxy()
        ptx.wgmma_fence()
        for i in part:
            keys = ptx.Operand.at(team.slot_address(slots[i][0]), 0, tiles.row_stride(SLICE))
            first = (i - shape.tails) % shape.slices * tiles.TILE_BYTES
            for step in _steps():
                acc, *others = sums
                acc = ptx.wgmma_shared(acc, keys, queries, n=shape.heads, a_offset=step, b_offset=first + step)
                sums = [*others, acc]
    ptx.wgmma_commit()
    values = ptx.wgmma_wait([*itertools.chain(*sums)], 0)
    parts = [values[i : i + shape.sums] for i in range(0, len(values), shape.sums)]
    return [functools.reduce(arith.addf, same) for same in zip(*parts)]


def _masked(team: Team, block: ir.Value, scores: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    """Scores in base 2, −inf where there is no key."""
    ptx.barrier_wait_at(*team.valid_barrier(block))
    valid = [team.is_valid(block, key) for key in tiles.fragment_rows()]
    nothing = _f32(-math.inf)
    scaled = [arith.mulf(x, scale) for x in scores]
    return [arith.select(valid[tiles.value_row(i)], x, nothing) for i, x in enumerate(scaled)]


def _weigh(team: Team, block: ir.Value, scores: list[ir.Value], state: _State) -> _State:
    """Writes the block's weights, and the state without the block's products."""
    shape = team.shape
    largest = list(state.maximum)
    block_maximum: list[ir.Value | None] = [None] * shape.per_thread
    for i, x in enumerate(scores):
        known = block_maximum[head_of(i)]
        block_maximum[head_of(i)] = x if known is None else arith.maximumf(known, x)
    over = ptx.i32(0)
    for i, x in enumerate(block_maximum):
        largest[i] = arith.maximumf(largest[i], x)
        above = arith.cmpf(arith.CmpFPredicate.OGT, x, arith.addf(state.reference[i], _f32(SLACK)))
        over = arith.ori(over, arith.extui(ptx.i32_type(), above))

    def weights(reference: list[ir.Value]) -> list[ir.Value]:
        """Stores the weights; the thread's sums of them."""
        block_weights = [ptx.exp2(arith.subf(x, reference[head_of(i)])) for i, x in enumerate(scores)]
        _store_weights(team, block_weights)
        ptx.fence_async_proxy()
        of_heads = ([x for i, x in enumerate(block_weights) if head_of(i) == h] for h in range(shape.per_thread))
        return [arith.addf(*pair) for pair in of_heads]

    ptx.barrier_wait_at(team.barrier(shape.barriers.weights_empty), ptx.previous(block))
    sums = weights(state.reference)
    rises = ptx.warpgroup_any(team.vote_barrier, arith.cmpi(arith.CmpIPredicate.ne, over, ptx.i32(0)))
    kept = [*sums, *state.packed()]
    branch = scf.IfOp(rises, [x.type for x in kept], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        highest = team.over_warps(block_maximum, arith.maximumf)
        reference, factors = [], []
        for old, new in zip(state.reference, highest):
            above = arith.cmpf(arith.CmpFPredicate.OGT, new, arith.addf(old, _f32(SLACK)))
            reference.append(arith.select(above, new, old))
            factors.append(ptx.exp2(arith.subf(old, reference[-1])))
        sums_again = weights(reference)
        ptx.warpgroup_sync(team.sync_barrier)
        acc = [[arith.mulf(x, factors[head_of(i)]) for i, x in enumerate(part)] for part in state.acc]
        total = [arith.mulf(x, factor) for x, factor in zip(state.total, factors)]
        scf.yield_([*sums_again, *_State(acc, reference, total, state.maximum).packed()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(kept)
    results = list(branch.results)
    state = _State.unpacked(shape, results[shape.per_thread :])
    total = [arith.addf(x, y) for x, y in zip(state.total, results[: shape.per_thread])]
    return state._replace(total=total, maximum=largest)


def _store_weights(team: Team, values: list[ir.Value]) -> None:
    """Stores a fragment of Sᵀ, rounded, as P: rows are heads. A matrix of 8 x 8 is stored by column."""
    words = [ptx.bfloat16_pair(*values[i : i + 2]) for i in range(0, len(values), 2)]  # [8 heads][8 keys]
    warp, lane = warp_and_lane()
    head, matrix = arith.andi(lane, ptx.i32(7)), arith.shrui(lane, ptx.i32(3))
    chunk = arith.addi(arith.shli(warp, ptx.i32(1)), arith.andi(matrix, ptx.i32(1)))
    address = arith.addi(team.weights, arith.shli(arith.shrui(matrix, ptx.i32(1)), ptx.i32(10)))
    address = arith.addi(address, arith.shli(head, ptx.i32(7)))
    address = arith.addi(address, arith.shli(arith.xori(chunk, head), ptx.i32(4)))
    if len(words) == 2:  # only lanes 0 to 15 give addresses
        address = arith.select(arith.cmpi(arith.CmpIPredicate.ult, matrix, ptx.i32(2)), address, team.weights)
    for i in range(0, len(words), 4):
        here = arith.addi(address, ptx.i32(i // 2 * tiles.TILE_BYTES))
        ptx.store_transposed(here, words[i : i + 4])


def _multiply(team: Team, slots, acc: list[list[ir.Value]]) -> list[list[ir.Value]]:
    """acc + Vᵀ Pᵀ, a few slices in turn, which it then releases."""
    shape = team.shape
    weights = ptx.Operand.at(team.weights, 0, tiles.row_stride(BLOCK))
    acc = list(acc)
    ptx.wgmma_fence()
    groups = [range(i, i + _SLICES_AT_ONCE) for i in range(0, V_SLICES, _SLICES_AT_ONCE)]
    for group in groups:
        for step in range(BLOCK // 16):
            offset = 2 * step * tiles.row_stride(SLICE)
            for i in group:
                values = ptx.Operand.at(team.slot_address(slots[i][0]), 0, tiles.row_stride(SLICE), transposed=True)
                acc[i] = ptx.wgmma_shared(acc[i], values, weights, n=shape.heads, a_offset=offset, b_offset=32 * step)
        ptx.wgmma_commit()
    for number, group in enumerate(groups):
        flat = ptx.wgmma_wait([*itertools.chain(*acc)], len(groups) - 1 - number)
        acc = [flat[j * shape.sums : (j + 1) * shape.sums] for j in range(V_SLICES)]
        _release(team, [slots[i] for i in group])
    return acc


def _write_results(shape: Shape, refs, sizes: tiles.Sizes, shared: Shared, team, item: Item, state: jax.Array) -> None:
    out_ref, max_ref, lse_ref, sink_ref = refs
    sink_refs = [] if sink_ref is None else [sink_ref]

    @inline(REF, REF, REF, *[REF] * len(sink_refs), *SHARED_TYPES, *[SPLAT] * 5, shape.state_layout)
    def emit(ctx, out, max_logits, lse, *args):
        sinks = None
        if sink_refs:
            sinks, *args = args
        *refs, heads, unit, empty_lse, team, t, state = args
        team, t, heads, unit = Team(shape, refs, scalar(team)), scalar(t), scalar(heads), scalar(unit)
        state = _State.unpacked(shape, tiles.from_per_thread(state))
        total = team.over_warps(state.total, arith.addf)
        ptx.warpgroup_sync(team.sync_barrier)
        maximum = team.over_warps(state.maximum, arith.maximumf)
        ours = thread_heads(shape)
        empty = [arith.cmpf(arith.CmpFPredicate.OEQ, x, _f32(0.0)) for x in total]
        shares = []
        for head, x, nothing, reference in zip(ours, total, empty, state.reference):
            denominator = x
            if sinks is not None:
                sink = arith.mulf(tiles.load_sink(sinks, heads, head), _f32(LOG2_E))
                sink = ptx.exp2(arith.subf(sink, reference))
                denominator = arith.addf(denominator, sink)
            shares.append(arith.select(nothing, _f32(0.0), arith.divf(_f32(1.0), denominator)))
        for i, part in enumerate(state.acc):
            state.acc[i] = [arith.mulf(x, shares[head_of(j)]) for j, x in enumerate(part)]
        _store_output(shape, out, heads, t, state.acc)

        writes = arith.cmpi(arith.CmpIPredicate.ult, ptx.thread_in_warpgroup(), ptx.i32(4))
        for i, head in enumerate(ours):
            exists = arith.cmpi(arith.CmpIPredicate.slt, head, heads)
            with mgpu_utils.when(arith.andi(writes, exists)):
                position = ptx.number(t, heads, head)
                ptx.store_4(arith.mulf(maximum[i], unit), max_logits, position)
                value = arith.mulf(arith.addf(state.reference[i], ptx.log2(total[i])), unit)
                ptx.store_4(arith.select(empty[i], scalar(empty_lse), value), lse, position)

    numbers = sizes.heads, sizes.unit, sizes.empty, team, item.t
    emit(out_ref, max_ref, lse_ref, *sink_refs, *shared, *numbers, state)


def _store_output(shape: Shape, out: ir.Value, heads: ir.Value, t: ir.Value, acc: list[list[ir.Value]]) -> None:
    """Stores Oᵀ, rounded, to `out[t]`. Matrices of 8 columns x 8 heads are transposed, then as in `store_columns`."""
    *_, columns = ir.MemRefType(out.type).shape
    warp, lane = warp_and_lane()
    part, row = arith.andi(lane, ptx.i32(3)), arith.shrui(lane, ptx.i32(2))
    # After the exchange lane `part` of four has chunk part mod 2 of the warp's 16 columns, of slice part // 2 of two.
    column = arith.addi(arith.shli(arith.shrui(part, ptx.i32(1)), ptx.i32(6)), arith.shli(warp, ptx.i32(4)))
    column = arith.addi(column, arith.shli(arith.andi(part, ptx.i32(1)), ptx.i32(3)))
    base = arith.addi(ptx.global_address(out), ptx.extend(arith.shli(column, ptx.i32(1))))
    for i in range(shape.heads // 8):
        head = arith.addi(row, ptx.i32(8 * i))
        address = arith.addi(base, arith.muli(ptx.number(t, heads, head), ptx.i64(2 * columns)))
        words = []  # of eight columns each
        for values in acc:
            four = values[4 * i : 4 * i + 4]
            words += [ptx.transposed_matrix(ptx.bfloat16_pair(*four[j : j + 2])) for j in (0, 2)]
        quads = [tiles.transposed(words[j : j + 4], part) for j in range(0, len(words), 4)]
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, head, heads)):
            for j, quad in enumerate(quads):
                ptx.store_16(address, 2 * 2 * SLICE * j, quad)


def consume(shape: Shape, refs, sizes: tiles.Sizes, shared: Shared, team, item: Item) -> None:
    _wait_for_queries(shape, shared, team, item.number)
    step = functools.partial(_step, shape, sizes.scale, shared, team, item.end_block - 1)
    state = lax.fori_loop(item.first_block, item.end_block, step, _initial(shape))
    _write_results(shape, refs, sizes, shared, team, item, state)
