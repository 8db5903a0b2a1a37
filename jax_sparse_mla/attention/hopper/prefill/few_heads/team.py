"""A team of two warpgroups, a consumer and its producer: its shared memory, its barriers, its ring of slots."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from jax_sparse_mla.attention.hopper.prefill import ptx, tiles
from jax_sparse_mla.attention.hopper.prefill.tiles import REF, TILED, TILES, inline
from jax_sparse_mla.attention.index_table import V_DIM

MOST_HEADS = 32
BLOCK = tiles.ROWS  # keys
TEAMS = 2
SLICE = tiles.TILE_COLUMNS
SLICE_BYTES = BLOCK * SLICE * 2
V_SLICES = V_DIM // SLICE
WARPS = 4  # of a warpgroup

# That the arrays may take: 227 KiB less what Mosaic needs beside them. An H200 refused a launch of all 227.
_SHARED_BYTES = 226 * 1024
_FIRST_NAMED_BARRIER = 6  # two for each team, to synchronise and to reduce; Mosaic's own are 0 to 4


class Barriers(NamedTuple):
    """The numbers of a team's barriers."""

    full: int  # one for each slot: the slice has arrived
    empty: int  # one for each slot: the consumer reads the slice no more
    valid: int  # two, for blocks in turn: the mask of the block's keys is written
    queries_full: int
    queries_empty: int
    weights_empty: int  # no warp's products read the weights any more


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape: padded heads and qk_dim."""

    heads: int  # columns of a wgmma: 8, 16 or 32
    qk_dim: int

    @property
    def slices(self) -> int:
        """Slices of a block of keys, the tail's included."""
        return self.qk_dim // SLICE

    @property
    def tails(self) -> int:
        return self.slices - V_SLICES

    @property
    def slots(self) -> int:
        """Slots of a team's ring: what is left of its shared memory, less than two blocks."""
        queries, weights, others = self.heads * self.qk_dim * 2, self.heads * BLOCK * 2, 2_048
        return (_SHARED_BYTES // TEAMS - queries - weights - others) // SLICE_BYTES

    @property
    def fits(self) -> bool:
        """Whether the ring holds a block of keys."""
        return self.slots >= self.slices

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
        return tiles.per_thread_layout(V_SLICES * self.sums + 3 * self.per_thread)

    @property
    def state_type(self):
        return plgpu.ShapeDtypeStruct(self.state_layout.args[0], jnp.float32, self.state_layout)

    # A thread has 128 registers at launch; the consumers take what the producers give up.
    @property
    def producer_registers(self) -> int:
        return 56 if self.heads < MOST_HEADS else 40

    @property
    def consumer_registers(self) -> int:
        return 256 - self.producer_registers

    @property
    def barriers(self) -> Barriers:
        after = 2 * self.slots
        return Barriers(0, self.slots, after, after + 2, after + 3, after + 4)

    @property
    def arrivals(self) -> list[int]:
        all_threads, warps = ptx.WARPGROUP, WARPS
        return [all_threads] * self.slots + [warps] * self.slots + [all_threads] * 3 + [warps] * 2


class Shared(NamedTuple):
    """The shared memory of a thread block; everything is there for each team."""

    queries: jax.Array  # bfloat16 [2, heads, qk_dim]
    keys: jax.Array  # bfloat16 [2, slots, 64, 64]
    weights: jax.Array  # bfloat16 [2, heads, 64]
    valid: jax.Array  # int32 [2, 2, 64]: of two blocks, 1 where the key exists
    exchange: jax.Array  # float32 [2, 4, heads]: numbers of each warp
    barriers: jax.Array  # int32 pairs


SHARED_TYPES = (TILES, TILES, TILES, REF, REF, REF)


def scratch(shape: Shape) -> list:
    return [
        plgpu.SMEM((TEAMS, shape.heads, shape.qk_dim), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((TEAMS, shape.slots, BLOCK, SLICE), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((TEAMS, shape.heads, BLOCK), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((TEAMS, 2, BLOCK), jnp.int32),
        plgpu.SMEM((TEAMS, WARPS, shape.heads), jnp.float32),
        plgpu.SMEM((2 * TEAMS * len(shape.arrivals),), jnp.int32),
    ]


class Item(NamedTuple):
    """A work item of a team. Barriers count the team's items, or the blocks of all its items."""

    number: jax.Array
    t: jax.Array
    limit: jax.Array  # columns scanned
    first_block: jax.Array
    end_block: jax.Array


class Team:
    """Where a team's arrays lie in shared memory; made inside an inlined function."""

    def __init__(self, shape: Shape, refs, team: ir.Value):
        self.shape, self.team = shape, team
        self._refs = Shared(*refs)
        self.sync_barrier = arith.addi(team, ptx.i32(_FIRST_NAMED_BARRIER))
        self.vote_barrier = arith.addi(team, ptx.i32(_FIRST_NAMED_BARRIER + TEAMS))

    def _address(self, ref: ir.Value, nbytes: int) -> ir.Value:
        return arith.addi(ptx.shared_address(ref), arith.muli(self.team, ptx.i32(nbytes)))

    @property
    def queries(self) -> ir.Value:
        return self._address(self._refs.queries, self.shape.heads * self.shape.qk_dim * 2)

    @property
    def keys(self) -> ir.Value:
        return self._address(self._refs.keys, self.shape.slots * SLICE_BYTES)

    @property
    def weights(self) -> ir.Value:
        return self._address(self._refs.weights, self.shape.heads * BLOCK * 2)

    def barrier(self, number: ir.Value | int) -> ir.Value:
        number = ptx.i32(number) if isinstance(number, int) else number
        base = self._address(self._refs.barriers, 8 * len(self.shape.arrivals))
        return arith.addi(base, arith.shli(number, ptx.i32(3)))

    def _mask_at(self, block: ir.Value, key: ir.Value) -> list[ir.Value]:
        return [ptx.index(x) for x in (self.team, arith.andi(block, ptx.i32(1)), key)]

    def set_valid(self, block: ir.Value, key: ir.Value, value: ir.Value) -> None:
        memref.store(value, self._refs.valid, self._mask_at(block, key))

    def is_valid(self, block: ir.Value, key: ir.Value) -> ir.Value:
        mask = memref.load(self._refs.valid, self._mask_at(block, key))
        return arith.cmpi(arith.CmpIPredicate.ne, mask, ptx.i32(0))

    def valid_barrier(self, block: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The barrier of the block's mask, and its phase."""
        number = arith.addi(ptx.i32(self.shape.barriers.valid), arith.andi(block, ptx.i32(1)))
        return self.barrier(number), arith.shrui(block, ptx.i32(1))

    def slots(self, block: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """The slot of each slice of a block, and how often the slot was used before."""
        count = ptx.i32(self.shape.slots)
        first = arith.muli(block, ptx.i32(self.shape.slices))
        slot, phase = arith.remui(first, count), arith.divui(first, count)
        slots = []
        for i in range(self.shape.slices):
            here = arith.addi(slot, ptx.i32(i))
            wraps = arith.cmpi(arith.CmpIPredicate.uge, here, count)
            again = arith.select(wraps, ptx.i32(1), ptx.i32(0))
            here = arith.subi(here, arith.select(wraps, count, ptx.i32(0)))
            slots.append((here, arith.addi(phase, again)))
        return slots

    def slot_address(self, slot: ir.Value) -> ir.Value:
        return arith.addi(self.keys, arith.muli(slot, ptx.i32(SLICE_BYTES)))

    def slot_full(self, slot: ir.Value) -> ir.Value:
        return self.barrier(arith.addi(slot, ptx.i32(self.shape.barriers.full)))

    def slot_empty(self, slot: ir.Value) -> ir.Value:
        return self.barrier(arith.addi(slot, ptx.i32(self.shape.barriers.empty)))

    def over_warps(self, values: list[ir.Value], combine) -> list[ir.Value]:
        """Combines the thread's number of each of its heads with those of all threads that hold the same head."""
        warp, lane = warp_and_lane()
        for distance in (4, 8, 16):
            values = [combine(x, mgpu_utils.shfl_bfly(x, distance)) for x in values]
        heads = [ptx.index(head) for head in thread_heads(self.shape)]
        team = ptx.index(self.team)
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, ptx.i32(4))):
            for head, value in zip(heads, values):
                memref.store(value, self._refs.exchange, [team, ptx.index(warp), head])
        ptx.warpgroup_sync(self.sync_barrier)
        combined = []
        for head in heads:
            parts = [memref.load(self._refs.exchange, [team, ptx.index(ptx.i32(w)), head]) for w in range(WARPS)]
            combined.append(functools.reduce(combine, parts))
        return combined


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    thread = ptx.thread_in_warpgroup()
    return arith.shrui(thread, ptx.i32(5)), arith.andi(thread, ptx.i32(31))


def thread_heads(shape: Shape) -> list[ir.Value]:
    """The heads of the thread's columns in a fragment."""
    _, lane = warp_and_lane()
    first = arith.shli(arith.andi(lane, ptx.i32(3)), ptx.i32(1))
    return [arith.addi(first, ptx.i32(8 * (i // 2) + i % 2)) for i in range(shape.per_thread)]


def head_of(i: int) -> int:
    """To which of the thread's heads scalar i of a fragment belongs."""
    return 2 * (i // 4) + i % 2


def init_barriers(shape: Shape, shared: Shared) -> None:
    @inline(REF)
    def emit(ctx, barriers):
        ptx.barriers_init(barriers, shape.arrivals * TEAMS)

    emit(shared.barriers)
