"""PagedKV: the bytes of a paged KV cache and what they mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import FLOAT32, UINT8, ArgumentChecks
from jax_sparse_mla.kv_cache.layout import KVLayout, Pages
from jax_sparse_mla.kv_cache.pool import LayerPool, layer_shape


@pytree_dataclass
class PagedKV(LayerPool):
    """A paged KV cache of one layer, or the caches of several layers in one array.

    A step that donates one array instead of one a layer costs the host less: it pays for each array that goes in and
    out. `cache.layer(i)` is the view of one layer, which every function here takes like a cache of its own. A function
    that writes returns the view over the whole updated array, and `layer` of the result addresses any layer again.

    Attributes:
      data: uint8 `[num_layers * num_pages, page_bytes]`; `page_bytes` is `layout.page_bytes(page_size)`.
      layout: the byte layout (static).
      page_size: tokens per page (static).
      num_layers: how many layers' pages `data` holds, one layer after the other (static).
      layer_index: the layer of a view; None for all of them (static).

    A slot is `page * page_size + offset`, and counts the layer's own pages.
    """

    data: jax.Array
    layout: KVLayout = static()
    page_size: int = static()
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)

    scale = None  # a field of `ScaledPagedKV` alone

    @classmethod
    def zeros(cls, layout: KVLayout, num_pages: int, page_size: int, *, num_layers: int = 1) -> PagedKV:
        """A cache of `num_pages` zeroed pages, for each of `num_layers` layers; their scales, if any, are 1."""
        check = ArgumentChecks("PagedKV.zeros")
        if not isinstance(layout, KVLayout):
            raise TypeError(f"PagedKV.zeros: layout must be a KVLayout, got {type(layout).__name__}")
        page_size = check.static_int("page_size", page_size, minimum=1)
        shape = layer_shape(check, num_layers, ("num_pages", num_pages), layout.page_bytes(page_size))
        scale = jnp.ones(num_layers, jnp.float32) if layout.has_tensor_scale else None
        return paged(jnp.zeros(shape, jnp.uint8), scale, layout=layout, page_size=page_size, num_layers=num_layers)

    @property
    def num_pages(self) -> int:
        """Pages of a layer."""
        return self.data.shape[0] // self.num_layers

    @property
    def num_slots(self) -> int:
        """Slots of a layer."""
        return self.num_pages * self.page_size

    @property
    def first_page(self) -> int:
        """The page of `data` at which the view's layer begins."""
        return self.first_of(self.num_pages)

    @property
    def in_buffer(self) -> Pages:
        """Where the layer's pages lie in `data`."""
        return Pages(self.layout, self.page_size, self.first_page, self.num_pages)

    @property
    def pages(self) -> jax.Array:
        """uint8 `[num_pages, page_bytes]`, the layer's share of `data`; JAX copies it if there are more layers."""
        return self.share_of(self.data)

    @property
    def tensor_scale(self) -> jax.Array | None:
        """float32 `[1]`, the layer's scale; None without one."""
        return None if self.scale is None else self.share_of(self.scale)


@pytree_dataclass
class ScaledPagedKV(PagedKV):
    """A cache of a layout with one scale for all values of a layer, which stands beside the pages.

    Attributes:
      scale: float32 `[num_layers]`, positive: what a stored value of each layer is multiplied by.
    """

    scale: jax.Array | None = None


def paged(data: Any, scale: Any | None, *, layout: KVLayout, page_size: int, num_layers: int = 1) -> PagedKV:
    """A `PagedKV`, or a `ScaledPagedKV` where there is a scale."""
    if scale is None:
        return PagedKV(data=data, layout=layout, page_size=page_size, num_layers=num_layers)
    return ScaledPagedKV(data=data, scale=scale, layout=layout, page_size=page_size, num_layers=num_layers)


def check_cache(check: ArgumentChecks, name: str, cache: PagedKV) -> None:
    """Refuses what is not a PagedKV of one layer whose bytes fit its layout and page size."""
    if not isinstance(cache, PagedKV):
        raise TypeError(f"{check.function}: {name} must be a PagedKV, got {type(cache).__name__}")
    if not isinstance(cache.layout, KVLayout):
        layout_type = type(cache.layout).__name__
        raise TypeError(f"{check.function}: {name}.layout must be a KVLayout, got {layout_type}")
    page_size = check.static_int(f"{name}.page_size", cache.page_size, minimum=1)
    check(f"{name}.data", cache.data, (None, cache.layout.page_bytes(page_size)), UINT8)
    cache.check_view(check, name, cache.data.shape[0])
    if cache.layout.has_tensor_scale:
        check(f"{name}.scale", cache.scale, (cache.num_layers,), FLOAT32)
    elif cache.scale is not None:
        raise check.fail(f"{name}.scale was given, but {cache.layout.name} keeps its scales in its pages")


def check_first_cache(check: ArgumentChecks, names: tuple[str, str], cache: PagedKV) -> None:
    """As `check_cache` of what attention reads first; names are the arguments', the second cache's too."""
    check_cache(check, names[0], cache)
    if cache.layout.extra_only:
        raise check.fail(f"{names[0]} has layout {cache.layout}, which can be {names[1]}'s alone")


def check_second_cache(check: ArgumentChecks, names: tuple[str, str], cache: PagedKV, extra: PagedKV) -> None:
    """As `check_cache` of a cache that attention reads beside another; refuses layouts that do not go together."""
    check_cache(check, names[1], extra)
    if extra.layout.read_as not in cache.layout.beside:
        known = " or ".join(map(repr, cache.layout.beside))
        raise check.fail(f"{names[1]} must have {names[0]}'s layout {known}, got {extra.layout}")
