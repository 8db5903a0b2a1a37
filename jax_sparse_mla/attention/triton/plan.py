"""Plan of the sparse MLA kernel's launches: plain numbers from static shapes and the device.

Imports neither jax nor torch nor triton.
"""

from __future__ import annotations

import dataclasses

from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.launch.describe import Device

# KIND of the kernel.
BF16_ROW, FOOTER_SCALES, INLINE_SCALES, BYTE_SCALES, E2M1_PAIRS, ONE_SCALE = range(6)

# The fewest keys of a block with FP4 rows. Triton 3.6 lays the operands of the small products out for 8 values a load
# and 4 threads along the keys; of 16 keys it then multiplies wrong ones (seen on an H200).
MIN_FP4_BLOCK = 32

# In blocks of 64 keys, measured on an H200 (5 µs each, V4, 64 heads): what the combine costs, and what a program
# costs besides its blocks (query load, first gather, output).
COMBINE_BLOCKS = 1
PROGRAM_BLOCKS = 3


@dataclasses.dataclass(frozen=True)
class Tile:
    """The work of one program: heads, indices per block, and how Triton compiles it."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def row_kind(layout: KVLayout) -> int:
    """How the kernel reads a row of this layout, one of those that the backend's record names."""
    if layout.fp4_dim:
        return E2M1_PAIRS
    if layout.has_tensor_scale:
        return ONE_SCALE
    if layout.fp8_dim == 0:
        return BF16_ROW
    if layout.group == 32:
        return BYTE_SCALES
    return FOOTER_SCALES if layout.footer_scale_bytes else INLINE_SCALES


def choose_tile(
    layout: KVLayout,
    *,
    rows: int,
    num_heads: int,
    columns: tuple[int, int],
    device: Device,
    may_split: bool,
) -> Tile:
    """Heads and indices of a program, and its compilation; measured on an H200, elsewhere chosen by what fits.

    `columns` are those of both index tables, 0 of one that is absent.

    * The wgmma of SM90 takes 64 heads at a time, and keys shared by 64 heads are dequantised once. A program spends its
      time on instructions, not on waiting for keys: more blocks in flight than two stages give only cost more of them,
      but with rows of 576 values, where registers run out, the third stage costs fewer.
    * 16 heads × 32 indices keep queries, accumulators and two stages of keys within 99 KiB and 255 registers in every
      layout: the tile of the other devices, and the one that spreads a small decode over the most multiprocessors.
    """
    head_tiles = -(-num_heads // 16)
    if device.compute_capability[0] != 9:
        return Tile(16, 32, 4, 2)
    small_blocks = sum(-(-topk // 32) for topk in columns)
    if may_split and rows * head_tiles * small_blocks <= device.sm_count:
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
