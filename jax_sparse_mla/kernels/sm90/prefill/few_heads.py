"""Sparse MLA prefill for SM90 with at most 32 heads, in Pallas Mosaic GPU; docs/kernels.md explains it.

Scores and output are computed transposed, Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ. Keys, or columns of V, are then the 64 rows of a
wgmma and the heads its 8, 16 or 32 columns, so no head is padded to 64.

A thread block has two teams of two warpgroups, a consumer and its producer. A team takes work items by itself; an item
is one query token with all its heads. So one team's products run while the other waits for keys or computes weights. A
team's keys come in blocks of 64, in slices of 64 columns, through a ring of slots. A block's tail of 64 columns, which
keys of d 576 have and which is no part of V, comes first.

Weights are exp2(score − reference), with one reference for each head, as in `kernel.py`. A block in which no score is
more than 8 above the reference needs no maximum over its keys: each thread has sums and maxima of its own keys, and
they are put together at the item's end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from jax_sparse_mla.kernels.sm90.prefill import ptx, tiles
from jax_sparse_mla.kernels.sm90.prefill.tiles import SPLAT, TILED, inline, scalar

MOST_HEADS = 32
V_DIM = 512
BLOCK = 64  # keys: the rows of a wgmma
TEAMS = 2
_SLICE = tiles.TILE_COLUMNS
_SLICE_BYTES = BLOCK * _SLICE * 2
_V_SLICES = V_DIM // _SLICE
_WARPS = 4  # of a warpgroup

# A thread has 128 registers at launch; the consumers take what the producers give up.
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 216

_SHARED_BYTES = 232_448  # that a thread block can have
_FIRST_NAMED_BARRIER = 6  # one for each team; Mosaic's own are 0 to 4

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)
_LEAST = -1e30  # the first reference: finite, so that exp2(−inf − reference) is 0
_SLACK = 8.0  # how far above the reference a score may be, in powers of two

_REF = plgpu.RefType()
_TILES = plgpu.RefType(TILED)
_ROW_NUMBERS = tiles.per_thread_layout(tiles.ROWS_PER_THREAD)  # of a block


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a call the code depends on."""

    heads: int  # columns of a wgmma: 8, 16 or 32
    qk_dim: int

    @property
    def slices(self) -> int:
        """Of a block of keys, the tail's included."""
        return self.qk_dim // _SLICE

    @property
    def tails(self) -> int:
        return self.slices - _V_SLICES

    @property
    def slots(self) -> int:
        """Slots of a team's ring: what is left of its shared memory, at least one block and less than two."""
        kept = self.heads * (self.qk_dim + BLOCK) * 2  # queries and weights
        return (_SHARED_BYTES // TEAMS - kept - 2_048) // _SLICE_BYTES if self.heads < MOST_HEADS else self.slices

    @property
    def per_thread(self) -> int:
        """Heads of which a thread holds scores: pairs of neighbours, from 2 (lane mod 4) + 8 i on."""
        return self.heads // 4

    @property
    def sums(self) -> int:
        """Sums of a slice's output that a thread holds."""
        return self.heads // 2

    @property
    def state_layout(self):
        """For each thread Oᵀ of all slices; then references, sums of weights and maxima of its heads."""
        return tiles.per_thread_layout(_V_SLICES * self.sums + 3 * self.per_thread)

    @property
    def state_type(self):
        return plgpu.ShapeDtypeStruct(self.state_layout.args[0], jnp.float32, self.state_layout)

    # Barriers of a team.
    @property
    def full(self) -> int:
        """One for each slot: the slice has arrived."""
        return 0

    @property
    def empty(self) -> int:
        """One for each slot: the consumer reads the slice no more."""
        return self.slots

    @property
    def valid(self) -> int:
        """Two, for blocks in turn: the mask of the block's keys is written."""
        return 2 * self.slots

    @property
    def queries_full(self) -> int:
        return 2 * self.slots + 2

    @property
    def queries_empty(self) -> int:
        return 2 * self.slots + 3

    @property
    def weights_empty(self) -> int:
        """No warp's products read the weights any more."""
        return 2 * self.slots + 4

    @property
    def arrivals(self) -> list[int]:
        all_threads, warps = ptx.WARPGROUP, _WARPS
        return [all_threads] * self.slots + [warps] * self.slots + [all_threads] * 3 + [warps] * 2


class Shared(NamedTuple):
    """The shared memory of a thread block; everything is there for each team."""

    queries: jax.Array  # bfloat16 [2, heads, qk_dim]
    keys: jax.Array  # bfloat16 [2, slots, 64, 64]
    weights: jax.Array  # bfloat16 [2, heads, 64]
    valid: jax.Array  # int32 [2, 2, 64]: of two blocks, 1 where the key exists
    exchange: jax.Array  # float32 [2, 4, heads]: numbers of each warp
    barriers: jax.Array  # int32 pairs


_SHARED_TYPES = (_TILES, _TILES, _TILES, _REF, _REF, _REF)


def _scratch(shape: Shape) -> list:
    return [
        plgpu.SMEM((TEAMS, shape.heads, shape.qk_dim), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((TEAMS, shape.slots, BLOCK, _SLICE), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((TEAMS, shape.heads, BLOCK), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((TEAMS, 2, BLOCK), jnp.int32),
        plgpu.SMEM((TEAMS, _WARPS, shape.heads), jnp.float32),
        plgpu.SMEM((2 * TEAMS * len(shape.arrivals),), jnp.int32),
    ]


class Item(NamedTuple):
    """A work item of a team. Barriers count the team's items, or the blocks of all its items."""

    number: jax.Array
    t: jax.Array
    limit: jax.Array  # columns scanned
    first_block: jax.Array
    end_block: jax.Array


class _Team:
    """Where a team's arrays lie in shared memory; made inside an inlined function."""

    def __init__(self, shape: Shape, refs, team: ir.Value):
        self.shape, self.team = shape, team
        self._refs = Shared(*refs)
        self.named_barrier = arith.addi(team, ptx.i32(_FIRST_NAMED_BARRIER))

    def _address(self, ref: ir.Value, nbytes: int) -> ir.Value:
        return arith.addi(ptx.shared_address(ref), arith.muli(self.team, ptx.i32(nbytes)))

    @property
    def queries(self) -> ir.Value:
        return self._address(self._refs.queries, self.shape.heads * self.shape.qk_dim * 2)

    @property
    def keys(self) -> ir.Value:
        return self._address(self._refs.keys, self.shape.slots * _SLICE_BYTES)

    @property
    def weights(self) -> ir.Value:
        return self._address(self._refs.weights, self.shape.heads * BLOCK * 2)

    def barrier(self, number: ir.Value | int) -> ir.Value:
        number = ptx.i32(number) if isinstance(number, int) else number
        base = self._address(self._refs.barriers, 8 * len(self.shape.arrivals))
        return arith.addi(base, arith.shli(number, ptx.i32(3)))

    def _mask_place(self, block: ir.Value, key: ir.Value) -> list[ir.Value]:
        return [ptx.index(x) for x in (self.team, arith.andi(block, ptx.i32(1)), key)]

    def set_valid(self, block: ir.Value, key: ir.Value, value: ir.Value) -> None:
        memref.store(value, self._refs.valid, self._mask_place(block, key))

    def is_valid(self, block: ir.Value, key: ir.Value) -> ir.Value:
        found = memref.load(self._refs.valid, self._mask_place(block, key))
        return arith.cmpi(arith.CmpIPredicate.ne, found, ptx.i32(0))

    def valid_barrier(self, block: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The barrier of the block's mask, and its phase."""
        number = arith.addi(ptx.i32(self.shape.valid), arith.andi(block, ptx.i32(1)))
        return self.barrier(number), arith.shrui(block, ptx.i32(1))

    def slots(self, block: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """The slot of each slice of a block, and how often the slot was used before."""
        count = ptx.i32(self.shape.slots)
        first = arith.muli(block, ptx.i32(self.shape.slices))
        slot, phase = arith.remui(first, count), arith.divui(first, count)
        found = []
        for i in range(self.shape.slices):
            here = arith.addi(slot, ptx.i32(i))
            wraps = arith.cmpi(arith.CmpIPredicate.uge, here, count)
            again = arith.select(wraps, ptx.i32(1), ptx.i32(0))
            here = arith.subi(here, arith.select(wraps, count, ptx.i32(0)))
            found.append((here, arith.addi(phase, again)))
        return found

    def slot_address(self, slot: ir.Value) -> ir.Value:
        return arith.addi(self.keys, arith.muli(slot, ptx.i32(_SLICE_BYTES)))

    def slot_full(self, slot: ir.Value) -> ir.Value:
        return self.barrier(arith.addi(slot, ptx.i32(self.shape.full)))

    def slot_empty(self, slot: ir.Value) -> ir.Value:
        return self.barrier(arith.addi(slot, ptx.i32(self.shape.empty)))

    def over_warps(self, values: list[ir.Value], combine) -> list[ir.Value]:
        """Combines the thread's number of each of its heads with those of all threads that hold the same head."""
        warp, lane = _warp_and_lane()
        for distance in (4, 8, 16):
            values = [combine(x, mgpu_utils.shfl_bfly(x, distance)) for x in values]
        heads = [ptx.index(head) for head in _thread_heads(self.shape)]
        team = ptx.index(self.team)
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, ptx.i32(4))):
            for head, value in zip(heads, values):
                memref.store(value, self._refs.exchange, [team, ptx.index(warp), head])
        ptx.warpgroup_sync(self.named_barrier)
        found = []
        for head in heads:
            parts = [memref.load(self._refs.exchange, [team, ptx.index(ptx.i32(w)), head]) for w in range(_WARPS)]
            found.append(functools.reduce(combine, parts))
        return found


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    thread = ptx.thread_in_warpgroup()
    return arith.shrui(thread, ptx.i32(5)), arith.andi(thread, ptx.i32(31))


def _thread_heads(shape: Shape) -> list[ir.Value]:
    """The heads of the thread's columns in a fragment."""
    _, lane = _warp_and_lane()
    first = arith.shli(arith.andi(lane, ptx.i32(3)), ptx.i32(1))
    return [arith.addi(first, ptx.i32(8 * (i // 2) + i % 2)) for i in range(shape.per_thread)]


def _head(i: int) -> int:
    """To which of the thread's heads scalar i of a fragment belongs."""
    return 2 * (i // 4) + i % 2


def _init_barriers(shape: Shape, shared: Shared) -> None:
    @inline(_REF)
    def emit(ctx, barriers):
        ptx.barriers_init(barriers, shape.arrivals * TEAMS)

    emit(shared.barriers)


# --- the producers -------------------------------------------------------------------------------------------------


def _gather_queries(shape: Shape, q_ref, shared: Shared, team, item: Item) -> None:
    """Copies a token's heads; heads that q does not have become zero."""

    @inline(_REF, *_SHARED_TYPES, SPLAT, SPLAT, SPLAT)
    def emit(ctx, q, *args):
        *refs, team, t, item = args
        team = _Team(shape, refs, scalar(team))
        _, heads, columns = ir.MemRefType(q.type).shape
        copied = -(-shape.heads // 16)  # rows of a thread
        target = tiles.tile_address_at(team.queries, columns)
        ptx.barrier_wait_at(team.barrier(shape.queries_empty), ptx.previous(scalar(item)))
        for i, row in enumerate(tiles.thread_rows()[:copied]):
            exists = arith.cmpi(arith.CmpIPredicate.slt, row, ptx.i32(heads))
            number = arith.addi(arith.muli(ptx.extend(scalar(t)), ptx.i64(heads)), ptx.extend(row))
            number = arith.select(exists, number, ptx.i64(0))
            source = tiles.source_address(q, number)
            nbytes = arith.select(exists, ptx.i32(16), ptx.i32(0))
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, ptx.i32(shape.heads))):
                for tile in range(shape.slices):
                    offset = 2 * i * tiles.row_stride(columns) + tile * tiles.TILE_BYTES
                    ptx.copy_16(target, offset, source, tile * 2 * _SLICE, nbytes)
        ptx.barrier_arrive_after_copies_at(team.barrier(shape.queries_full))

    emit(q_ref, *shared, team, item.t, item.number)


def _row_numbers(indices_ref, t, first_column, limit, kv_len: int) -> jax.Array:
    """The rows of kv that the calling thread copies for a block; −1 where there is no key."""

    @inline(_REF, SPLAT, SPLAT, SPLAT, returns=plgpu.ShapeDtypeStruct(_ROW_NUMBERS.args[0], jnp.int32, _ROW_NUMBERS))
    def emit(ctx, indices, t, first_column, limit):
        columns = [arith.addi(scalar(first_column), row) for row in tiles.thread_rows()]
        return tiles.per_thread(
            [tiles.load_index(indices, scalar(t), column, scalar(limit), kv_len) for column in columns]
        )

    return emit(indices_ref, t, first_column, limit)


def _gather_block(shape: Shape, row_numbers, kv_ref, shared: Shared, team, block) -> None:
    """Starts the copies of a block, slice by slice."""

    @inline(_ROW_NUMBERS, _REF, *_SHARED_TYPES, SPLAT, SPLAT)
    def emit(ctx, row_numbers, kv, *args):
        *refs, team, block = args
        team, block = _Team(shape, refs, scalar(team)), scalar(block)
        rows = tiles.from_per_thread(row_numbers)
        sources = [tiles.source_address(kv, ptx.extend(row)) for row in rows]
        for i, (slot, uses) in enumerate(team.slots(block)):
            ptx.barrier_wait_at(team.slot_empty(slot), ptx.previous(uses))
            if i == 0:
                _store_valid(team, block, rows)
            target = tiles.tile_address_at(team.slot_address(slot), _SLICE)
            source_tile = (i - shape.tails) % shape.slices
            tiles.copy_rows(target, _SLICE, [0], rows, sources, source_tile)
            ptx.barrier_arrive_after_copies_at(team.slot_full(slot))

    emit(row_numbers, kv_ref, *shared, team, block)


def _store_valid(team: _Team, block: ir.Value, rows: list[ir.Value]) -> None:
    """Stores the mask of a block's keys; eight threads store the same value."""
    for place, row in zip(tiles.thread_rows(), rows):
        exists = arith.cmpi(arith.CmpIPredicate.sge, row, ptx.i32(0))
        team.set_valid(block, place, arith.select(exists, ptx.i32(1), ptx.i32(0)))
    barrier, _ = team.valid_barrier(block)
    ptx.barrier_arrive_at(barrier)


def _produce(shape: Shape, q_ref, kv_ref, indices_ref, shared: Shared, team, item: Item) -> None:
    _gather_queries(shape, q_ref, shared, team, item)
    row_numbers = functools.partial(_row_numbers, indices_ref, item.t, limit=item.limit, kv_len=kv_ref.shape[0])

    def step(block, rows):
        following = row_numbers((block + 1 - item.first_block) * BLOCK)
        _gather_block(shape, rows, kv_ref, shared, team, block)
        return following

    lax.fori_loop(item.first_block, item.end_block, step, row_numbers(jnp.int32(0)))


# --- the consumers -------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """A thread's results over the blocks so far."""

    acc: list[list[ir.Value]]  # Oᵀ, slice by slice
    reference: list[ir.Value]
    total: list[ir.Value]  # sums of the weights of its keys
    maximum: list[ir.Value]  # largest scores of its keys

    @classmethod
    def unpacked(cls, shape: Shape, values: list[ir.Value]) -> _State:
        acc = [values[i * shape.sums : (i + 1) * shape.sums] for i in range(_V_SLICES)]
        rest = values[_V_SLICES * shape.sums :]
        n = shape.per_thread
        return cls(acc, rest[:n], rest[n : 2 * n], rest[2 * n :])

    def packed(self) -> list[ir.Value]:
        return [*itertools.chain(*self.acc), *self.reference, *self.total, *self.maximum]


def _f32(value: float) -> ir.Value:
    return arith.constant(ir.F32Type.get(), value)


def _initial(shape: Shape) -> jax.Array:
    @inline(returns=shape.state_type)
    def emit(ctx):
        zeros, n = _f32(0.0), shape.per_thread
        state = _State([[zeros] * shape.sums] * _V_SLICES, [_f32(_LEAST)] * n, [zeros] * n, [_f32(-math.inf)] * n)
        return tiles.per_thread_floats(state.packed())

    return emit()


def _wait_for_queries(shape: Shape, shared: Shared, team, number) -> None:
    @inline(*_SHARED_TYPES, SPLAT, SPLAT)
    def emit(ctx, *args):
        *refs, team, number = args
        ptx.barrier_wait_at(_Team(shape, refs, scalar(team)).barrier(shape.queries_full), scalar(number))

    emit(*shared, team, number)


def _step(shape: Shape, scale: float, shared: Shared, team, last_block, block, state: jax.Array) -> jax.Array:
    """A consumer's work on a block of keys; `scale` has log2(e) in it."""

    @inline(*_SHARED_TYPES, SPLAT, SPLAT, SPLAT, shape.state_layout, returns=shape.state_type)
    def emit(ctx, *args):
        *refs, team, last_block, block, state = args
        team, block = _Team(shape, refs, scalar(team)), scalar(block)
        state = _State.unpacked(shape, tiles.from_per_thread(state))
        slots = team.slots(block)
        scores = _scores(team, slots)
        _release(team, slots[: shape.tails])
        is_last = arith.cmpi(arith.CmpIPredicate.eq, block, scalar(last_block))
        with mgpu_utils.when(is_last):
            ptx.barrier_arrive_by_warp(team.barrier(shape.queries_empty))
        scores = _masked(team, block, scores, scale)
        state = _weigh(team, block, scores, state)
        acc = _multiply(team, slots[shape.tails :], state.acc)
        ptx.barrier_arrive_by_warp(team.barrier(shape.weights_empty))
        return tiles.per_thread_floats(state._replace(acc=acc).packed())

    return emit(*shared, team, last_block, block, state)


def _release(team: _Team, slots) -> None:
    for slot, _ in slots:
        ptx.barrier_arrive_by_warp(team.slot_empty(slot))


def _steps() -> list[int]:
    """Byte offsets of a tile's four groups of 16 columns."""
    return [32 * i for i in range(_SLICE // 16)]


def _scores(team: _Team, slots) -> list[ir.Value]:
    """The thread's scalars of Sᵀ = K Qᵀ."""
    shape = team.shape
    queries = ptx.Operand.at(team.queries, 0, tiles.row_stride(shape.qk_dim))
    acc = None
    for i, (slot, uses) in enumerate(slots):
        keys = ptx.Operand.at(team.slot_address(slot), 0, tiles.row_stride(_SLICE))
        first = (i - shape.tails) % shape.slices * tiles.TILE_BYTES
        ptx.barrier_wait_at(team.slot_full(slot), uses)
        ptx.fence_async_proxy()
        if i == 0:
            ptx.wgmma_fence()
        for step in _steps():
            acc = ptx.wgmma_shared(acc, keys, queries, n=shape.heads, a_offset=step, b_offset=first + step)
    ptx.wgmma_commit()
    return ptx.wgmma_wait(acc, 0)


def _masked(team: _Team, block: ir.Value, scores: list[ir.Value], scale: float) -> list[ir.Value]:
    """Scores in base 2, −inf where there is no key."""
    ptx.barrier_wait_at(*team.valid_barrier(block))
    valid = [team.is_valid(block, key) for key in tiles.fragment_rows()]
    scale, nothing = _f32(scale), _f32(-math.inf)
    scaled = [arith.mulf(x, scale) for x in scores]
    return [arith.select(valid[tiles.value_row(i)], x, nothing) for i, x in enumerate(scaled)]


def _weigh(team: _Team, block: ir.Value, scores: list[ir.Value], state: _State) -> _State:
    """Writes the block's weights, and the state without the block's products."""
    shape = team.shape
    largest = list(state.maximum)
    block_maximum: list[ir.Value | None] = [None] * shape.per_thread
    for i, x in enumerate(scores):
        known = block_maximum[_head(i)]
        block_maximum[_head(i)] = x if known is None else arith.maximumf(known, x)
    over = ptx.i32(0)
    for i, x in enumerate(block_maximum):
        largest[i] = arith.maximumf(largest[i], x)
        above = arith.cmpf(arith.CmpFPredicate.OGT, x, arith.addf(state.reference[i], _f32(_SLACK)))
        over = arith.ori(over, arith.extui(ptx.i32_type(), above))

    def weights(reference: list[ir.Value]) -> list[ir.Value]:
        """Stores the weights; the thread's sums of them."""
        found = [ptx.exp2(arith.subf(x, reference[_head(i)])) for i, x in enumerate(scores)]
        _store_weights(team, found)
        ptx.fence_async_proxy()
        return [arith.addf(*(x for i, x in enumerate(found) if _head(i) == head)) for head in range(shape.per_thread)]

    ptx.barrier_wait_at(team.barrier(shape.weights_empty), ptx.previous(block))
    sums = weights(state.reference)
    rises = ptx.warpgroup_any(team.named_barrier, arith.cmpi(arith.CmpIPredicate.ne, over, ptx.i32(0)))
    kept = [*sums, *state.packed()]
    branch = scf.IfOp(rises, [x.type for x in kept], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        highest = team.over_warps(block_maximum, arith.maximumf)
        reference, factors = [], []
        for old, new in zip(state.reference, highest):
            above = arith.cmpf(arith.CmpFPredicate.OGT, new, arith.addf(old, _f32(_SLACK)))
            reference.append(arith.select(above, new, old))
            factors.append(ptx.exp2(arith.subf(old, reference[-1])))
        sums_again = weights(reference)
        ptx.warpgroup_sync(team.named_barrier)
        acc = [[arith.mulf(x, factors[_head(i)]) for i, x in enumerate(part)] for part in state.acc]
        total = [arith.mulf(x, factor) for x, factor in zip(state.total, factors)]
        scf.yield_([*sums_again, *_State(acc, reference, total, state.maximum).packed()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(kept)
    results = list(branch.results)
    state = _State.unpacked(shape, results[shape.per_thread :])
    total = [arith.addf(x, y) for x, y in zip(state.total, results[: shape.per_thread])]
    return state._replace(total=total, maximum=largest)


def _store_weights(team: _Team, values: list[ir.Value]) -> None:
    """Stores a fragment of Sᵀ, rounded, as P: rows are heads. A matrix of 8 x 8 is stored by column."""
    words = [ptx.bfloat16_pair(*values[i : i + 2]) for i in range(0, len(values), 2)]  # [8 heads][8 keys]
    warp, lane = _warp_and_lane()
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


def _multiply(team: _Team, slots, acc: list[list[ir.Value]]) -> list[list[ir.Value]]:
    """acc + Vᵀ Pᵀ; releases the slices."""
    shape = team.shape
    weights = ptx.Operand.at(team.weights, 0, tiles.row_stride(BLOCK))
    acc = list(acc)
    ptx.wgmma_fence()
    for i, (slot, _) in enumerate(slots):
        values = ptx.Operand.at(team.slot_address(slot), 0, tiles.row_stride(_SLICE), transposed=True)
        for step in range(BLOCK // 16):
            offset = 2 * step * tiles.row_stride(_SLICE)
            acc[i] = ptx.wgmma_shared(acc[i], values, weights, n=shape.heads, a_offset=offset, b_offset=32 * step)
        ptx.wgmma_commit()
    for i, slot in enumerate(slots):
        flat = ptx.wgmma_wait([*itertools.chain(*acc)], len(slots) - 1 - i)
        acc = [flat[j * shape.sums : (j + 1) * shape.sums] for j in range(_V_SLICES)]
        _release(team, [slot])
    return acc


def _write_results(shape: Shape, refs, shared: Shared, team, item: Item, state: jax.Array) -> None:
    out_ref, max_ref, lse_ref, sink_ref = refs
    given = [] if sink_ref is None else [sink_ref]

    @inline(_REF, _REF, _REF, *[_REF] * len(given), *_SHARED_TYPES, SPLAT, SPLAT, shape.state_layout)
    def emit(ctx, out, max_logits, lse, *args):
        sinks = None
        if given:
            sinks, *args = args
        *refs, team, t, state = args
        team, t = _Team(shape, refs, scalar(team)), scalar(t)
        state = _State.unpacked(shape, tiles.from_per_thread(state))
        total = team.over_warps(state.total, arith.addf)
        ptx.warpgroup_sync(team.named_barrier)
        maximum = team.over_warps(state.maximum, arith.maximumf)
        _, heads, _ = ir.MemRefType(out.type).shape
        ours = _thread_heads(shape)
        empty = [arith.cmpf(arith.CmpFPredicate.OEQ, x, _f32(0.0)) for x in total]
        shares = []
        for head, x, nothing, reference in zip(ours, total, empty, state.reference):
            denominator = x
            if sinks is not None:
                sink = memref.load(sinks, [ptx.index(arith.minsi(head, ptx.i32(heads - 1)))])
                sink = ptx.exp2(arith.subf(arith.mulf(sink, _f32(_LOG2_E)), reference))
                denominator = arith.addf(denominator, sink)
            shares.append(arith.select(nothing, _f32(0.0), arith.divf(_f32(1.0), denominator)))
        for i, part in enumerate(state.acc):
            state.acc[i] = [arith.mulf(x, shares[_head(j)]) for j, x in enumerate(part)]
        _store_output(shape, out, t, state.acc)

        writes = arith.cmpi(arith.CmpIPredicate.ult, ptx.thread_in_warpgroup(), ptx.i32(4))
        for i, head in enumerate(ours):
            exists = arith.cmpi(arith.CmpIPredicate.slt, head, ptx.i32(heads))
            with mgpu_utils.when(arith.andi(writes, exists)):
                place = [ptx.index(t), ptx.index(head)]
                memref.store(arith.mulf(maximum[i], _f32(_LN_2)), max_logits, place)
                value = arith.mulf(arith.addf(state.reference[i], ptx.log2(total[i])), _f32(_LN_2))
                memref.store(arith.select(empty[i], _f32(-math.inf), value), lse, place)

    emit(out_ref, max_ref, lse_ref, *given, *shared, team, item.t, state)


def _store_output(shape: Shape, out: ir.Value, t: ir.Value, acc: list[list[ir.Value]]) -> None:
    """Stores Oᵀ, rounded, to `out[t]`. Matrices of 8 columns x 8 heads are transposed, then as in `store_columns`."""
    _, heads, columns = ir.MemRefType(out.type).shape
    warp, lane = _warp_and_lane()
    part, row = arith.andi(lane, ptx.i32(3)), arith.shrui(lane, ptx.i32(2))
    # After the exchange lane `part` of four has chunk part mod 2 of the warp's 16 columns, of slice part // 2 of two.
    column = arith.addi(arith.shli(arith.shrui(part, ptx.i32(1)), ptx.i32(6)), arith.shli(warp, ptx.i32(4)))
    column = arith.addi(column, arith.shli(arith.andi(part, ptx.i32(1)), ptx.i32(3)))
    base = arith.addi(ptx.global_address(out), ptx.extend(arith.shli(column, ptx.i32(1))))
    for i in range(shape.heads // 8):
        head = arith.addi(row, ptx.i32(8 * i))
        number = arith.addi(arith.muli(ptx.extend(t), ptx.i64(heads)), ptx.extend(head))
        address = arith.addi(base, arith.muli(number, ptx.i64(2 * columns)))
        words = []  # of eight columns each
        for values in acc:
            four = values[4 * i : 4 * i + 4]
            words += [ptx.transposed(ptx.bfloat16_pair(*four[j : j + 2])) for j in (0, 2)]
        quads = [tiles.transposed(words[j : j + 4], part) for j in range(0, len(words), 4)]
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, head, ptx.i32(heads))):
            for j, quad in enumerate(quads):
                ptx.store_16(address, 2 * 2 * _SLICE * j, quad)


def _consume(shape: Shape, refs, shared: Shared, scale: float, team, item: Item) -> None:
    _wait_for_queries(shape, shared, team, item.number)
    step = functools.partial(_step, shape, scale, shared, team, item.end_block - 1)
    state = lax.fori_loop(item.first_block, item.end_block, step, _initial(shape))
    _write_results(shape, refs, shared, team, item, state)


# --- the kernel ----------------------------------------------------------------------------------------------------


def _for_each_item(work, team, length_ref, *, tokens: int, topk: int, blocks: int) -> None:
    """Deals the items in turn."""
    this = lax.axis_index("block") + team * blocks

    def one(number, first_block):
        t = this + number * (TEAMS * blocks)
        limit = jnp.int32(topk) if length_ref is None else jnp.minimum(length_ref[t], topk)
        # A token without keys has one block that is all masked, so that both warpgroups pass every barrier.
        end_block = first_block + jnp.maximum(lax.div(limit + (BLOCK - 1), jnp.int32(BLOCK)), 1)
        work(team, Item(number, t, limit, first_block, end_block))
        return end_block

    count = lax.div(tokens - this + (TEAMS * blocks - 1), jnp.int32(TEAMS * blocks))
    lax.fori_loop(0, count, one, jnp.int32(0))


def sparse_prefill_few_heads(
    q: jax.Array,  # bfloat16 [tokens, heads, qk_dim]
    kv: jax.Array,  # bfloat16 [kv_len, qk_dim]
    indices: jax.Array,  # int32 [tokens, topk]
    topk_length: jax.Array | None,  # int32 [tokens]
    attn_sink: jax.Array | None,  # float32 [heads]
    *,
    softmax_scale: float,
    sm_count: int = 132,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`kernel.sparse_prefill` for at most 32 heads."""
    (tokens, heads, qk_dim), topk = q.shape, indices.shape[1]
    shape = Shape(next(n for n in (8, 16, MOST_HEADS) if n >= heads), qk_dim)
    blocks = min(sm_count, tokens)
    given = [x for x in (topk_length, attn_sink) if x is not None]

    def body(q_ref, kv_ref, indices_ref, *refs):
        refs = list(refs)
        length_ref = None if topk_length is None else refs.pop(0)
        sink_ref = None if attn_sink is None else refs.pop(0)
        out_refs, shared = (*refs[:3], sink_ref), Shared(*refs[3:])
        each = functools.partial(_for_each_item, length_ref=length_ref, tokens=tokens, topk=topk, blocks=blocks)
        _init_barriers(shape, shared)
        role = lax.axis_index("role")

        @pl.when(role < TEAMS)
        def _consumer():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            each(functools.partial(_consume, shape, out_refs, shared, softmax_scale * _LOG2_E), role)

        @pl.when(role >= TEAMS)
        def _producer():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            each(functools.partial(_produce, shape, q_ref, kv_ref, indices_ref, shared), role - TEAMS)

    statistic = jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((tokens, heads, V_DIM), jnp.bfloat16), statistic, statistic),
        scratch_types=_scratch(shape),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2 * TEAMS,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # ours are enough
            reduction_scratch_bytes=0,  # there are no reductions of Pallas'
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return kernel(q, kv, indices, *given)
