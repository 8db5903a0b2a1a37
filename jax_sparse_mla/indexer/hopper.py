"""The indexer's logits on SM90 (`kernels_cuda/index_logits/`): what its kernels serve, and how XLA calls them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.launch import build, tvm

HEADS = 64  # of both models; a warpgroup's product of a row
TILE = 64  # keys of a copied tile, which lie in one page
FP4_MOST_HEADS = 64  # the kernel of FP4 keys has a specialisation for at most 16, 32 and 64
FP4_MOST_ROWS = 256  # it has room for so many in shared memory

# Rows from which it is ahead of Triton's kernels: a prefill chunk. Fewer are rows of different requests most likely,
# which share no keys; the kernel of FP4 keys serves these.
FROM_ROWS = 256


def serves(capability: tuple[int, int] | None, rows: int, heads: int, page_size: int) -> bool:
    """Whether FP8 keys' kernel takes calls of so many rows on such a device; the binary is built if need be."""
    fits = capability == (9, 0) and rows >= FROM_ROWS and heads == HEADS and page_size % TILE == 0
    return fits and build.index_logits_module() is not None


def serves_fp4(capability: tuple[int, int] | None, rows: int, heads: int, page_size: int) -> bool:
    """As `serves`, for FP4 keys and bfloat16 queries."""
    fits = rows < FROM_ROWS and rows <= FP4_MOST_ROWS and heads <= FP4_MOST_HEADS and page_size % TILE == 0
    return fits and capability == (9, 0) and build.index_logits_module() is not None


def index_logits(
    q, weights, index_cache, page_table, lengths, *, pages: tuple[int, int] | None, fill: bool, fp4=False
) -> Any:
    """float32 `[rows, capacity]`.

    Args:
      pages: the first page and the number of pages of the cache in its buffer; None: the buffer is the cache.
      fill: False leaves columns unwritten from the end of the block of 256 that holds a row's last key.
      fp4: for bfloat16 q over FP4 keys; blocks are of 128.
    """
    key_bytes = (IndexFormat.FP4 if fp4 else IndexFormat.FP8).key_bytes
    rows, capacity = q.shape[0], page_table.shape[1] * (index_cache.shape[1] // key_bytes)
    first_page, num_pages = pages or (0, index_cache.shape[0])
    arguments = [*map(tvm.Buffer, range(5)), num_pages, first_page, fill, tvm.Buffer(5)]
    out = jax.ShapeDtypeStruct((rows, capacity), jnp.float32)
    operands = q, weights, index_cache, page_table, lengths
    function = "index_logits_fp4" if fp4 else "index_logits"
    return tvm.call(build.index_logits_module, function, arguments, [out], *operands)[0]
