"""Launch plans of the sparse MLA kernel: plain numbers from static shapes and the device, for both frameworks.

Imports neither jax nor torch nor triton.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax_sparse_mla.kv_cache.layout import KVLayout

# KIND of the kernel.
BF16_ROW, FOOTER_SCALES, INLINE_SCALES = 0, 1, 2
V_DIM = 512

# In blocks of 64 keys, measured on an H200 (5 µs each, V4, 64 heads): what the combine costs, and what a program
# costs besides its blocks (query load, first gather, output).
COMBINE_BLOCKS = 1
PROGRAM_BLOCKS = 3


class Scope(NamedTuple):
    """The static facts of one index table and of what it names.

    Attributes:
      topk: index columns.
      rows_per_length: query rows that share a length; 0 without lengths.
      num_slots: rows of the cache or workspace.
      page_size, page_bytes: of the cache, bytes from one page's start to the next one's; 0 for a workspace.
    """

    topk: int
    rows_per_length: int
    num_slots: int
    page_size: int = 0
    page_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program works on: heads, indices per block, and how Triton compiles it."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One launch of `sparse_mla_kernel`, and of `combine_kernel` if `num_splits > 1`.

    Attributes:
      grid: `(rows · head tiles, num_splits)`.
      num_splits: programs that share a query row's keys.
      constexprs: of `sparse_mla_kernel`.
      num_warps, num_stages: of `sparse_mla_kernel`.
      combine_grid: `(rows · heads,)`.
      combine_constexprs: of `combine_kernel`.
    """

    grid: tuple[int, int]
    num_splits: int
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    combine_grid: tuple[int]
    combine_constexprs: dict[str, Any]


def row_kind(layout: KVLayout) -> int:
    """How the kernel reads a row of this layout."""
    if layout.fp8_dim == 0:
        return BF16_ROW
    return FOOTER_SCALES if layout.footer_scale_bytes else INLINE_SCALES


def choose_tile(
    layout: KVLayout,
    *,
    rows: int,
    num_heads: int,
    topk: int,
    extra_topk: int,
    capability: tuple[int, int],
    sm_count: int,
    may_split: bool,
) -> Tile:
    """Heads and indices of a program, and its compilation; measured on an H200, elsewhere chosen by what fits.

    * The wgmma of SM90 takes 64 heads at a time, and keys shared by 64 heads are dequantised once. A program spends its
      time on instructions, not on waiting for keys: more blocks in flight than two stages give only cost more of them,
      but with rows of 576 values, where registers run out, the third stage costs fewer.
    * 16 heads × 32 indices keep queries, accumulators and two stages of keys within 99 KiB and 255 registers in every
      layout: the tile of the other devices, and the one that spreads a small decode over the most multiprocessors.
    """
    head_tiles = -(-num_heads // 16)
    if capability[0] != 9:
        return Tile(16, 32, 4, 2)
    small_blocks = -(-topk // 32) + -(-extra_topk // 32)
    if may_split and rows * head_tiles * small_blocks <= sm_count:
        return Tile(16, 32, 4, 1)  # a program has one block
    return Tile(16 if head_tiles == 1 else 64, 64, 8, 3 if layout.qk_dim > 512 else 2)


def choose_splits(programs: int, blocks: int, sm_count: int) -> int:
    """How many programs share a row's `blocks`: the fewest whose waves over the device take the least time."""

    def cost(splits: int) -> int:
        waves = -(-programs * splits // sm_count)
        combine = COMBINE_BLOCKS if splits > 1 else 0
        return waves * (-(-blocks // splits) + PROGRAM_BLOCKS) + combine

    candidates = range(1, max(1, min(blocks, sm_count)) + 1)
    return min(candidates, key=lambda splits: (cost(splits), splits))


def launch_plan(
    layout: KVLayout,
    *,
    rows: int,
    num_heads: int,
    topk: int,
    extra_topk: int,
    has_sink: bool,
    capability: tuple[int, int],
    sm_count: int,
    may_split: bool = True,
    empty_is_inf: bool = False,
    num_splits: int | None = None,
    tile: Tile | None = None,
    native_fp8: bool | None = None,
) -> LaunchPlan:
    """The launch of a call of this shape.

    Args:
      layout: of the cache rows (`workspace_layout` for prefill).
      rows: query rows, batch · q_len; at least 1.
      num_heads: query heads, at least 1.
      topk, extra_topk: index columns per row, 0 without an extra cache.
      has_sink: whether the call has an attention sink.
      capability, sm_count: of the device.
      may_split: False for prefill, whose max_logits the combine does not carry.
      empty_is_inf: the lse of a row without a key is +inf, FlashMLA's convention, and not −inf.
      num_splits, tile, native_fp8: override what is chosen here (tests, tuning).
    """
    tile = tile or choose_tile(
        layout,
        rows=rows,
        num_heads=num_heads,
        topk=topk,
        extra_topk=extra_topk,
        capability=capability,
        sm_count=sm_count,
        may_split=may_split,
    )
    blocks = -(-topk // tile.block_n) + -(-extra_topk // tile.block_n)
    programs = rows * -(-num_heads // tile.block_h)
    if num_splits is None:
        num_splits = choose_splits(programs, blocks, sm_count) if may_split else 1
    all_splits = 1 << (num_splits - 1).bit_length()
    return LaunchPlan(
        grid=(programs, num_splits),
        num_splits=num_splits,
        constexprs={
            "KIND": row_kind(layout),
            "NATIVE": capability >= (8, 9) if native_fp8 is None else native_fp8,
            "HAS_SINK": has_sink and num_splits == 1,
            "SPLIT": num_splits > 1,
            "HAS_EXTRA": extra_topk > 0,
            "EMPTY_IS_INF": empty_is_inf,
            "ROW_BYTES": layout.data_bytes,
            "QK_DIM": layout.qk_dim,
            "BLOCK_H": tile.block_h,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        combine_grid=(rows * num_heads,),
        combine_constexprs={
            "HAS_SINK": has_sink,
            "EMPTY_IS_INF": empty_is_inf,
            "ALL_SPLITS": all_splits,
            "SOME_SPLITS": min(all_splits, 8),
        },
    )


def page_constants(first: Scope, second: Scope) -> dict[str, int]:
    """The kernel's constants of both caches' pages."""
    constants = {"PAGE_SIZE": first.page_size, "PAGE_BYTES": first.page_bytes}
    return constants | {"EXTRA_PAGE_SIZE": second.page_size, "EXTRA_PAGE_BYTES": second.page_bytes}
