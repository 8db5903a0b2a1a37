"""How the SM90 decode kernel's thread blocks share the rows of a call, from static shapes alone.

The kernel (`kernels_cuda/sparse_decode_schedule.cuh`) deals whole rows to its thread blocks, or cuts the line of all
rows' blocks of 64 keys in equal pieces; here stands what must be known before the launch.
"""

from __future__ import annotations

import dataclasses

_BLOCK = 64  # keys
_HEADS = 64  # of a tile
V_DIM = 512
_ROW_COST, _JOIN_COST, _PARTS_JOINED = 1, 3, 44  # as the kernel's kRowCost, kJoinCost and kPartsJoined
_JOINERS = 16  # thread blocks of 16 warps that the parts of one row, 64 heads in quarters, keep busy

NEVER, ALWAYS, AS_LENGTHS_SAY = 0, 1, 2  # the kernel's Cuts


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """One launch.

    Attributes:
      groups: of thread blocks, one for each tile of 64 heads, that share the rows.
      cuts: whether a row may be attended to in parts that are joined at the end: `NEVER`, `ALWAYS` or, where it
        depends on the lengths, `AS_LENGTHS_SAY`.
      part_shapes: of the scratch that the parts need: float32 values and (maximum, sum), int32 rows; none without cuts.
    """

    groups: int
    cuts: int
    part_shapes: tuple[tuple[int, ...], ...]


def decode_plan(
    rows: int,
    heads: int,
    topks: tuple[int, ...],
    *,
    has_lengths: bool,
    sm_count: int,
    batch_invariant: bool = False,
) -> DecodePlan:
    """The launch for `rows` query rows that read `topks` index columns of each cache.

    Args:
      has_lengths: whether the columns that count are data.
      batch_invariant: cut no row, so that its result does not depend on the others.
    """
    tiles = -(-heads // _HEADS)
    most = max(sum(-(-topk // _BLOCK) for topk in topks), 1)
    groups = max(min(sm_count // tiles, rows * max(most, _JOINERS)), 1)
    if batch_invariant or tiles > sm_count:  # all thread blocks of a launch with cuts run at once
        cuts = NEVER
    else:
        cuts = AS_LENGTHS_SAY if has_lengths else _worth_cutting(rows, most, groups, tiles)
    blocks = groups * tiles
    parts = () if cuts == NEVER else ((blocks, 2, _HEADS, V_DIM), (blocks, 2, _HEADS, 2), (blocks, 2))
    return DecodePlan(groups, cuts, parts)


def _worth_cutting(rows: int, blocks: int, groups: int, tiles: int) -> int:
    """For rows of one length, what the kernel does where lengths differ: are parts worth their joining?

    Rows that are left after as many for each group as there are whole rounds are cut in equal parts, if there are few
    of them, or else the line of all rows is cut. Times are in units of a block.
    """
    row, (rounds, rest) = blocks + _ROW_COST, divmod(rows, groups)
    whole = (rounds + (rest > 0)) * row
    if 0 < 2 * rest <= groups:
        cut, parts = rounds * row - (-blocks // (groups // rest)), rest * (groups // rest)
    else:
        cut, parts = -(-rows * row // groups), min(rows, groups) + groups
    cut += _ROW_COST + _JOIN_COST + parts * tiles // _PARTS_JOINED
    return ALWAYS if whole > cut else NEVER
