"""Decode over caches whose pages several devices share: each attends to the keys of its own pages, under `shard_map`.

With n devices on a mesh axis, page p lies on device `p % n`, as its page `p // n` (an interleave of one page). Slots
and page numbers of a step stay those of one device; `own_slots` makes a device's own of them.

Index keys are cut like the cache beside them, and positions like slots where a request's page i lies on device `i % n`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.attention.api import row_lengths, sparse_mla_decode
from jax_sparse_mla.attention.exchange import exchanged
from jax_sparse_mla.attention.index_table import IndexTable
from jax_sparse_mla.indices.ownership import AxisName, Ownership, Positions, pack_positions
from jax_sparse_mla.kv_cache import PagedKV, gather_kv
from jax_sparse_mla.kv_cache.paged import check_cache
from jax_sparse_mla.kv_cache.rows import summed_rows


def context_parallel_decode(
    q: jax.Array,
    cache: PagedKV,
    indices: jax.Array,
    *,
    axis_name: AxisName,
    softmax_scale: float,
    topk_length: jax.Array | None = None,
    extra_cache: PagedKV | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    whole_cache: bool = False,
    attn_sink: jax.Array | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`sparse_mla_decode` over caches that are cut by pages, called under `jax.shard_map`; each device gets its heads.

    A device packs the slots of its own pages to the front of its tables, attends to them with all heads, and exchanges
    parts: of its heads it gets every device's `(out, lse)`, merges them by lse and adds the sink once. So a device
    sends `(n − 1) / n` of one output, what a reduce-scatter sends, and the sum is float32 and in the devices' order.

    Args:
      q: `[batch, q_len, heads, qk_dim]`, all heads, the same on every device of the axis.
      cache: the device's own pages; `cut_pages` has their order.
      indices: int32 `[batch, q_len, topk]` slots of all pages, the same on every device; what names no slot is skipped.
      axis_name: the mesh axis over which the pages are cut.
      extra_cache, extra_indices: a second cache that is cut alike, and slots of all of its pages.
      whole_cache: whether `cache` is whole on every device, as one of windows may be: only `extra_cache` is cut then,
        and the devices take turns of the slots of `cache` (static).
      attn_sink: float32 `[heads / n]`, of the device's own heads.
      softmax_scale, topk_length, extra_topk_length, backend, batch_invariant: as in `sparse_mla_decode`.

    Returns:
      out `[batch, q_len, heads / n, v_dim]` and lse float32 `[batch, q_len, heads / n]` of the device's own heads:
      those of `sparse_mla_decode` over whole caches, up to the rounding of each part to q's dtype.

    Raises:
      TypeError, ValueError: heads that n does not divide, and what `sparse_mla_decode` raises.
    """
    check = ArgumentChecks("context_parallel_decode")
    check_cache(check, "cache", cache)
    q = check("q", q, ("batch", "q_len", "heads", cache.layout.qk_dim), FLOATS)
    n, heads = lax.axis_size(axis_name), q.shape[2]
    if heads % n:
        raise check.fail(f"q has {heads} heads, which {n} devices of axis {axis_name!r} cannot share evenly")
    attn_sink = check.optional("attn_sink", attn_sink, (heads // n,), FLOAT32)
    indices = check("indices", indices, ("batch", "q_len", "topk"), INT32)
    tables = [IndexTable(cache, indices, row_lengths(check, "topk_length", topk_length))]
    if extra_cache is not None and extra_indices is not None:
        check_cache(check, "extra_cache", extra_cache)
        extra_indices = check("extra_indices", extra_indices, ("batch", "q_len", "extra_topk"), INT32)
        extra_lengths = row_lengths(check, "extra_topk_length", extra_topk_length)
        tables.append(IndexTable(extra_cache, extra_indices, extra_lengths))
    (indices, lengths), *extra = own_tables(tables, axis_name, whole_first=whole_cache)
    if extra:
        ((extra_indices, extra_topk_length),) = extra
    out, lse = sparse_mla_decode(
        q,
        cache,
        indices,
        softmax_scale=softmax_scale,
        topk_length=lengths,
        extra_cache=extra_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_topk_length,
        assume_valid_indices=True,  # as `own_tables` makes them
        backend=backend,
        batch_invariant=batch_invariant,
    )
    return exchanged(out, lse, attn_sink, axis_name)


def own_slots(slots: jax.Array, cache: PagedKV, axis_name: AxisName) -> jax.Array:
    """Global slots as local slots of this device; −1 if another device owns the page, or where there is no slot.

    Under `shard_map`; `write_kv` and `gather_kv` of `cache`, the device's pages, take them.

    Args:
      slots: int32, any shape.
    """
    rule, last = _rule(cache, axis_name)
    return rule.own(jnp.where(slots <= last, slots, -1), lax.axis_index(axis_name))


def gather_shared_kv(cache: PagedKV, slots: jax.Array, axis_name: AxisName) -> jax.Array:
    """`gather_kv` of slots int32 `[n]` of all pages, the same on every device: each row from the device that has it."""
    return summed_rows(gather_kv(cache, own_slots(slots, cache, axis_name)), axis_name)


def cut_pages(cache: PagedKV, n: int) -> PagedKV:
    """The cache with its pages in the order in which n devices hold them: device 0's, then device 1's, and so on.

    Placed with `PartitionSpec(axis)`, its array gives each device its own pages, of all layers. As a whole it is no
    cache to attend to: slots count as before.

    Raises:
      ValueError: n does not divide the pages of a layer.
    """
    check = ArgumentChecks("cut_pages")
    n = check.static_int("n", n, minimum=1)
    if cache.num_pages % n:
        raise check.fail(f"{n} devices cannot share {cache.num_pages} pages evenly")
    pages = cache.data.reshape(cache.num_layers, cache.num_pages // n, n, -1)
    return dataclasses.replace(cache, data=jnp.moveaxis(pages, 2, 0).reshape(cache.data.shape))


def own_tables(
    tables: Sequence[IndexTable], axis_name: AxisName, *, whole_first: bool = False
) -> list[tuple[jax.Array, jax.Array]]:
    """For each table, the device's own slots in their order, then −1, and how many there are.

    Args:
      tables: one or two, of the device's own pages and slots of all pages; lengths are `[batch, q_len]`.
      whole_first: whether the first one is of a cache that each device has whole: slot s is device `s % n`'s then.
    """
    rank, rules = lax.axis_index(axis_name), [_rule(cache, axis_name) for cache, *_ in tables]
    if whole_first:
        rules[0] = Ownership(lax.axis_size(axis_name)), tables[0].cache.num_slots - 1
    lists = [Positions(*rule, indices, lengths) for rule, (_, indices, lengths) in zip(rules, tables)]
    packed = pack_positions(lists, rank)
    if whole_first:
        (turns, count), (rule, _) = packed[0], rules[0]
        packed[0] = jnp.where(turns >= 0, rule.position(turns, rank), -1), count
    return packed


def _rule(cache: PagedKV, axis_name: AxisName) -> tuple[Ownership, int]:
    """Which device has which slot, and the last one that there is."""
    n = lax.axis_size(axis_name)
    return Ownership(n, cache.page_size), min(n * cache.num_slots - 1, jnp.iinfo(jnp.int32).max)
