"""FlashInfer's top-k kernels as XLA custom calls: its two transforms, and our contract on top of them.

FlashInfer orders floats by their bits (−0.0 below +0.0, NaN at the end of its sign), trusts every index, and returns
the positions of a row in any order; a sort by XLA follows. With `tie_break` 1 it takes the lower of equal logits and
uses the kernel that needs no state between launches: one block for each row, 128 KiB of shared memory, k up to 2,048.
Few long rows, and GPUs with less shared memory, use its CUB kernel, which spreads a row over several blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.indices.topk.api import ascending, indices_of
from jax_sparse_mla.launch import tvm
from jax_sparse_mla.launch.tvm import Buffer

_LOWER_INDEX = 1  # FlashInfer's TopKTieBreak.SMALL
_FEW_ROWS, _LONG_ROW = 32, 16384  # where FlashInfer itself turns to CUB, for float32 and its tie_break
_CUB_WORKSPACE = 1 << 20  # it asks for 1 byte on an H200


@functools.cache
def _module() -> Any:
    from flashinfer.jit.topk import gen_topk_module

    return gen_topk_module().build_and_load()


def page_table_transform(
    logits: jax.Array, page_table: jax.Array, lengths: jax.Array, topk: int, page_size: int
) -> jax.Array:
    """FlashInfer's `top_k_page_table_transform`: values are not validated, page_size is a power of two.

    Args:
      logits: float32 or bfloat16 `[rows, columns]`.
      page_table: int32 `[rows, pages]`, a valid page for every position below the row's length.
      lengths: int32 `[rows]`, 0 … columns.
      topk: how many slots, 1 … 2,048.
      page_size: tokens of a page.

    Returns:
      int32 `[rows, topk]` slots in any order, −1 behind them.
    """
    # radix_topk_page_table_transform(input, output, page_table, row_to_batch, lengths, row_states, k, deterministic,
    #   tie_break, page_size, dsa_graph_safe, row_starts, page_table_row_starts, output_raw_indices)
    table, out = Buffer(1), Buffer(3)
    arguments = (Buffer(0), out, table, None, Buffer(2), None, topk, False, _LOWER_INDEX, page_size, False)
    return _call("radix_topk_page_table_transform", (*arguments, None, None, None), topk, logits, page_table, lengths)


def ragged_transform(
    logits: jax.Array, offsets: jax.Array, lengths: jax.Array, topk: int, row_starts: jax.Array | None = None
) -> jax.Array:
    """FlashInfer's `top_k_ragged_transform`: each position plus its row's offset; values are not validated.

    Args:
      logits: float32 or bfloat16 `[rows, columns]`.
      offsets: int32 `[rows]`.
      lengths: int32 `[rows]`, positions of each row; the window stays inside the row.
      topk: how many indices, 1 … 2,048.
      row_starts: int32 `[rows]`, the column of each row's position 0; None means 0.

    Returns:
      int32 `[rows, topk]` in any order, −1 behind them.
    """
    rows, columns = logits.shape
    operands = (logits, offsets, lengths) if row_starts is None else (logits, offsets, lengths, row_starts)
    inputs, out, workspace = (Buffer(1), Buffer(2)), Buffer(len(operands)), Buffer(len(operands) + 1)
    starts = None if row_starts is None else Buffer(3)
    if (rows <= _FEW_ROWS and columns >= _LONG_ROW) or _little_shared_memory():
        # cub_topk_ragged_transform(input, output, offsets, lengths, workspace, k, tie_break, row_starts)
        arguments = (Buffer(0), out, *inputs, workspace, topk, _LOWER_INDEX, starts)
        return _call("cub_topk_ragged_transform", arguments, topk, *operands, workspace=_CUB_WORKSPACE)
    # radix_topk_ragged_transform(input, output, offsets, lengths, row_states, k, deterministic, tie_break,
    #   dsa_graph_safe, row_starts)
    arguments = (Buffer(0), out, *inputs, None, topk, False, _LOWER_INDEX, False, starts)
    return _call("radix_topk_ragged_transform", arguments, topk, *operands)


def _little_shared_memory() -> bool:
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability.startswith("12.")


def _call(
    function: str, arguments: tuple, topk: int, logits: jax.Array, *operands: jax.Array, workspace: int = 0
) -> jax.Array:
    results = [jax.ShapeDtypeStruct((logits.shape[0], topk), jnp.int32)]
    if workspace:
        results.append(jax.ShapeDtypeStruct((workspace,), jnp.uint8))
    return tvm.call(_module, function, arguments, results, logits, *operands)[0]


def topk_flashinfer(logits, lengths, *, topk, page_size=1, row_starts=None, **tables) -> jax.Array:
    """As `topk_reference`."""
    return indices_of(topk_positions(logits, lengths, topk, row_starts), page_size, **tables)


def topk_positions(logits: jax.Array, lengths: jax.Array, topk: int, row_starts: jax.Array | None) -> jax.Array:
    """`jax_sparse_mla.indices.topk_positions` by FlashInfer, for `1 ≤ topk ≤ min(columns, 2048)`.

    FlashInfer's ragged transform serves both of ours, because our page look-up validates the table and FlashInfer's
    does not.
    """
    columns = logits.shape[1]
    lengths = jnp.maximum(lengths, 0)
    if row_starts is None:
        before, first = jnp.zeros_like(lengths), None
        present = jnp.minimum(lengths, columns)
    else:
        # The window's part inside the row, whose first column holds position `before`. Nothing here wraps.
        before = -jnp.clip(row_starts, -(2**31 - 1), 0)
        first = jnp.clip(row_starts, 0, columns)
        present = jnp.clip(lengths - before, 0, columns - first)
    selected = ragged_transform(_in_their_order(logits), before, present, topk, first)
    rank = jnp.arange(topk, dtype=jnp.int32)
    everything = jnp.where(rank < lengths[:, None], rank, -1)
    return jnp.where((lengths <= topk)[:, None], everything, ascending(selected))


def _in_their_order(logits: jax.Array) -> jax.Array:
    """Floats that FlashInfer orders as our contract orders `logits`: each number's successor, and −inf for NaN.

    −0.0 and +0.0 become one number, which leaves room to put NaN below what was −inf; +inf becomes a NaN, the largest
    of FlashInfer's order. XLA fuses this into whatever computes the logits.
    """
    unsigned, signed, sign, infinity = (
        (jnp.uint16, jnp.int16, 1 << 15, 0x7F80)
        if logits.dtype == jnp.bfloat16
        else (jnp.uint32, jnp.int32, 1 << 31, 0x7F800000)
    )
    bits = lax.bitcast_convert_type(logits, unsigned)
    magnitude = bits & unsigned(sign - 1)
    rank = lax.bitcast_convert_type(magnitude, signed)
    rank = jnp.where(bits >= unsigned(sign), -rank, rank) + signed(1)
    rank = jnp.where(magnitude > unsigned(infinity), signed(-infinity), rank)
    shifted = lax.bitcast_convert_type(jnp.abs(rank), unsigned) | jnp.where(rank < 0, unsigned(sign), unsigned(0))
    return lax.bitcast_convert_type(shifted, logits.dtype)
