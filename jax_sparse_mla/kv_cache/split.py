"""The same slots at a smaller page size."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.kv_cache.layout import KERNEL_LAYOUTS, KVLayout, Pages
from jax_sparse_mla.kv_cache.paged import PagedKV, check_cache, paged
from jax_sparse_mla.kv_cache.windows import gather_windows, locate_slots, scatter_windows
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import launching


def split_pages(
    cache: PagedKV, page_size: int, *, slots: jax.Array | None = None, out: PagedKV | None = None
) -> PagedKV:
    """Copies a cache to a smaller page size; slot numbers do not change.

    FlashInfer before 0.7 reads V4 pages of 64 tokens on SM120, where the engine keeps 256 (SGLang splits
    likewise). Page p becomes the pages `p * r ... p * r + r - 1`, `r = cache.page_size // page_size`, and the
    footer scales of each token move to the end of its own small page.

    Args:
      cache: the cache.
      page_size: tokens of a new page; divides `cache.page_size`. Static.
      slots: int32, any shape: only the pages of `cache` that these slots touch are copied. Negative and
        out-of-range slots touch nothing. None: all pages.
      out: where to copy to: same layout (and scale, if it has one), the new page size, `cache.num_pages * r` pages.
        Its other pages and its padding keep their bytes. Under `jit` with `out` donated it is written in place. None:
        zeros.

    Returns:
      The cache at the new page size.

    Raises:
      TypeError: a wrong dtype, or cache or out is no PagedKV.
      ValueError: page_size does not divide the old one, or out is of another geometry.
    """
    check = ArgumentChecks("split_pages")
    check_cache(check, "cache", cache)
    page_size = check.static_int("page_size", page_size, minimum=1)
    if cache.page_size % page_size:
        raise check.fail(f"page_size must divide the cache's page size, {cache.page_size}, got {page_size}")
    num_pages = cache.num_pages * (cache.page_size // page_size)
    if slots is not None:
        slots = check("slots", slots, (None,) * check.rank("slots", slots), INT32)
    if out is not None:
        check_cache(check, "out", out)
        if (out.layout.read_as, out.page_size, out.num_pages) != (cache.layout.read_as, page_size, num_pages):
            raise check.fail(
                f"out must have layout {cache.layout}, page size {page_size} and {num_pages} pages, got "
                f"{out.layout}, page size {out.page_size} and {out.num_pages} pages"
            )
    return _split_pages(cache, page_size, slots, out)


@functools.partial(jax.jit, static_argnames="page_size")
def _split_pages(cache: PagedKV, page_size: int, slots: jax.Array | None, out: PagedKV | None) -> PagedKV:
    ratio = cache.page_size // page_size
    num_pages = cache.num_pages * ratio
    first_page = 0 if out is None else out.first_page
    data = jnp.zeros((num_pages, cache.layout.page_bytes(page_size)), jnp.uint8) if out is None else out.data
    if slots is None:
        pieces = _split(cache.pages, cache.layout, cache.page_size, ratio)
        data = lax.dynamic_update_slice(data, pieces, (first_page, 0))
    elif cache.num_pages and slots.size:
        launch = launching(
            "kv_cache.triton.split_pages",
            pages=cache.in_buffer,
            out_pages=Pages(cache.layout, page_size, first_page, num_pages),
        )

        def kernel(data, cache, slots):
            return launch(data, cache.data, slots)

        def plain(data, cache, slots):
            return split_touched_reference(data, cache, page_size, slots, first_page)

        known = cache.layout.read_as in KERNEL_LAYOUTS
        data = dispatch(kernel, plain, data, cache, slots) if known else plain(data, cache, slots)
    if out is None:
        return paged(data, cache.tensor_scale, layout=cache.layout, page_size=page_size)
    return dataclasses.replace(out, data=data)


def split_touched_reference(
    data: jax.Array, cache: PagedKV, page_size: int, slots: jax.Array, first_page: int = 0
) -> jax.Array:
    """The pages that slots touch, copied into `data` from its page `first_page` on, in plain JAX."""
    ratio = cache.page_size // page_size
    pages = _touched_pages(slots, cache)
    whole = gather_windows(cache.data, pages + cache.first_page, jnp.zeros_like(pages), cache.data.shape[1])
    pieces = _split(whole, cache.layout, cache.page_size, ratio)
    targets = first_page + pages[:, None] * ratio + jnp.arange(ratio, dtype=jnp.int32)
    # The page past the last one marks unused entries: dropped.
    targets = jnp.where(pages[:, None] < cache.num_pages, targets, data.shape[0]).reshape(-1)
    return scatter_windows(data, targets, jnp.zeros_like(targets), pieces)


def _touched_pages(slots: jax.Array, cache: PagedKV) -> jax.Array:
    """The pages of the slots, each once, ascending, then `num_pages`: int32 `[min(slots, num_pages)]`."""
    _, page, _ = locate_slots(slots.reshape(-1), cache.num_pages, cache.page_size)
    touched = jnp.zeros(cache.num_pages, bool).at[page].set(True, mode="drop")
    capacity = min(slots.size, cache.num_pages)
    return jnp.nonzero(touched, size=capacity, fill_value=cache.num_pages)[0].astype(jnp.int32)


def _split(data: jax.Array, layout: KVLayout, page_size: int, ratio: int) -> jax.Array:
    """uint8 `[pages, page_bytes]` -> `[pages * ratio, bytes of a small page without its padding]`."""
    pages, tokens = data.shape[0], page_size // ratio
    footer = page_size * layout.data_bytes
    rows = data[:, :footer].reshape(pages * ratio, tokens * layout.data_bytes)
    scales = data[:, footer : footer + page_size * layout.footer_scale_bytes]
    scales = scales.reshape(pages * ratio, tokens * layout.footer_scale_bytes)
    return jnp.concatenate([rows, scales], axis=1)
