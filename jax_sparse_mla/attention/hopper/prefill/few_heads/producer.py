"""The producer's work: it gathers an item's queries and its blocks of keys by `cp.async`."""

from __future__ import annotations

from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_sparse_mla.attention.hopper.prefill import ptx, tiles
from jax_sparse_mla.attention.hopper.prefill.few_heads.team import (
    BLOCK,
    SHARED_TYPES,
    SLICE,
    Item,
    Shape,
    Shared,
    Team,
)
from jax_sparse_mla.attention.hopper.prefill.tiles import REF, SPLAT, inline, scalar

_ROW_NUMBERS = tiles.per_thread_layout(tiles.ROWS_PER_THREAD)  # of a block


def _gather_queries(shape: Shape, q_ref, sizes: tiles.Sizes, shared: Shared, team, item: Item) -> None:
    """Copies a token's heads; heads that there are not become zero."""

    @inline(REF, *SHARED_TYPES, *[SPLAT] * 5)
    def emit(ctx, q, *args):
        *refs, heads, q_heads, team, t, item = args
        team = Team(shape, refs, scalar(team))
        *_, columns = ir.MemRefType(q.type).shape
        copied = -(-shape.heads // 16)  # rows of a thread
        target = tiles.tile_address_at(team.queries, columns)
        ptx.barrier_wait_at(team.barrier(shape.barriers.queries_empty), ptx.previous(scalar(item)))
        for i, row in enumerate(tiles.thread_rows()[:copied]):
            exists = arith.cmpi(arith.CmpIPredicate.slt, row, scalar(heads))
            number = arith.select(exists, ptx.number(scalar(t), scalar(q_heads), row), ptx.i64(0))
            source = tiles.source_address(q, number)
            nbytes = arith.select(exists, ptx.i32(16), ptx.i32(0))
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, ptx.i32(shape.heads))):
                for tile in range(shape.slices):
                    offset = 2 * i * tiles.row_stride(columns) + tile * tiles.TILE_BYTES
                    ptx.copy_16(target, offset, source, tile * 2 * SLICE, nbytes)
        ptx.barrier_arrive_after_copies_at(team.barrier(shape.barriers.queries_full))

    emit(q_ref, *shared, sizes.heads, sizes.q_heads, team, item.t, item.number)


def _gather_block(shape: Shape, row_numbers, kv_ref, shared: Shared, team, block) -> None:
    """Starts the copies of a block, slice by slice."""

    @inline(_ROW_NUMBERS, REF, *SHARED_TYPES, SPLAT, SPLAT)
    def emit(ctx, row_numbers, kv, *args):
        *refs, team, block = args
        team, block = Team(shape, refs, scalar(team)), scalar(block)
        rows = tiles.from_per_thread(row_numbers)
        sources = [tiles.source_address(kv, ptx.extend(row)) for row in rows]
        for i, (slot, uses) in enumerate(team.slots(block)):
            ptx.barrier_wait_at(team.slot_empty(slot), ptx.previous(uses))
            if i == 0:
                _store_valid(team, block, rows)
            target = tiles.tile_address_at(team.slot_address(slot), SLICE)
            source_tile = (i - shape.tails) % shape.slices
            tiles.copy_rows(target, SLICE, [0], rows, sources, source_tile)
            ptx.barrier_arrive_after_copies_at(team.slot_full(slot))

    emit(row_numbers, kv_ref, *shared, team, block)


def _store_valid(team: Team, block: ir.Value, rows: list[ir.Value]) -> None:
    """Stores the mask of a block's keys; eight threads store the same value."""
    for key, row in zip(tiles.thread_rows(), rows):
        exists = arith.cmpi(arith.CmpIPredicate.sge, row, ptx.i32(0))
        team.set_valid(block, key, arith.select(exists, ptx.i32(1), ptx.i32(0)))
    barrier, _ = team.valid_barrier(block)
    ptx.barrier_arrive_at(barrier)


def produce(shape: Shape, q_ref, kv_ref, indices_ref, sizes: tiles.Sizes, shared: Shared, team, item: Item) -> None:
    _gather_queries(shape, q_ref, sizes, shared, team, item)

    def row_numbers(block):
        first = (block - item.first_block) * BLOCK
        return tiles.row_numbers(indices_ref, sizes, item.t, first, item.limit, blocks=1)

    def step(block, rows):
        following = row_numbers(block + 1)
        _gather_block(shape, rows, kv_ref, shared, team, block)
        return following

    lax.fori_loop(item.first_block, item.end_block, step, row_numbers(item.first_block))
