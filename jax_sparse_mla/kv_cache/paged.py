"""PagedKV: the bytes of a paged KV cache and what they mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_sparse_mla._checks import UINT8, ArgumentChecks
from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.kv_cache.layout import KVLayout


@pytree_dataclass
class PagedKV:
    """A paged KV cache of one layer.

    Attributes:
      data: uint8 `[num_pages, page_bytes]`; `page_bytes` is `layout.page_bytes(page_size)`.
      layout: the byte layout (static).
      page_size: tokens per page (static).

    A slot is `page * page_size + offset`.
    """

    data: jax.Array
    layout: KVLayout = static()
    page_size: int = static()

    @classmethod
    def zeros(cls, layout: KVLayout, num_pages: int, page_size: int) -> PagedKV:
        """A cache of `num_pages` zeroed pages."""
        check = ArgumentChecks("PagedKV.zeros")
        if not isinstance(layout, KVLayout):
            raise TypeError(f"PagedKV.zeros: layout must be a KVLayout, got {type(layout).__name__}")
        num_pages = check.static_int("num_pages", num_pages, minimum=1)
        page_size = check.static_int("page_size", page_size, minimum=1)
        data = jnp.zeros((num_pages, layout.page_bytes(page_size)), jnp.uint8)
        return cls(data=data, layout=layout, page_size=page_size)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def num_slots(self) -> int:
        return self.data.shape[0] * self.page_size


def check_cache(check: ArgumentChecks, name: str, cache: PagedKV) -> None:
    """Refuses what is not a PagedKV whose bytes fit its layout and page size."""
    if not isinstance(cache, PagedKV):
        raise TypeError(f"{check.function}: {name} must be a PagedKV, got {type(cache).__name__}")
    if not isinstance(cache.layout, KVLayout):
        given = type(cache.layout).__name__
        raise TypeError(f"{check.function}: {name}.layout must be a KVLayout, got {given}")
    page_size = check.static_int(f"{name}.page_size", cache.page_size, minimum=1)
    check(f"{name}.data", cache.data, (None, cache.layout.page_bytes(page_size)), UINT8)
