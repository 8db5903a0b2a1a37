"""Writing, gathering and dequantising the rows of a paged KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import sharding
from jax_sparse_mla.argument_checks import FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.kv_cache.layout import KERNEL_LAYOUTS
from jax_sparse_mla.kv_cache.paged import PagedKV, check_cache
from jax_sparse_mla.kv_cache.quantize import decode_rows, encode_rows
from jax_sparse_mla.kv_cache.windows import (
    gather_windows,
    locate_slots,
    scatter_windows,
    slots_of_share,
    write_own_pages,
)
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.transforms import shared
from jax_sparse_mla.launch.triton_call import executor


def write_kv(cache: PagedKV, slots: jax.Array, kv: jax.Array) -> PagedKV:
    """Writes K rows into the cache, quantised as its layout says.

    Rows are rounded to bfloat16 first, and a finite value that would round to infinity becomes the largest
    finite bfloat16. Each group of the quantised part is then divided by its scale and rounded to nearest even; with
    `amax` the group's largest magnitude, the scale is

    * V4 (SGLang's plain store): `max(amax, 1e-4) / 448` rounded up to a power of two, as a UE8M0 byte behind
      the page's rows. Of the eight scale bytes of a token the last is left as it was.
    * V3.2 and rows without rope (FlashMLA's own quantiser): `2^ceil(log2(max(amax / 448, 1e-4)))` as float32 inside the
      row; V4.1's e4m3 rows have the same as a UE8M0 byte. The row without rope in one scale has `cache.scale`.
    * V4.1's e2m1 rows: `clip(amax / 6, 2^-9, 448)` as e4m3. Larger values than 6 scales become 6 scales.

    Engines differ for small rows: `cache.layout.written_by` names the one whose bytes are wanted. SGLang's of rows
    without rope have scales of `amax / 448` as they are: what is no normal float32 number counts as 0 there, and so
    does a group of zeros, of which SGLang's kernel makes a NaN.

    Values of an e4m3 part beyond `240 * 2^120` (1.875 * 2^127) are clipped to it, because e4m3 would round
    them up to 2^128, which reads back as infinity: no finite input makes an infinity or a NaN. An infinity is
    clipped likewise in the quantised part and kept in the bfloat16 part; a NaN stays one (all 16 values of an e2m1
    group become NaN, which has none itself).

    Over explicit mesh axes every device writes all rows into its own copy of the cache. Under plain `jit` the cache may
    be sharded by pages: each device writes the rows of its own.

    Under `jit` with the cache donated it writes in place; otherwise the cache is copied. XLA also copies it if the
    program reads the old cache and the write does not depend on that read.

    Args:
      cache: the cache.
      slots: int32 `[n]`. A negative or out-of-range slot skips its row. If a slot is given twice, it is not defined
        which row it holds; on a GPU it may hold bytes of both.
      kv: bfloat16 or float32 `[n, qk_dim]`.

    Returns:
      The cache with the rows written. Padding bytes and all other slots keep their bytes.

    Raises:
      TypeError: a wrong dtype, or cache is no PagedKV.
      ValueError: a wrong shape.
    """
    check = ArgumentChecks("write_kv")
    check_cache(check, "cache", cache)
    slots = check("slots", slots, ("n",), INT32)
    kv = check("kv", kv, ("n", cache.layout.qk_dim), FLOATS)
    sharding.refuse_sharded(check, "cache", cache)
    # Every device writes all rows into its own copy of the cache.
    return _write_kv(cache, *sharding.replicated(slots, kv))


@jax.jit
def _write_kv(cache: PagedKV, slots: jax.Array, kv: jax.Array) -> PagedKV:
    if cache.data.size == 0 or slots.size == 0:
        return cache

    def plain(cache, slots, kv):
        return write_rows_reference(cache, slots, kv).data

    pages = _pages_cut(cache)
    rule = sharding.PartitionRule((_of_cache(cache, pages), P(), P()), pages, across=write_own_pages)
    if cache.layout.least_exponent is None:  # a rule that the kernel has not
        return dataclasses.replace(cache, data=shared(plain, rule)(cache, slots, kv))
    return dataclasses.replace(cache, data=_dispatch("write_kv", plain, cache, slots, kv, rule=rule))


def write_rows_reference(cache: PagedKV, slots: jax.Array, kv: jax.Array) -> PagedKV:
    """`write_kv` in plain JAX: what a kernel must do bit by bit."""
    layout = cache.layout
    _, page, offset = _locate(cache, slots)
    rows, scales = encode_rows(layout, kv, cache.tensor_scale)
    data = scatter_windows(cache.data, page, offset * layout.data_bytes, rows)
    if layout.footer_scale_bytes:
        data = scatter_windows(data, page, _footer_start(cache, offset), scales)
    return dataclasses.replace(cache, data=data)


def gather_kv(cache: PagedKV, slots: jax.Array) -> jax.Array:
    """Gathers K rows as bfloat16: `bfloat16(float32(code) * scale)`, and the bfloat16 part bit by bit.

    A code is an e4m3 or an e2m1 number. A UE8M0 scale byte b is `2^(b - 127)`; 0 is 2^-127 and 255 is NaN.

    Args:
      cache: the cache.
      slots: int32 `[n]`. A negative or out-of-range slot gives a row of zeros, whatever the cache holds.

    Returns:
      bfloat16 `[n, qk_dim]`.

    Raises:
      TypeError: a wrong dtype, or cache is no PagedKV.
      ValueError: a wrong shape.
    """
    check = ArgumentChecks("gather_kv")
    check_cache(check, "cache", cache)
    slots = check("slots", slots, ("n",), INT32)
    sharding.refuse_sharded(check, "cache", cache)
    if sharding.is_sharded(slots):
        return sharding.by_rule(_gather_kv, _gather_rule(cache), (cache, slots))
    return _gather_kv(cache, slots)


@jax.jit
def _gather_kv(cache: PagedKV, slots: jax.Array) -> jax.Array:
    if cache.data.size == 0 or slots.size == 0:
        return gather_rows_reference(cache, slots)
    return _dispatch("gather_kv", gather_rows_reference, cache, slots, rule=_gather_rule(cache))


def _gather_rule(cache: PagedKV) -> sharding.PartitionRule:
    num_slots = cache.num_slots

    def across(gather, axes, cache, slots):
        """Each device's own rows and zeros, added as integers, which keeps every bit."""
        slots = slots_of_share(jnp.where(slots < num_slots, slots, -1), axes, cache.num_slots)
        return summed_rows(gather(cache, slots), axes)

    return sharding.PartitionRule((_of_cache(cache, _pages_cut(cache)), P("rows")), P("rows"), across)


def summed_rows(rows: jax.Array, axes: Any) -> jax.Array:
    """The sum over mesh axes of bfloat16 `[n, qk_dim]`, of which one device has each row and the others zeros: as
    integers, which keeps every bit."""
    pairs = lax.bitcast_convert_type(rows.reshape(len(rows), -1, 2), jnp.int32)
    return lax.bitcast_convert_type(lax.psum(pairs, axes), rows.dtype).reshape(rows.shape)


def gather_kv_into(workspace: jax.Array, start: int, cache: PagedKV, slots: jax.Array) -> jax.Array:
    """The workspace with `gather_kv(cache, slots)` as its rows from `start` (static) on: several gathers, one buffer.

    It is written in place where XLA may; its other rows are unchanged.
    """

    def plain(cache, slots, workspace):
        return lax.dynamic_update_slice(workspace, gather_rows_reference(cache, slots), (start, 0))

    if cache.data.size == 0 or slots.size == 0:
        return plain(cache, slots, workspace)
    return _dispatch("gather_kv", plain, cache, slots, workspace, start=start)


def gather_kv_as_workspace(cache: PagedKV, slots: jax.Array, rows: int) -> jax.Array:
    """A new workspace `[rows, qk_dim]` that begins with `gather_kv(cache, slots)`, for `gather_kv_into` to fill up.

    The rows behind these are not initialised, which saves the time to zero them.
    """

    def plain(cache, slots):
        return jnp.pad(gather_rows_reference(cache, slots), ((0, rows - slots.shape[0]), (0, 0)))

    if cache.data.size == 0 or slots.size == 0:
        return plain(cache, slots)
    return _dispatch("gather_kv", plain, cache, slots, rows=rows)


def gather_rows_reference(cache: PagedKV, slots: jax.Array) -> jax.Array:
    """`gather_kv` in plain JAX: what a kernel must do bit by bit, and what the attention reference reads with."""
    layout = cache.layout
    if cache.num_pages == 0:  # nothing to gather from: every slot is out of range
        return jnp.zeros((slots.shape[0], layout.qk_dim), jnp.bfloat16)
    valid, page, offset = _locate(cache, slots)
    rows = gather_windows(cache.data, page, offset * layout.data_bytes, layout.data_bytes)
    scales = jnp.zeros((slots.shape[0], 0), jnp.uint8)
    if layout.footer_scale_bytes:
        scales = gather_windows(cache.data, page, _footer_start(cache, offset), layout.scale_bytes)
    bits = jnp.where(valid[:, None], decode_rows(layout, rows, scales, cache.tensor_scale), jnp.uint16(0))
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def dequantize_kv(cache: PagedKV) -> jax.Array:
    """All rows of the cache as bfloat16, in slot order, by the rule of `gather_kv`.

    Returns:
      bfloat16 `[num_slots, qk_dim]`.

    Raises:
      TypeError: cache is no PagedKV.
      ValueError: its bytes do not fit its layout and page size.
    """
    check_cache(ArgumentChecks("dequantize_kv"), "cache", cache)
    return _dequantize_kv(cache)


@jax.jit
def _dequantize_kv(cache: PagedKV) -> jax.Array:
    layout, pages, tokens = cache.layout, cache.num_pages, cache.page_size
    footer = _footer_start(cache, 0)
    data = cache.pages
    rows = data[:, :footer].reshape(pages, tokens, layout.data_bytes)
    scales = data[:, footer : footer + tokens * layout.footer_scale_bytes]
    scales = scales.reshape(pages, tokens, layout.footer_scale_bytes)[..., : layout.scale_bytes]
    bits = decode_rows(layout, rows, scales, cache.tensor_scale).reshape(cache.num_slots, layout.qk_dim)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _dispatch(
    name: str,
    plain: Callable[..., jax.Array],
    cache: PagedKV,
    *arrays: jax.Array,
    rule: sharding.PartitionRule | None = None,
    **static: Any,
) -> jax.Array:
    """The kernel of this name, but XLA for a layout that it was not written for."""

    def kernel(cache, *arrays):  # maybe a device's share, with fewer pages
        from jax_sparse_mla.kv_cache import triton as kernels

        pages = cache.in_buffer
        return getattr(kernels, name)(executor(), cache.data, cache.tensor_scale, *arrays, pages=pages, **static)

    if cache.layout.read_as not in KERNEL_LAYOUTS:
        return plain(cache, *arrays)
    return dispatch(kernel, plain, cache, *arrays, rule=rule)


def _of_cache(cache: PagedKV, pages: P) -> Any:
    """The names of a cache's dimensions: a scale is whole on every device."""
    return pages if cache.scale is None else dataclasses.replace(cache, data=pages, scale=P())


def _pages_cut(cache: PagedKV) -> P:
    """The pages of one layer may be cut; those of several lie one layer after the other."""
    return P(sharding.PAGES) if cache.num_layers == 1 else P()


def _locate(cache: PagedKV, slots: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `locate_slots`, with pages of `cache.data`."""
    valid, page, offset = locate_slots(slots, cache.num_pages, cache.page_size)
    return valid, jnp.where(valid, page + cache.first_page, cache.data.shape[0]), offset


def _footer_start(cache: PagedKV, offset):
    """The byte of its page where the footer scales of token `offset` start (the rows' end, for offset 0)."""
    return cache.page_size * cache.layout.data_bytes + offset * cache.layout.footer_scale_bytes
