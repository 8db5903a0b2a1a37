"""How the SM90 decode kernels' thread blocks share the rows of a call, from static shapes alone.

One kernel goes through many rows: it deals whole rows to its thread blocks, or cuts the line of all rows' blocks of 64
keys in equal pieces (`kernels_cuda/sparse_decode/schedule.cuh`). Two are for fewer rows: a cluster of thread blocks
shares each row's keys, for 16 or 32 heads (`kernels_cuda/sparse_decode/cluster.cuh`) or for 64 (`wide.cuh`). One is
for rows of at most 128 keys of one cache, V4's window layers (`window.cuh`). Here stands which one serves, and what
must be known before the launch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from jax_sparse_mla.attention.index_table import V_DIM
from jax_sparse_mla.kv_cache.layout import KVLayout

_BLOCK = 64  # keys
_HEADS = 64  # of a tile
_ROW_COST, _JOIN_COST, _PARTS_JOINED = 1, 3, 44  # as the kernel's kRowCost, kJoinCost and kPartsJoined
_WINDOW_BLOCKS = 2  # as the kernel's kWindowBlocks
_MOST_PARTS = 16  # as the kernel's kMostParts: thread blocks of a cluster, which has two at least

# Bytes of the two parts of 64 heads that each thread block may leave: float32 values, their maximum and sum; and the
# parts' rows, int32. place_scratch of call.cuh says where each is.
SCRATCH_OF_BLOCK = 4 * (2 * _HEADS * (V_DIM + 2) + 2)

NEVER, ALWAYS, AS_LENGTHS_SAY, IN_CLUSTERS, IN_WINDOW = range(5)  # the kernel's Cuts
V4, V32, V41, V41_FP4, V4_BF16, V32_BF16 = range(6)  # the kernel's Format

_FORMATS = {
    KVLayout.V4_FP8: V4,
    KVLayout.V32_FP8: V32,
    KVLayout.V41_FP8: V41,
    KVLayout.V41_FP8_SPLIT: V41,
    KVLayout.V41_FP4: V41_FP4,
    KVLayout.V41_FP4_SPLIT: V41_FP4,
    KVLayout.V4_BF16: V4_BF16,
    KVLayout.NOPE_BF16: V4_BF16,  # its 512 values are all alike to the kernel
    KVLayout.V32_BF16: V32_BF16,
}

_HAVE_WINDOW = (V4, V41, V4_BF16)  # as the kernel's kHasWindow


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """One launch.

    Attributes:
      tile: heads that a thread block attends to: 64, or 16 or 32 in the cluster kernel.
      groups: of thread blocks, one for each tile, that share the rows; or the thread blocks of a cluster.
      cuts: whether a row may be attended to in parts that are joined at the end: `NEVER`, `ALWAYS` or, where it
        depends on the lengths, `AS_LENGTHS_SAY`. The cluster kernel has `NEVER`, the wide one `IN_CLUSTERS`, and the
        window kernel, which cuts no row, `IN_WINDOW`.
      scratch_bytes: what the parts need, 0 without cuts; see `Call` in schedule.cuh.
    """

    tile: int
    groups: int
    cuts: int
    scratch_bytes: int


def decode_format(layouts: Iterable[KVLayout]) -> int:
    """The kernel's Format for a call's caches, of these layouts; V41_FP4 where the second cache has such rows."""
    return max(_FORMATS[layout.read_as] for layout in layouts)


def cache_numbers(layout: KVLayout, num_slots: int, page_size: int, page_bytes: int) -> tuple[int, ...]:
    """The numbers of a cache with which the kernel's Shape ends: where slots, pages, rows and scales are."""
    return num_slots, page_size, page_bytes, layout.data_bytes, *layout.scale_place(page_size)


NO_CACHE = (0, 1, 0, 0, 0, 0)  # the same where there is none


def decode_plan(
    rows: int,
    heads: int,
    topks: tuple[int, ...],
    *,
    has_lengths: bool,
    sm_count: int,
    kernel_format: int | None = None,
    batch_invariant: bool = False,
) -> DecodePlan:
    """The launch for `rows` query rows that read `topks` index columns of each cache.

    Args:
      has_lengths: whether the columns that count are data.
      kernel_format: of `decode_format`; None for one that has no window kernel.
      batch_invariant: cut no row, so that its result does not depend on the others.
    """
    shape = (rows, heads, max(sum(-(-topk // _BLOCK) for topk in topks), 1), sm_count)
    time, tile, parts = NO_CLUSTERS if batch_invariant else _time_in_clusters(*shape)
    # The kernels of whole rows give the same numbers to the bit, so also without cuts the batch may choose.
    whole = _time_of_many(*shape)
    if time < whole and tile < _HEADS:
        return DecodePlan(tile, parts, NEVER, 0)
    short = kernel_format in _HAVE_WINDOW and len(topks) == 1 and shape[2] <= _WINDOW_BLOCKS
    if short and _in_one_wave(rows, heads, sm_count):
        return DecodePlan(_HEADS, 1, IN_WINDOW, 0)
    if time < whole:
        return DecodePlan(tile, parts, IN_CLUSTERS, 0)
    return _plan_of_many(*shape, has_lengths, batch_invariant)


# Microseconds of FlashMLA's prefill on an H200 for 64 keys of a row with 64 heads on a multiprocessor: a row of 2,048
# takes 58.6 and one of 512 14.8 (`python -m benchmarks prefill`, 4,096 queries; those that run at once). What a
# launch takes besides is not known. Ours has to be a sixth sooner, since neither was measured beside the other.
_PREFILL_BLOCK, _SOONER = 1.8, 0.85


@functools.lru_cache
def sooner_than_prefill(rows: int, heads: int, topk: int, *, sm_count: int) -> bool:
    """Whether the decode kernels take less time for `rows` rows of bfloat16 keys than FlashMLA's prefill.

    Prefill goes through all keys of a row on one multiprocessor, however few rows there are. Only calls are considered
    whose rows it does all at once.
    """
    shape = rows, heads, max(-(-topk // _BLOCK), 1), sm_count
    if rows * heads == 0 or rows * -(-heads // _HEADS) > sm_count:
        return False
    ours = min(_time_in_clusters(*shape)[0], _time_of_many(*shape))
    return ours < _SOONER * shape[2] * _PREFILL_BLOCK


def _plan_of_many(
    rows: int, heads: int, blocks: int, sm_count: int, has_lengths: bool, batch_invariant: bool
) -> DecodePlan:
    """The launch of the kernel that goes through many rows, of so many blocks at most."""
    tiles, groups = _tiles_and_groups(heads, sm_count)
    if batch_invariant or tiles > sm_count:  # all thread blocks of a launch with cuts run at once
        groups, cuts = max(min(groups, rows), 1), NEVER
    else:
        cuts = AS_LENGTHS_SAY if has_lengths else _worth_cutting(rows, blocks, groups, tiles)
    return DecodePlan(_HEADS, groups, cuts, 0 if cuts == NEVER else groups * tiles * SCRATCH_OF_BLOCK)


def _tiles_and_groups(heads: int, sm_count: int) -> tuple[int, int]:
    """Groups on all multiprocessors: where rows are cut, those without any fetch the joining code for the others."""
    tiles = -(-heads // _HEADS)
    return tiles, max(sm_count // tiles, 1)


def _worth_cutting(rows: int, blocks: int, groups: int, tiles: int) -> int:
    """For rows of one length, what the kernel does where lengths differ: are parts worth their joining?

    Rows that are left after as many for each group as there are whole rounds are cut in equal parts, if there are few
    of them, or else the line of all rows is cut. Times are in units of a block.
    """
    row, (rounds, left) = blocks + _ROW_COST, divmod(rows, groups)
    whole = (rounds + (left > 0)) * row
    if 0 < 2 * left <= groups:
        cut, parts = rounds * row - (-blocks // (groups // left)), left * min(groups // left, blocks)
    else:
        cut, parts = -(-rows * row // groups), min(rows, groups) + groups
    cut += _ROW_COST + _JOIN_COST + parts * tiles // _PARTS_JOINED
    return ALWAYS if whole > cut else NEVER


# Microseconds on an H200, for FP8 caches. Calls of bfloat16 caches are planned by the same times, which were not fitted
# to them. The times of many rows were fitted to 220 shapes. Of clusters: the tile, what a launch and a block of a part
# take, and the share by which each thread block of the launch makes both longer. With 16 and 32 heads these are within
# 3% of 53 launches that were timed for V4, and up to 10% too short for V3.2; with 64 they are within 12% of 281.
_OF_CLUSTERS = (16, 4.1, 2.4, 0), (32, 5.1, 3.0, 0), (_HEADS, 10.2, 2.3, 1 / 850)
NO_CLUSTERS = (float("inf"), 0, 0)  # of `_time_in_clusters`


def _time_in_clusters(rows: int, heads: int, blocks: int, sm_count: int) -> tuple[float, int, int]:
    """The shortest time of a launch whose clusters all run at once, its tile and thread blocks of a cluster."""
    best = NO_CLUSTERS
    for tile, fixed, block, longer in _OF_CLUSTERS:
        clusters = rows * -(-heads // tile)
        if 16 < tile >= 2 * heads:
            break
        for parts in range(2, max(2, min(blocks, _MOST_PARTS)) + 1):
            if clusters <= _clusters_at_once(parts, sm_count):
                time = (fixed + block * -(-blocks // parts)) * (1 + longer * clusters * parts)
                best = min(best, (time, tile, parts))
    return best


def _in_one_wave(rows: int, heads: int, sm_count: int) -> bool:
    """Whether the window kernel's thread blocks, one for a row and 64 of its heads, all run at once.

    Then it is sooner than the kernel of many rows, and with a second wave later: 14.8 and 15.4 us for 128 rows of 64
    heads on an H200, 27.3 and 24.0 for 256. Wide clusters would take 12.5 or more, by the times above.
    """
    return rows * -(-heads // _HEADS) <= sm_count


def _clusters_at_once(parts: int, sm_count: int) -> int:
    """A cluster lies within one of the parts of a GPU, of 16 or 18 multiprocessors that need not all be there."""
    if parts == 2:
        return sm_count // 2
    if parts <= 8:
        return 4 * sm_count // (5 * parts)
    return sm_count // (16 if parts == 9 else 18)


def _time_of_many(rows: int, heads: int, blocks: int, sm_count: int) -> float:
    tiles, groups = _tiles_and_groups(heads, sm_count)
    whole = 8.5 + 2.5 * -(-rows // groups) * blocks
    if rows >= groups:
        return whole
    blocks_of_part = -(-blocks // (groups // rows))
    parts = -(-blocks // blocks_of_part)
    cut = 11.5 + 2.9 * blocks_of_part + 0.03 * rows * tiles * parts + (2.5 if parts > 16 else 0)
    return min(whole, cut)
