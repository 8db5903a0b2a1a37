"""Caches in FlashMLA's shape `[pages, page_size, 1, bytes_per_token]`: their layouts, and views of their pages."""

from __future__ import annotations

import torch

from jax_sparse_mla.kv_cache.layout import KVLayout

# The layouts that a cache's bytes per token tell. The others share theirs (528: three, 288: two), and are asked for by
# name.
LAYOUTS = {
    layout.bytes_per_token: layout
    for layout in (KVLayout.V32_FP8, KVLayout.V4_FP8, KVLayout.V32_BF16, KVLayout.V4_BF16)
}
NAMED_LAYOUTS = {x.name: x for x in vars(KVLayout).values() if isinstance(x, KVLayout) and not x.has_tensor_scale}
CACHE_DTYPES = ("uint8", "int8", "float8_e4m3fn")


def layout_of(function: str, name: str, k_cache: torch.Tensor, kv_layout: str | None) -> KVLayout:
    """The layout of a cache in FlashMLA's shape: the one named, or the one that its bytes tell.

    A ValueError, which names `function` and `name`, where its bytes are another's, or tell none.
    """
    width = k_cache.shape[-1]
    if kv_layout is None:
        if width in LAYOUTS:
            return LAYOUTS[width]
        names = " or ".join(repr(x.name) for x in NAMED_LAYOUTS.values() if x.bytes_per_token == width)
        hint = f": name it as kv_layout, {names}" if names else ""
        raise ValueError(
            f"{function}: {name} must be [pages, page_size, 1, bytes], bytes one of {', '.join(map(str, LAYOUTS))}, "
            f"got {list(k_cache.shape)}{hint}"
        )
    if kv_layout not in NAMED_LAYOUTS:
        raise ValueError(f"{function}: kv_layout must be one of {', '.join(NAMED_LAYOUTS)}, got {kv_layout!r}")
    layout = NAMED_LAYOUTS[kv_layout]
    if layout.bytes_per_token != width:
        raise ValueError(
            f"{function}: {name} has {width} bytes a token, kv_layout {kv_layout} {layout.bytes_per_token}"
        )
    return layout


def has_dense_pages(k_cache: torch.Tensor) -> bool:
    """Whether the tokens of each page of a cache in FlashMLA's shape are one after the other."""
    return k_cache.stride(3) == 1 and (k_cache.shape[1] < 2 or k_cache.stride(1) == k_cache.shape[3])


def page_rows(k_cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """uint8 `[pages, page_bytes]` of a cache in FlashMLA's shape; a copy if it is padded or strided otherwise."""
    pages, page_size, _, width = k_cache.shape
    page_bytes = layout.page_bytes(page_size)
    k_cache = k_cache.view(torch.uint8)
    stored = k_cache.untyped_storage().nbytes() - k_cache.storage_offset()
    if has_dense_pages(k_cache) and (pages < 2 or k_cache.stride(0) == page_bytes) and pages * page_bytes <= stored:
        return k_cache.as_strided((pages, page_bytes), (page_bytes, 1))
    rows = k_cache.new_zeros((pages, page_bytes))
    rows[:, : page_size * width] = k_cache.reshape(pages, page_size * width)
    return rows


def pages_of(data: torch.Tensor, layout: KVLayout, page_size: int) -> torch.Tensor:
    """FlashMLA's view `[pages, page_size, 1, bytes_per_token]` of a cache `[pages, page_bytes]`."""
    width = layout.bytes_per_token
    return data.as_strided((data.shape[0], page_size, 1, width), (data.stride(0), width, width, 1))
