"""Sparse MLA prefill for SM90 in Pallas Mosaic GPU: a persistent kernel (docs/internals/kernels-prefill.md).

A thread block takes work items one after the other; an item is 64 heads of a query token. It goes through the token's
keys in pairs of blocks of 64. Two warpgroups are consumers: warpgroup 0 scores block 0 and owns the left half of the
output, warpgroup 1 scores block 1 and owns the right half. Each multiplies the weights of both blocks with its half of
V: its own weights from registers, the other's from shared memory. Warpgroup 2 is the producer and gathers rows with
cp.async. While one consumer computes its softmax, the other's products keep the tensor cores busy.

Weights are exp2(score − reference), with one reference for each head. Warpgroup 0 updates the reference by block 0 and
passes it to warpgroup 1, which updates it by block 1 and passes it back. It rises only when a block's maximum is more
than 8 above it. Weights up to 256 lose no precision, and nearly all pairs leave the accumulators as they are.

The rows of a key block are two halves of 256 columns, which are gathered and released separately. Keys of d 576 also
have a tail of 64 columns, which is no part of V. Once the tail is scored, the block's weights replace it.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf

from jax_sparse_mla.attention.hopper.prefill import ptx, tiles
from jax_sparse_mla.attention.hopper.prefill.tiles import (
    BY_COLUMN,
    BY_ROW,
    FRAGMENT,
    LEAST,
    LOG2_E,
    REF,
    SLACK,
    SPLAT,
    TILED,
    TILES,
    Sizes,
    columns_scanned,
    inline,
    scalar,
)
from jax_sparse_mla.attention.index_table import V_DIM

HEADS = tiles.ROWS  # of a work item
BLOCK = tiles.ROWS  # keys that one warpgroup scores at a time
PAIR = 2 * BLOCK
HALF = V_DIM // 2  # columns of the output that one warpgroup owns
_TAIL = 64  # columns that are no part of V

_SCORED_BARRIER = 6  # a named barrier; Mosaic's own are 0 to 4

# A thread has 168 registers at launch; the consumers take what the producer gives up.
_PRODUCER_REGISTERS = 72
_CONSUMER_REGISTERS = 216

_ROW_NUMBERS = tiles.per_thread_layout(2 * tiles.ROWS_PER_THREAD)  # of both blocks of a pair


class Barrier(enum.IntEnum):
    """The meaning of a barrier's completion; two barriers for a pair's blocks, four for their halves: [block][half]."""

    FULL = 0  # the half has arrived; the tail comes with block 0's right half and block 1's left half
    EMPTY = 4  # no warpgroup reads the half any more
    VALID = 8  # the mask of the block's keys is written
    REFERENCE = 10  # the reference after block 0 is written
    WEIGHTS = 11  # the block's weights are written, relative to the reference after both blocks, which is written too
    QUERIES_FULL = 13
    QUERIES_EMPTY = 14  # both consumers have arrived
    SUMS = 15  # both consumers' sums of weights are written


_ARRIVALS = [ptx.WARPGROUP] * Barrier.QUERIES_EMPTY + [2 * ptx.WARPGROUP] * 2


class Shared(NamedTuple):
    """The shared memory of a thread block, with bytes at d 512 / 576."""

    queries: jax.Array  # bfloat16 [64, qk_dim]: 65,536 / 73,728
    keys: jax.Array  # bfloat16 [2, 64, 512]: 131,072
    weights: jax.Array  # bfloat16 [2, 64, 64], before them the keys' tails: 16,384
    valid: jax.Array  # int32 [2, 64]: 1 where the key exists
    references: jax.Array  # float32 [2, 64]: after block 0, after both blocks
    maximum: jax.Array  # float32 [1, 64]: over warpgroup 1's blocks
    sums: jax.Array  # float32 [2, 64]: of each consumer's weights
    barriers: jax.Array  # int32 pairs


class Item(NamedTuple):
    """A work item of a thread block. Barriers count the block's items, or the pairs of all its items."""

    number: jax.Array
    t: jax.Array
    first_head: jax.Array
    limit: jax.Array  # columns scanned
    first_pair: jax.Array
    end_pair: jax.Array


def _scratch(qk_dim: int) -> list:
    return [
        plgpu.SMEM((HEADS, qk_dim), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((2, BLOCK, V_DIM), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((2, HEADS, BLOCK), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((2, BLOCK), jnp.int32),
        plgpu.SMEM((2, HEADS), jnp.float32),
        plgpu.SMEM((1, HEADS), jnp.float32),
        plgpu.SMEM((2, HEADS), jnp.float32),
        plgpu.SMEM((2 * len(_ARRIVALS),), jnp.int32),
    ]


# --- barriers ------------------------------------------------------------------------------------------------------


def _half_barrier(kind: Barrier, block: int, half: int) -> int:
    return kind + 2 * block + half


def _init_barriers(shared: Shared) -> None:
    @inline(REF)
    def emit(ctx, barriers):
        ptx.barriers_init(barriers, _ARRIVALS)

    emit(shared.barriers)


def _wait(shared: Shared, barrier: int, phase: jax.Array, *, for_wgmma: bool = False) -> None:
    """Waits until phase number `phase` has completed; `for_wgmma` where wgmma then reads what was written before."""

    @inline(REF, SPLAT)
    def emit(ctx, barriers, phase):
        ptx.barrier_wait(barriers, barrier, scalar(phase))
        if for_wgmma:
            ptx.fence_async_proxy()

    emit(shared.barriers, phase)


def _arrive(shared: Shared, barrier: int, *, for_wgmma: bool = False) -> None:
    @inline(REF)
    def emit(ctx, barriers):
        if for_wgmma:
            ptx.fence_async_proxy()
        ptx.barrier_arrive(barriers, barrier)

    emit(shared.barriers)


# --- the producer --------------------------------------------------------------------------------------------------


def _gather_queries(q_ref, shared: Shared, sizes: Sizes, t, first_head, item) -> None:
    """Copies 64 heads of a token; heads that there are not become zero."""

    @inline(REF, TILES, REF, *[SPLAT] * 5)
    def emit(ctx, q, queries, barriers, heads, q_heads, t, first_head, item):
        *_, columns = ir.MemRefType(q.type).shape
        rows, sources = [], []
        for row in tiles.thread_rows():
            head = arith.addi(scalar(first_head), row)
            exists = arith.cmpi(arith.CmpIPredicate.slt, head, scalar(heads))
            rows.append(arith.select(exists, head, ptx.i32(-1)))
            sources.append(tiles.source_address(q, ptx.number(scalar(t), scalar(q_heads), head)))
        target = tiles.tile_address(queries, columns)
        ptx.barrier_wait(barriers, Barrier.QUERIES_EMPTY, ptx.previous(scalar(item)))
        tiles.copy_rows(target, columns, range(columns // tiles.TILE_COLUMNS), rows, sources)
        ptx.barrier_arrive_after_copies(barriers, Barrier.QUERIES_FULL)

    emit(q_ref, shared.queries, shared.barriers, sizes.heads, sizes.q_heads, t, first_head, item)


def _gather_pair(row_numbers, kv_ref, shared: Shared, pair) -> None:
    """Starts the copies of a pair of blocks, half by half in the order in which the consumers release them."""

    @inline(_ROW_NUMBERS, REF, *(TILES,) * 4, REF, REF, SPLAT)
    def emit(ctx, row_numbers, kv, *refs):
        keys_0, keys_1, tail_0, tail_1, valid, barriers, pair = refs
        rows = tiles.from_per_thread(row_numbers)
        rows = rows[: tiles.ROWS_PER_THREAD], rows[tiles.ROWS_PER_THREAD :]
        sources = [[tiles.source_address(kv, ptx.extend(row)) for row in block] for block in rows]
        keys = [tiles.tile_address(ref, V_DIM) for ref in (keys_0, keys_1)]
        tails = [tiles.tile_address(ref, _TAIL) for ref in (tail_0, tail_1)]
        half_tiles = HALF // tiles.TILE_COLUMNS
        for block, half in ((0, 0), (1, 1), (0, 1), (1, 0)):
            ptx.barrier_wait(barriers, _half_barrier(Barrier.EMPTY, block, half), ptx.previous(scalar(pair)))
            first = half == block
            if first:
                _store_valid(valid, block, rows[block])
                ptx.barrier_arrive(barriers, Barrier.VALID + block)
            copied = range(half * half_tiles, (half + 1) * half_tiles)
            tiles.copy_rows(keys[block], V_DIM, copied, rows[block], sources[block])
            if not first and ir.MemRefType(kv.type).shape[1] > V_DIM:
                tiles.copy_rows(tails[block], _TAIL, [0], rows[block], sources[block], V_DIM // tiles.TILE_COLUMNS)
            ptx.barrier_arrive_after_copies(barriers, _half_barrier(Barrier.FULL, block, half))

    keys, tails = shared.keys, shared.weights
    emit(
        *(row_numbers, kv_ref, keys.at[0], keys.at[1], tails.at[0], tails.at[1]), *(shared.valid, shared.barriers, pair)
    )


def _store_valid(valid, block: int, rows) -> None:
    """Stores the mask of a block's keys; eight threads store the same value."""
    for key, row in zip(tiles.thread_rows(), rows):
        exists = arith.cmpi(arith.CmpIPredicate.sge, row, ptx.i32(0))
        value = arith.select(exists, ptx.i32(1), ptx.i32(0))
        memref.store(value, valid, [ptx.index(ptx.i32(block)), ptx.index(key)])


# --- products ------------------------------------------------------------------------------------------------------


def _fragment_type(columns: int) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((HEADS, columns), jnp.float32, FRAGMENT)


def _scores(block: int, shared: Shared, pair) -> jax.Array:
    """q · k of a block. The half that is released first is scored first."""
    qk_dim = shared.queries.shape[1]

    @inline(*(TILES,) * 3, REF, SPLAT, returns=_fragment_type(BLOCK))
    def emit(ctx, queries, keys, tail, barriers, pair):
        queries = ptx.wgmma_descriptor(queries, 0, tiles.row_stride(qk_dim))
        keys = ptx.wgmma_descriptor(keys, 0, tiles.row_stride(V_DIM))
        acc = [llvm.UndefOp(ir.F32Type.get()).result] * (BLOCK // 2)
        half_tiles = HALF // tiles.TILE_COLUMNS
        steps = []  # byte offsets of queries and keys, 16 columns each
        for half in (block, 1 - block):
            ptx.barrier_wait(barriers, _half_barrier(Barrier.FULL, block, half), scalar(pair))
            ptx.fence_async_proxy()
            ptx.wgmma_fence()
            for tile in range(half * half_tiles, (half + 1) * half_tiles):
                for offset in _tile_steps(tile):
                    acc = ptx.wgmma(acc, queries, keys, a_offset=offset, b_offset=offset, accumulate=bool(steps))
                    steps.append(offset)
        if qk_dim > V_DIM:
            tail = ptx.wgmma_descriptor(tail, 0, tiles.row_stride(_TAIL))
            for a_offset, b_offset in zip(_tile_steps(V_DIM // tiles.TILE_COLUMNS), _tile_steps(0)):
                acc = ptx.wgmma(acc, queries, tail, a_offset=a_offset, b_offset=b_offset)
        ptx.wgmma_commit()
        return tiles.fragment(ptx.wgmma_wait(acc, 0), (HEADS, BLOCK))

    return emit(shared.queries, shared.keys.at[block], shared.weights.at[block], shared.barriers, pair)


def _sync_scored(shared: Shared) -> None:
    """Lets the right warpgroup replace its block's tail by weights: the products of all four warps have read it.

    The left one's weights come after an answer of the right one, for which all of its threads arrived.
    """
    if shared.queries.shape[1] == V_DIM:
        return

    @inline()
    def emit(ctx):
        ptx.warpgroup_sync(ptx.i32(_SCORED_BARRIER))

    emit()


def _tile_steps(tile: int) -> list[int]:
    """Byte offsets of a tile's four groups of 16 columns."""
    return [tile * tiles.TILE_BYTES + 32 * i for i in range(tiles.TILE_COLUMNS // 16)]


def _multiply(acc, weights, shared: Shared, block: int, half: int) -> jax.Array:
    """Starts acc + weights @ V of a block and leaves it in flight; None takes the weights in shared memory."""

    @inline(FRAGMENT, *([] if weights is None else [FRAGMENT]), TILES, TILES, returns=_fragment_type(HALF))
    def emit(ctx, acc, *operands):
        *registers, shared_weights, keys = operands
        values = ptx.wgmma_descriptor(keys, tiles.TILE_BYTES, tiles.row_stride(V_DIM))
        words = tiles.fragment_words(registers[0]) if registers else None
        descriptor = ptx.wgmma_descriptor(shared_weights, 0, tiles.row_stride(BLOCK))
        acc = tiles.fragment_values(acc)
        ptx.wgmma_fence()
        for i, offset in enumerate(_tile_steps(0)):
            rows = 2 * i * tiles.row_stride(V_DIM) + half * HALF // tiles.TILE_COLUMNS * tiles.TILE_BYTES
            a = words[4 * i : 4 * i + 4] if registers else descriptor
            acc = ptx.wgmma(acc, a, values, a_offset=offset, b_offset=rows, transpose_b=True)
        ptx.wgmma_commit()
        return tiles.fragment(acc, (HEADS, HALF))

    registers = [] if weights is None else [weights]
    return emit(acc, *registers, shared.weights.at[block], shared.keys.at[block])


def _finish(acc, in_flight: int = 0) -> jax.Array:
    """Waits until at most `in_flight` products, the latest, are in flight; returns acc."""

    @inline(FRAGMENT, returns=_fragment_type(HALF))
    def emit(ctx, acc):
        return tiles.fragment(ptx.wgmma_wait(tiles.fragment_values(acc), in_flight), (HEADS, HALF))

    return emit(acc)


# --- the consumers -------------------------------------------------------------------------------------------------


def _load(ref, row: int, layout) -> jax.Array:
    """`plgpu.load`, as either version of JAX spells it."""
    index = (row, slice(None))
    if jax.__version_info__ < (0, 11):
        return plgpu.load(ref, index, layout=layout, optimized=False)
    return plgpu.load(ref.at[index], layout=layout, optimized=False)


def _spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts one number for each row over the columns."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def _masked_scores(block: int, shared: Shared, pair, last_pair, scale) -> jax.Array:
    """Scores in base 2 (`scale` has log2(e) in it), −inf where there is no key."""
    scores = _scores(block, shared, pair)

    @pl.when(pair == last_pair)
    def _():
        _arrive(shared, Barrier.QUERIES_EMPTY)

    _wait(shared, Barrier.VALID + block, pair)
    valid = lax.broadcast_in_dim(_load(shared.valid, block, BY_COLUMN), scores.shape, [1])
    return jnp.where(valid > 0, scores * scale, -jnp.inf)


def _raised(reference: jax.Array, maximum: jax.Array) -> jax.Array:
    return jnp.where(maximum > reference + SLACK, maximum, reference)


def _rescaled(acc: jax.Array, factor: jax.Array) -> jax.Array:
    """acc · factor, row by row; a warp whose factors are all 1 skips it."""

    @inline(FRAGMENT, BY_ROW, returns=_fragment_type(HALF))
    def emit(ctx, acc, factor):
        values, one = tiles.fragment_values(acc), arith.constant(ir.F32Type.get(), 1.0)
        factors = tiles.row_values(factor)
        changed = arith.ori(*(arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in factors))
        branch = scf.IfOp(ptx.any_lane(changed), [x.type for x in values], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([arith.mulf(x, factors[tiles.value_row(i)]) for i, x in enumerate(values)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(values)
        return tiles.fragment(list(branch.results), (HEADS, HALF))

    return emit(acc, factor)


class State(NamedTuple):
    """A consumer's results over the pairs so far."""

    acc: jax.Array  # float32 [64, 256]: weights @ V
    reference: jax.Array  # float32 [64], the same in both consumers
    total: jax.Array  # float32 [64]: sum of the weights of its own blocks
    maximum: jax.Array  # float32 [64]: largest score of its own blocks

    @classmethod
    def initial(cls) -> State:
        def by_row(value):
            return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), BY_ROW)

        acc = plgpu.layout_cast(jnp.zeros((HEADS, HALF), jnp.float32), FRAGMENT)
        return cls(acc, by_row(LEAST), by_row(0.0), by_row(-jnp.inf))


def _left_step(shared: Shared, scale, last_pair, pair, state: State) -> State:
    """Warpgroup 0's work on a pair of blocks."""
    scores = _masked_scores(0, shared, pair, last_pair, scale)
    block_maximum = scores.max(axis=1)
    reference = _raised(state.reference, block_maximum)
    shared.references[0] = reference
    _arrive(shared, Barrier.REFERENCE)
    weights = jnp.exp2(scores - _spread(reference, scores))
    shrink = jnp.exp2(state.reference - reference)
    acc = _multiply(_rescaled(state.acc, shrink), weights.astype(jnp.bfloat16), shared, 0, 0)

    _wait(shared, Barrier.WEIGHTS + 1, pair)
    both = _load(shared.references, 1, BY_ROW)
    again = jnp.exp2(reference - both)
    shared.weights[0] = (weights * _spread(again, weights)).astype(jnp.bfloat16)
    _arrive(shared, Barrier.WEIGHTS, for_wgmma=True)
    total = (state.total * shrink + weights.sum(axis=1)) * again

    acc = _finish(acc)
    _arrive(shared, _half_barrier(Barrier.EMPTY, 0, 0))
    acc = _finish(_multiply(_rescaled(acc, again), None, shared, 1, 0))
    _arrive(shared, _half_barrier(Barrier.EMPTY, 1, 0))
    return State(acc, both, total, jnp.maximum(state.maximum, block_maximum))


def _right_step(shared: Shared, scale, last_pair, pair, state: State) -> State:
    """Warpgroup 1's work on a pair of blocks."""
    scores = _masked_scores(1, shared, pair, last_pair, scale)
    block_maximum = scores.max(axis=1)
    _wait(shared, Barrier.REFERENCE, pair)
    both = _raised(_load(shared.references, 0, BY_ROW), block_maximum)
    weights = jnp.exp2(scores - _spread(both, scores))
    rounded = weights.astype(jnp.bfloat16)
    shared.references[1] = both
    _sync_scored(shared)
    shared.weights[1] = rounded
    _arrive(shared, Barrier.WEIGHTS + 1, for_wgmma=True)
    shrink = jnp.exp2(state.reference - both)
    total = state.total * shrink + weights.sum(axis=1)
    acc = _multiply(_rescaled(state.acc, shrink), rounded, shared, 1, 1)

    _wait(shared, Barrier.WEIGHTS, pair)
    acc = _finish(_multiply(acc, None, shared, 0, 1), in_flight=1)
    _arrive(shared, _half_barrier(Barrier.EMPTY, 1, 1))
    acc = _finish(acc)
    _arrive(shared, _half_barrier(Barrier.EMPTY, 0, 1))
    return State(acc, both, total, jnp.maximum(state.maximum, block_maximum))


def _write_results(half: int, refs, sizes: Sizes, shared: Shared, item: Item, state: State) -> None:
    """Writes the half of `out` that this warpgroup owns; warpgroup 0 writes the statistics too."""
    out_ref, max_ref, lse_ref, sink_ref = refs
    sinks = None if sink_ref is None else _load_sinks(sink_ref, sizes.heads, item.first_head) * LOG2_E
    shared.sums[half] = state.total
    if half == 1:
        shared.maximum[0] = state.maximum
    _arrive(shared, Barrier.SUMS)
    _wait(shared, Barrier.SUMS, item.number)
    total = state.total + _load(shared.sums, 1 - half, BY_ROW)
    denominator = total if sinks is None else total + jnp.exp2(sinks - state.reference)
    share = jnp.where(total == 0.0, 0.0, 1.0 / denominator)
    _store_output(out_ref, (state.acc * _spread(share, state.acc)).astype(jnp.bfloat16), sizes.heads, item, half)
    if half == 0:
        maximum = jnp.maximum(state.maximum, _load(shared.maximum, 0, BY_ROW))
        _store_statistic(max_ref, maximum * sizes.unit, sizes.heads, item)
        lse = (state.reference + jnp.log2(total)) * sizes.unit
        _store_statistic(lse_ref, jnp.where(total == 0.0, sizes.empty, lse), sizes.heads, item)


def _store_output(out_ref, out, heads, item: Item, half: int) -> None:
    @inline(REF, FRAGMENT, *[SPLAT] * 3)
    def emit(ctx, out_ref, out, *numbers):
        tiles.store_columns(out_ref, out, *map(scalar, numbers), half * HALF)

    emit(out_ref, out, heads, item.t, item.first_head)


def _store_statistic(ref, x, heads, item: Item) -> None:
    @inline(REF, BY_ROW, *[SPLAT] * 3)
    def emit(ctx, ref, x, *numbers):
        tiles.store_by_row(ref, x, *map(scalar, numbers))

    emit(ref, x, heads, item.t, item.first_head)


def _load_sinks(sink_ref, heads, first_head) -> jax.Array:
    @inline(REF, SPLAT, SPLAT, returns=plgpu.ShapeDtypeStruct((HEADS,), jnp.float32, BY_ROW))
    def emit(ctx, ref, *numbers):
        return tiles.load_by_row(ref, *map(scalar, numbers))

    return emit(sink_ref, heads, first_head)


# --- the kernel ----------------------------------------------------------------------------------------------------


def _for_each_item(work, length_ref, sizes: Sizes) -> None:
    """Deals the items in turn, so that the head tiles of a token, which gather the same rows, run at the same time."""
    head_tiles = lax.div(sizes.heads + (HEADS - 1), jnp.int32(HEADS))
    this = lax.axis_index("block")

    def one(number, first_pair):
        position = this + number * sizes.blocks
        t, first_head = lax.div(position, head_tiles), lax.rem(position, head_tiles) * HEADS
        limit = columns_scanned(length_ref, sizes, t)
        # A token without keys has one pair that is all masked, so that every warpgroup passes every barrier.
        end_pair = first_pair + jnp.maximum(lax.div(limit + (PAIR - 1), jnp.int32(PAIR)), 1)
        work(Item(number, t, first_head, limit, first_pair, end_pair))
        return end_pair

    count = lax.div(sizes.tokens * head_tiles - this + (sizes.blocks - 1), sizes.blocks)
    lax.fori_loop(0, count, one, jnp.int32(0))


def _produce(q_ref, kv_ref, indices_ref, sizes: Sizes, shared: Shared, item: Item) -> None:
    _gather_queries(q_ref, shared, sizes, item.t, item.first_head, item.number)
    row_numbers = functools.partial(tiles.row_numbers, indices_ref, sizes, item.t, limit=item.limit, blocks=2)

    def step(pair, rows):
        following = row_numbers((pair + 1 - item.first_pair) * PAIR)
        _gather_pair(rows, kv_ref, shared, pair)
        return following

    lax.fori_loop(item.first_pair, item.end_pair, step, row_numbers(jnp.int32(0)))


def _consume(half: int, refs, sizes: Sizes, shared: Shared, item: Item) -> None:
    _wait(shared, Barrier.QUERIES_FULL, item.number, for_wgmma=True)
    step = functools.partial((_left_step, _right_step)[half], shared, sizes.scale, item.end_pair - 1)
    state = lax.fori_loop(item.first_pair, item.end_pair, step, State.initial())
    _write_results(half, refs, sizes, shared, item, state)


def sparse_prefill(
    q: jax.Array,  # bfloat16 [tokens, heads, qk_dim]
    kv: jax.Array,  # bfloat16 [kv_len, qk_dim]
    indices: jax.Array,  # int32 [tokens, topk]
    topk_length: jax.Array | None,  # int32 [tokens]
    attn_sink: jax.Array | None,  # float32 [heads]
    *,
    softmax_scale: float,
    sm_count: int,
    sizes: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out bfloat16 `[tokens, heads, 512]`, max_logits and lse float32 `[tokens, heads]`; no dimension is 0.

    With `sizes`, whose addresses are the fields of `Sizes`, the kernel is for launches without XLA: of the shapes it
    uses qk_dim alone, and topk_length or attn_sink are absent where their addresses are 0.
    """
    tokens, heads, qk_dim = q.shape
    blocks = min(sm_count, tokens * -(-heads // HEADS))

    def work(inputs, sizes, results, scratch):
        q_ref, kv_ref, indices_ref, length_ref, sink_ref = inputs
        out_refs, shared = (*results, sink_ref), Shared(*scratch)
        each = functools.partial(_for_each_item, length_ref=length_ref, sizes=sizes)
        _init_barriers(shared)
        role = lax.axis_index("role")
        for half in range(2):

            @pl.when(role == half)
            def _consumer(half=half):
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
                each(functools.partial(_consume, half, out_refs, sizes, shared))

        @pl.when(role == 2)
        def _producer():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            each(functools.partial(_produce, q_ref, kv_ref, indices_ref, sizes, shared))

    arrays = q, kv, indices, topk_length, attn_sink
    return launched(work, arrays, softmax_scale, sizes, _scratch(qk_dim), blocks, warpgroups=3)


def launched(
    work, arrays: tuple, softmax_scale: float, sizes: tuple, scratch: list, blocks: int, warpgroups: int
) -> tuple[jax.Array, ...]:
    """out, max_logits and lse of q, kv, indices, topk_length and attn_sink, by `blocks` thread blocks that `work`.

    `work` gets the references of the arrays, None for one that is absent, `Sizes`, the references of the results, and
    of the scratch.
    """
    q, kv, indices, *_ = arrays
    tokens, heads, _ = q.shape

    def body(*refs):
        refs = iter(refs)
        inputs = [None if x is None else next(refs) for x in arrays]
        passed = [next(refs) for _ in sizes]
        numbers = Sizes.passed(passed) if sizes else Sizes.known(q, kv, indices, softmax_scale, blocks)
        work(inputs, numbers, [next(refs) for _ in range(3)], list(refs))

    statistic = jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((tokens, heads, V_DIM), jnp.bfloat16), statistic, statistic),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # ours are enough
            reduction_scratch_bytes=0,  # no reduction of Pallas leaves its warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return kernel(*(x for x in arrays if x is not None), *sizes)
