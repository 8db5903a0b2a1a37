"""Triton kernel that makes a decode call's small arguments safe for FlashMLA, which checks none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from jax_sparse_mla.launch.describe import Launch, Output

# Rows and columns of a program's tile. Padded widths are multiples of 64.
OPTIONS = {"ROWS": 4, "COLUMNS": 256, "num_warps": 4}


def grid(rows: int, width: int, extra_width: int) -> tuple[int, int]:
    """Programs of `sanitise_kernel`: tiles of the first table, then of the second."""
    columns = OPTIONS["COLUMNS"]
    return triton.cdiv(rows, OPTIONS["ROWS"]), triton.cdiv(width, columns) + triton.cdiv(extra_width, columns)


@triton.jit
def _sanitise_tile(
    indices_ptr,
    lengths_ptr,
    n,
    num_slots,
    out_ptr,
    out_lengths_ptr,
    tile,
    TOPK: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    ROWS_PER_LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < n
    column = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    scanned = in_rows[:, None] & (column < TOPK)
    if HAS_LENGTHS:
        at = row // ROWS_PER_LENGTH  # the rows that share a length all write it
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + at, mask=in_rows, other=0), 0), TOPK)
        if out_lengths_ptr is not None and tile == 0:
            tl.store(out_lengths_ptr + at, length, mask=in_rows)
        scanned = scanned & (column < length[:, None])
    if out_ptr is not None:
        row = row.to(tl.int64)[:, None]
        slot = tl.load(indices_ptr + row * STRIDE + column, mask=scanned, other=-1)
        slot = tl.where((slot >= 0) & (slot < num_slots), slot, -1)
        tl.store(out_ptr + row * WIDTH + column, slot, mask=in_rows[:, None] & (column < WIDTH))


@triton.jit
def sanitise_kernel(
    indices_ptr,  # int32 [n, TOPK], rows STRIDE apart
    lengths_ptr,  # int32 [n / ROWS_PER_LENGTH]; not read without HAS_LENGTHS
    extra_ptr,  # int32 [n, EXTRA_TOPK]; not read where EXTRA_WIDTH is 0
    extra_lengths_ptr,  # int32 [n / ROWS_PER_LENGTH]
    sink_ptr,  # float32 [num_heads]; not read without HAS_SINK
    n,
    num_slots,
    num_extra_slots,
    num_heads,
    out_ptr,  # int32 [n, WIDTH], or None: the lengths alone, by the first tile
    out_lengths_ptr,  # as lengths_ptr, or None; not written without HAS_LENGTHS
    extra_out_ptr,  # int32 [n, EXTRA_WIDTH]
    extra_out_lengths_ptr,  # as extra_lengths_ptr, or None; not written without HAS_EXTRA_LENGTHS
    out_sink_ptr,  # float32 [HEADS]; not written without HAS_SINK
    TOPK: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EXTRA_TOPK: tl.constexpr,
    EXTRA_STRIDE: tl.constexpr,
    EXTRA_WIDTH: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    HEADS: tl.constexpr,  # a power of two
    HAS_SINK: tl.constexpr,
    LEAST_SINK: tl.constexpr,
    ROWS_PER_LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Entries that are not scanned, name no slot or pad a row become -1, lengths are clipped to the columns.

    Both tables of a call in one launch; the second may be absent (EXTRA_WIDTH 0). Sinks are raised to LEAST_SINK and
    padded with zeros.
    """
    tile = tl.program_id(1)
    if HAS_SINK and (tile == 0) & (tl.program_id(0) == 0):
        head = tl.arange(0, HEADS)
        sink = tl.load(sink_ptr + head, mask=head < num_heads, other=0.0)
        tl.store(out_sink_ptr + head, tl.maximum(sink, LEAST_SINK, propagate_nan=tl.PropagateNan.ALL))
    first_tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    if tile < first_tiles:
        _sanitise_tile(
            indices_ptr,
            lengths_ptr,
            n,
            num_slots,
            out_ptr,
            out_lengths_ptr,
            tile,
            TOPK,
            STRIDE,
            WIDTH,
            HAS_LENGTHS,
            ROWS_PER_LENGTH,
            ROWS,
            COLUMNS,
        )
    elif EXTRA_WIDTH > 0:
        _sanitise_tile(
            extra_ptr,
            extra_lengths_ptr,
            n,
            num_extra_slots,
            extra_out_ptr,
            extra_out_lengths_ptr,
            tile - first_tiles,
            EXTRA_TOPK,
            EXTRA_STRIDE,
            EXTRA_WIDTH,
            HAS_EXTRA_LENGTHS,
            ROWS_PER_LENGTH,
            ROWS,
            COLUMNS,
        )


class Table(NamedTuple):
    """An index table's static facts.

    Attributes:
      topk: its columns.
      width: columns of the result, at least topk.
      num_slots: of its cache.
      has_lengths: whether a length comes with each `rows_per_length` rows.
      keeps_lengths: whether the kernel that reads the result takes lengths.
      rewritten: False if only the lengths are made safe.
      stride: entries from one row to the next; 0: topk.
    """

    topk: int
    width: int
    num_slots: int
    has_lengths: bool
    keeps_lengths: bool = True
    rewritten: bool = True
    stride: int = 0


ABSENT = Table(topk=1, width=0, num_slots=0, has_lengths=False)


def sanitise(
    rows: int, tables: Sequence[Table], *, heads: int, padded_heads: int, least_sink: float, rows_per_length: int = 1
) -> Launch:
    """The launch for one or two tables of `rows` rows, and a sink of `heads` heads (0: none).

    Inputs are the indices and the lengths of both tables and the sink. Outputs are the same; those of what is absent
    are not written.
    """
    first, second = both = (*tables, ABSENT)[:2]
    widths = [table.width if table.rewritten else 0 for table in both]
    outputs = []
    for table, width in zip(both, widths):
        outputs.append(Output((rows, width) if width else (1,), "int32"))
        outputs.append(Output((rows // rows_per_length,) if table.has_lengths else (1,), "int32"))
    constants = {
        "TOPK": first.topk,
        "STRIDE": first.stride or first.topk,
        "WIDTH": first.width,
        "HAS_LENGTHS": first.has_lengths,
        "EXTRA_TOPK": second.topk,
        "EXTRA_STRIDE": second.stride or second.topk,
        "EXTRA_WIDTH": second.width,
        "HAS_EXTRA_LENGTHS": second.has_lengths,
        "HEADS": padded_heads,
        "HAS_SINK": heads > 0,
        "LEAST_SINK": least_sink,
        "ROWS_PER_LENGTH": rows_per_length,
        **OPTIONS,
    }
    scalars = rows, first.num_slots, second.num_slots, heads
    outputs.append(Output((padded_heads,), "float32"))
    return Launch(sanitise_kernel, "sanitise", grid(rows, max(widths[0], 1), widths[1]), scalars, outputs, constants)
