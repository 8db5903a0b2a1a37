"""The step of a layer over its `LayerKind`: write, select, attend. `v4_layer`, `v41_layer`, `v32_layer` call it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.attention import context_parallel_decode, sparse_mla_decode
from jax_sparse_mla.attention.extend import extend
from jax_sparse_mla.indexer.candidates import index_topk_and_blocks, index_topk_in_blocks
from jax_sparse_mla.indexer.logits import IndexKeys, as_index_keys, logits_of, quantize_index_q
from jax_sparse_mla.indexer.select import SCRATCH_BYTES, in_chunks, logits_at_once, rows_at_once, selected_positions
from jax_sparse_mla.indices import TopkTransform, topk_positions, topk_transform
from jax_sparse_mla.indices.lookup import page_slot_or_minus_one
from jax_sparse_mla.indices.ownership import Ownership, global_topk
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.launch.transforms import varying_alike
from jax_sparse_mla.layers.state import (
    IndexRows,
    LayerOptions,
    LayerStep,
    V4LayerCache,
    V4LayerParams,
    V4Rows,
    V41Selection,
)
from jax_sparse_mla.layers.write import write_layer
from jax_sparse_mla.metadata import V4Metadata
from jax_sparse_mla.models import LayerKind, ModelSpec


class IndexedEntries(NamedTuple):
    """The entries that an indexer selects among."""

    index_k: jax.Array | IndexKeys  # their index keys
    lengths: jax.Array  # int32 `[T]`, how many of them each row sees
    page_table: jax.Array  # int32, the pages of each row's entries `[T, P]`, or of each request's `[B, P]`
    row_to_request: jax.Array | None  # int32 `[T]`, the row of each query in a table of requests; None: of rows
    page_size: int  # entries of a page


def windowed_layer(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    step: LayerStep,
    *,
    spec: ModelSpec,
    kind: LayerKind,
    source: V4LayerCache | None = None,
    selection: V41Selection | None = None,
    options: LayerOptions,
) -> tuple[jax.Array, V4LayerCache, V41Selection | None]:
    """One layer with a window, of checked arguments.

    Args:
      source: the caches of the layer whose compressed rows this one reads; None where it owns some or reads none.
      selection: what an earlier layer selected; None before the first one.

    Returns:
      out `[T, heads, 512]`, the updated cache, and the selection: the layer's own, or the one passed in.
    """
    metadata = step.metadata
    options = options if kind.ratio else options._replace(pages_axis=None)  # a window is whole on every device
    pages_axis = options.pages_axis
    cache, attn_sink, index_q, index_weights = write_layer(
        cache, rows, params, step, spec=spec, kind=kind, pages_axis=pages_axis
    )
    compressed_source, slots = cache if kind.owns_kv else source, None
    if kind.selects == "own" and options.replayed is not None:
        positions = seen_positions(options.replayed, metadata.compressed[kind.ratio].lengths)
        # The blocks of an earlier layer go on to the next one; a layer that publishes some has none to give.
        blocks = None if kind.candidates != "among" else selection.blocks
        selection = V41Selection(positions=positions, blocks=blocks)
    elif kind.selects == "own":
        entries = IndexedEntries(
            index_k=compressed_source.index_k,
            lengths=metadata.compressed[kind.ratio].lengths,
            page_table=metadata.page_table,
            row_to_request=None,
            page_size=spec.page_size // kind.ratio,
        )
        if kind.index_keys == "compressor":
            queries, paged = (index_q, index_weights), step.plan is None
            positions, slots = select_entries(
                queries, entries, spec.index_topk, options=options, at_once=paged, with_slots=paged
            )
            selection = V41Selection(positions=positions)
        else:
            selection = _select_among_candidates(rows.index, entries, selection, spec=spec, kind=kind)
    compressed = None if kind.ratio == 0 else compressed_source.compressed
    positions = selection.positions if kind.selected else None
    if step.plan is not None:
        out, _ = extend(
            rows.q,
            step.plan,
            cache.swa,
            compressed,
            positions,
            spec.softmax_scale,
            attn_sink,
            pages_axis=pages_axis,
            backend=options.backend,
            batch_invariant=options.batch_invariant,
        )
        return out, cache, selection
    extra_indices = extra_lengths = None
    if kind.ratio != 0:
        extra_lengths = metadata.compressed[kind.ratio].topk_lengths
        extra_indices = _extra_indices(metadata, positions, slots, spec=spec, kind=kind)
    out = attend_paged(
        rows.q,
        cache.swa,
        metadata.swa_page_indices,
        metadata.swa_topk_lengths,
        softmax_scale=spec.softmax_scale,
        options=options,
        attn_sink=attn_sink,
        extra=(compressed, extra_indices, extra_lengths),
    )
    return out, cache, selection


def _extra_indices(
    metadata: V4Metadata, positions: jax.Array | None, slots: jax.Array | None, *, spec: ModelSpec, kind: LayerKind
) -> jax.Array:
    """The slots of the compressed entries that the layer attends to: the selected ones, or all."""
    page_indices = metadata.compressed[kind.ratio].page_indices
    if positions is None:
        return page_indices
    if slots is None:  # layers that share positions share these: XLA computes them once
        row = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
        slots = page_slot_or_minus_one(metadata.page_table, row, positions, spec.page_size // kind.ratio)
    return jnp.pad(slots, ((0, 0), (0, page_indices.shape[1] - spec.index_topk)), constant_values=-1)


def seen_positions(positions: jax.Array, lengths: jax.Array) -> jax.Array:
    """Given positions `[T, k]` or `[1, k]`; −1 in place of those that a row does not see, of lengths `[T]`."""
    return jnp.where((positions >= 0) & (positions < lengths[:, None]), positions, -1)


def select_entries(
    queries: tuple[jax.Array, jax.Array] | None,
    entries: IndexedEntries,
    topk: int,
    *,
    options: LayerOptions,
    at_once: bool,
    with_slots: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The positions int32 `[T, topk]` that an indexer selects, and their slots, where a top-k gives them too.

    Args:
      queries: quantised index queries and their weights; not read with `options.index_scores`.
      at_once: whether all logits are made first, where they fit.
      with_slots: whether slots are wanted.
    """
    table, request, scores = entries.page_table, entries.row_to_request, options.index_scores
    if table.shape[1] * as_index_keys(entries.index_k).page_size <= topk:  # every row selects all that it sees
        return seen_positions(jnp.arange(topk, dtype=jnp.int32)[None], entries.lengths), None
    if scores is None and options.pages_axis is not None:
        return _select_shared(queries, entries, topk, options=options), None
    if scores is None and at_once:
        pages = table if request is None else table[request]
        scores = logits_at_once(
            *queries, entries.index_k, pages, entries.lengths, batch_invariant=options.batch_invariant
        )
    if scores is None:  # a long chunk's logits would be the step's largest array
        positions = selected_positions(
            *queries,
            entries.index_k,
            table,
            entries.lengths,
            topk,
            row_to_request=request,
            batch_invariant=options.batch_invariant,
        )
        return positions, None
    positions = topk_positions(scores, entries.lengths, topk)
    if not with_slots:
        return positions, None
    slots = topk_transform(
        scores,
        entries.lengths,
        topk,
        method=TopkTransform.PAGED,
        page_table=table,
        page_size=entries.page_size,
        row_to_request=request,
    )
    return positions, slots


def _select_shared(
    queries: tuple[jax.Array, jax.Array], entries: IndexedEntries, topk: int, *, options: LayerOptions
) -> jax.Array:
    """As `select_entries`, of index keys that devices share: each scores its own, and all choose among the best."""
    axis, invariant, size = options.pages_axis, options.batch_invariant, entries.page_size
    n, rank = lax.axis_size(axis), lax.axis_index(axis)
    rule, keys = Ownership(n, size), as_index_keys(entries.index_k)
    pages = -(-entries.page_table.shape[1] // n)  # of a request, at most, on one device
    table = jnp.pad(entries.page_table, ((0, 0), (0, n * pages - entries.page_table.shape[1])), constant_values=-1)
    table = table.reshape(-1, pages, n)[:, :, rank] // n  # −1 stays −1
    rows_of = {"q": queries[0], "weights": queries[1], "lengths": entries.lengths}
    rows_of |= {"pages": table} if entries.row_to_request is None else {"request": entries.row_to_request}
    rows = entries.lengths.shape[0]

    def chunk(rows_of: dict[str, jax.Array]) -> jax.Array:
        own, lengths = rows_of.get("pages"), rows_of["lengths"]
        own = table[rows_of["request"]] if own is None else own
        arguments = rows_of["q"], rows_of["weights"], keys, own, rule.local_lengths(lengths, rank)
        options = {"rows_of_call": None if invariant else rows, "alone": invariant}
        logits = logits_of(*varying_alike(arguments), **options, fill=False)  # nothing past a length is read
        return global_topk(logits, lengths, topk, ownership=rule, axis_name=axis)

    return in_chunks(chunk, rows_of, rows_at_once(pages * size, SCRATCH_BYTES, invariant))


def _select_among_candidates(
    rows: IndexRows, entries: IndexedEntries, selection: V41Selection | None, *, spec: ModelSpec, kind: LayerKind
) -> V41Selection:
    """The selection of an index source of V4.1 among the KV source's entries."""
    keys, topk = as_index_keys(entries.index_k), spec.index_topk
    q, scale = quantize_index_q(rows.q, format=keys.format)
    arguments = q, rows.weights * scale, keys, entries.page_table, entries.lengths
    if kind.candidates == "among":
        blocks = selection.blocks
        positions = index_topk_in_blocks(*arguments, topk, blocks, block_size=spec.candidate_block_size)
        return V41Selection(positions=positions, blocks=blocks)
    if kind.candidates == "publishes":
        # No more blocks than the bucket has.
        bucket = entries.page_table.shape[1] * keys.page_size // spec.candidate_block_size
        blocks = max(1, min(spec.candidate_blocks, bucket))
        positions, blocks = index_topk_and_blocks(*arguments, topk, blocks, block_size=spec.candidate_block_size)
        return V41Selection(positions=positions, blocks=blocks)
    return V41Selection(positions=selected_positions(*arguments, topk))


def attend_paged(
    q: jax.Array,
    cache: PagedKV,
    indices: jax.Array,
    lengths: jax.Array,
    *,
    softmax_scale: float,
    options: LayerOptions,
    attn_sink: jax.Array | None = None,
    extra: tuple[PagedKV | None, jax.Array | None, jax.Array | None] = (None, None, None),
) -> jax.Array:
    """`out [T, heads, 512]` over the paged caches; `extra` is the second cache, its indices and their lengths.

    With `options.pages_axis` devices share the pages of the last cache, and heads are the device's own.
    """
    extra_cache, extra_indices, extra_lengths = extra
    attend = sparse_mla_decode
    if (axis := options.pages_axis) is not None:
        q = lax.all_gather(q, axis, axis=1, tiled=True)
        attend = functools.partial(context_parallel_decode, axis_name=axis, whole_cache=extra_cache is not None)
    out, _ = attend(
        q[:, None],
        cache,
        indices[:, None],
        softmax_scale=softmax_scale,
        topk_length=lengths,
        extra_cache=extra_cache,
        extra_indices=None if extra_indices is None else extra_indices[:, None],
        extra_topk_length=extra_lengths,
        attn_sink=attn_sink,
        backend=options.backend,
        batch_invariant=options.batch_invariant,
    )
    return out[:, 0]
