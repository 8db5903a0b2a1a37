"""An index table, what every attention backend reads: its arrays in JAX, and its static shape for both frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jax_sparse_mla.kv_cache.layout import KVLayout

if TYPE_CHECKING:
    import jax

    from jax_sparse_mla.kv_cache.paged import PagedKV

V_DIM = 512  # of every layout that a kernel reads


class IndexTable(NamedTuple):
    """A paged cache, and what each query row reads of it; never without a column, nor the cache without a slot.

    Attributes:
      cache: the `PagedKV`.
      indices: int32 `[batch, q_len, columns]`, slots of the cache.
      lengths: int32 `[batch, q_len]`, how many leading columns are scanned; None scans all.
    """

    cache: PagedKV
    indices: jax.Array
    lengths: jax.Array | None

    def rows(self) -> IndexTable:
        """The table with batch and q_len as one axis: `[batch · q_len, columns]`."""
        batch, q_len, columns = self.indices.shape
        lengths = None if self.lengths is None else self.lengths.reshape(batch * q_len)
        return IndexTable(self.cache, self.indices.reshape(batch * q_len, columns), lengths)


class TableShape(NamedTuple):
    """The static shape of one index table and of the cache or workspace that it names.

    Attributes:
      topk: index columns.
      rows_per_length: query rows that share a length; 0 without lengths.
      num_slots: rows of the cache or workspace.
      page_size, page_bytes: of the cache, bytes from one page's start to the next one's; 0 for a workspace.
      first_page: the cache's first page in its buffer.
      stride: entries from one row of indices to the next; 0: topk.
      layout: of the cache's rows; None: that of the launch.
    """

    topk: int
    rows_per_length: int
    num_slots: int
    page_size: int = 0
    page_bytes: int = 0
    first_page: int = 0
    stride: int = 0
    layout: KVLayout | None = None
