"""Launch plans of the sparse MLA kernel: plain numbers from static shapes and the device, for both frameworks.

Imports neither jax nor torch nor triton.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_sparse_mla.kv_cache.layout import KVLayout

# KIND of the kernel.
BF16_ROW, FOOTER_SCALES, INLINE_SCALES = 0, 1, 2
V_DIM = 512

# The combine costs about as much as this many blocks of keys; a split must save more than that.
COMBINE_BLOCKS = 1
# The cost of starting a program (query load, first gather, output), in blocks.
PROGRAM_BLOCKS = 1


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


def workspace_layout(qk_dim: int) -> KVLayout:
    """The layout of a row of prefill's bf16 workspace."""
    return KVLayout("workspace", nope_dim=qk_dim - 64, rope_dim=64, v_dim=min(qk_dim, V_DIM))


def check_layout(function: str, layout: KVLayout) -> None:
    """Refuses rows that the kernel's four segments do not cover."""
    if (layout.qk_dim, layout.v_dim) not in ((512, 512), (576, 512)):
        raise ValueError(
            f"{function}: the Triton kernel takes rows of 512 or 576 values whose first 512 are V, got "
            f"{layout.qk_dim} and {layout.v_dim}; the reference takes any"
        )


def choose_tile(kind: int, qk_dim: int, num_heads: int, capability: tuple[int, int]) -> Tile:
    """Heads and indices of a program, by what its keys, queries and accumulators take of the device.

    The wgmma of SM90 needs 64 heads; elsewhere 16 or 32 heads keep queries and two stages of keys within 99 KiB.
    """
    del qk_dim
    if capability[0] == 9 and num_heads > 32:
        return Tile(64, 64, 8, 2)
    heads = 16 if num_heads <= 16 else 32
    if capability[0] == 9:
        return Tile(heads, 64, 4, 2)
    if kind == BF16_ROW:
        return Tile(heads, 32, 4, 1)
    return Tile(heads, 32, 4, 1)


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
      num_splits, tile, native_fp8: override what is chosen here (tests, tuning).
    """
    tile = tile or choose_tile(row_kind(layout), layout.qk_dim, num_heads, capability)
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
            "ROW_BYTES": layout.data_bytes,
            "SEG_C": layout.qk_dim - 448,
            "ROPE_IS_V": layout.qk_dim == V_DIM,
            "BLOCK_H": tile.block_h,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        combine_grid=(rows * num_heads,),
        combine_constexprs={
            "HAS_SINK": has_sink,
            "ALL_SPLITS": all_splits,
            "SOME_SPLITS": min(all_splits, 8),
        },
    )


def cache_scalars(layout: KVLayout, num_pages: int, page_size: int) -> tuple[int, int, int]:
    """The kernel's num_slots, page_size and page_stride (rows of `layout.data_bytes` from page to page)."""
    return num_pages * page_size, page_size, layout.page_bytes(page_size) // layout.data_bytes
