"""The launches of sparse MLA attention: the kernel and, where programs share a row's keys, the combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_sparse_mla.attention.index_table import V_DIM, TableShape
from jax_sparse_mla.attention.triton.kernel import combine_kernel, sparse_mla_kernel
from jax_sparse_mla.attention.triton.plan import MIN_FP4_BLOCK, Tile, choose_splits, choose_tile, row_kind
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.launch.describe import Device, Launch, Output

_LOG2_E = 1.4426950408889634


class CallShape(NamedTuple):
    """A call's static shape.

    Attributes:
      layout: of the first cache's rows (`workspace_layout` for prefill).
      rows, heads: query rows and heads, at least 1.
      tables: one or two; the second may have another layout, which is read in a loop of its own.
      softmax_scale: what q·k is multiplied by.
      has_sink: whether the call has an attention sink.
    """

    layout: KVLayout
    rows: int
    heads: int
    tables: Sequence[TableShape]
    softmax_scale: float
    has_sink: bool


def launches(
    shape: CallShape,
    device: Device,
    *,
    max_logits: bool = False,
    may_split: bool = True,
    empty_is_inf: bool = False,
    num_splits: int | None = None,
    tile: Tile | None = None,
    native_fp8: bool | None = None,
) -> tuple[Launch, Launch | None]:
    """The kernel's launch, and the combine's where several programs share a row's keys.

    The first takes `inputs` and writes out, lse and max_logits. If there is a second, it takes that out and lse and the
    sink, and writes out and lse.

    Args:
      shape: of the call.
      device: what runs it.
      max_logits: whether they are written.
      may_split: False computes each row by one program, in the same order whatever the batch; max_logits needs it.
      empty_is_inf: the lse of a row without a key is +inf, FlashMLA's convention, and not −inf.
      num_splits, tile, native_fp8: override what is chosen here (tests, tuning).

    Raises:
      ValueError: a tile with fewer keys than a block of FP4 rows may have.
    """
    layout, rows, heads, tables, softmax_scale, has_sink = shape
    # A cache that is absent has the first one's pages: the kernel divides by its page size.
    first, second = (*tables, tables[0]._replace(topk=0, rows_per_length=0, num_slots=0))[:2]
    columns = first.topk, second.topk
    if tile is None:
        tile = choose_tile(layout, rows=rows, num_heads=heads, columns=columns, device=device, may_split=may_split)
    extra_layout = second.layout if second.topk and second.layout else layout
    if tile.block_n < MIN_FP4_BLOCK and (layout.fp4_dim or extra_layout.fp4_dim):
        raise ValueError(f"sparse_mla: blocks of FP4 rows have at least {MIN_FP4_BLOCK} keys, got {tile.block_n}")
    blocks = sum(-(-topk // tile.block_n) for topk in columns)
    programs = rows * -(-heads // tile.block_h)
    splits = num_splits or (choose_splits(programs, blocks, device.sm_count) if may_split else 1)
    lse = Output((rows, heads), "float32")
    results = parts = Output((rows, heads, V_DIM), "bfloat16"), lse
    if splits > 1:
        parts = Output((splits, rows, heads, V_DIM), "float32"), Output((splits, rows, heads), "float32")
    constants = {"NATIVE": device.hardware_fp8 if native_fp8 is None else native_fp8, "QK_DIM": layout.qk_dim}
    constants |= {"HAS_SINK": has_sink and splits == 1, "SPLIT": splits > 1, "EMPTY_IS_INF": empty_is_inf}
    constants |= {"KIND": row_kind(layout), "ROW_BYTES": layout.data_bytes, "HAS_EXTRA": second.topk > 0}
    constants |= {"EXTRA_KIND": row_kind(extra_layout), "EXTRA_ROW_BYTES": extra_layout.data_bytes}
    constants |= {"PAGE_SIZE": first.page_size, "PAGE_BYTES": first.page_bytes}
    constants |= {"EXTRA_PAGE_SIZE": second.page_size, "EXTRA_PAGE_BYTES": second.page_bytes}
    constants |= {"BLOCK_H": tile.block_h, "BLOCK_N": tile.block_n}
    constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    sizes = [x for table in (first, second) for x in (table.rows_per_length, table.topk, table.num_slots)]
    sizes += [x for table in (first, second) for x in (table.first_page, table.stride or table.topk)]
    scalars, outputs = (softmax_scale * _LOG2_E, heads, *sizes), (*parts, lse if max_logits else None)
    attend = Launch(sparse_mla_kernel, "sparse_mla", (programs, splits), scalars, outputs, constants)
    if splits == 1:
        return attend, None
    all_splits = 1 << (splits - 1).bit_length()
    constants = {"HAS_SINK": has_sink, "EMPTY_IS_INF": empty_is_inf, "ALL_SPLITS": all_splits}
    constants["SOME_SPLITS"] = min(all_splits, 8)
    scalars, grid = (heads, splits), (rows * heads,)
    return attend, Launch(combine_kernel, "sparse_mla_combine", grid, scalars, results, constants)


def inputs(q: Any, tables: Sequence[tuple[Any, ...]], sink: Any) -> list[Any]:
    """The kernel's inputs; tables are one or two `(cache, indices, lengths or None)`, the sink may be None.

    A table of a layout with one scale has it, float32 `[1]`, behind its lengths. What else is absent is not read, but
    has a pointer all the same.
    """
    arrays = [q]
    for cache, indices, lengths, *scale in (*tables, tables[0])[:2]:
        arrays += (cache, indices, indices if lengths is None else lengths, *(scale or (None,)))
    return [*arrays, q if sink is None else sink]
