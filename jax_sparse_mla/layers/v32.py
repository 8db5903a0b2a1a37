"""A V3.2 layer's attention in one step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla.attention import own_slots, sparse_mla_prefill
from jax_sparse_mla.attention.context_parallel import gather_shared_kv
from jax_sparse_mla.compressor.pools import pool_keys
from jax_sparse_mla.indexer.logits import hadamard_transform, quantize_index_q, write_index_k
from jax_sparse_mla.indices import TopkTransform, expand_pools
from jax_sparse_mla.indices.lookup import add_or_minus_one, page_slot_or_minus_one
from jax_sparse_mla.indices.ownership import AxisName
from jax_sparse_mla.kv_cache import gather_kv, write_kv
from jax_sparse_mla.layers import checks as layer_checks
from jax_sparse_mla.layers.layer import IndexedEntries, attend_paged, seen_positions, select_entries
from jax_sparse_mla.layers.state import LayerOptions, V32LayerCache, V32Rows
from jax_sparse_mla.metadata import ForwardBatch, V32Metadata
from jax_sparse_mla.models import ModelSpec


def v32_layer(
    cache: V32LayerCache,
    rows: V32Rows,
    batch: ForwardBatch,
    metadata: V32Metadata,
    *,
    spec: ModelSpec,
    index_scores: jax.Array | None = None,
    selected: jax.Array | None = None,
    index_ape: jax.Array | None = None,
    pages_axis: AxisName | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, V32LayerCache, jax.Array]:
    """One V3.2 layer's attention: with RAGGED metadata from a gathered bf16 workspace, with PAGED from the paged cache.

    Args and Returns as `v4_layer`; out is `[T, heads, 512]` in the latent space, positions int32 `[T, index_topk]`.

    A layer without an indexer of its own, whose rows and cache have no index keys, takes `selected`: the positions that
    the last layer with one returned (IndexShare, arXiv 2603.12201), or `index_scores`. It returns them again. A layer
    with an indexer takes `selected` instead of selecting, as in `v4_layer` (replay): it writes its index keys, and does
    not read its index queries.

    With pools (KPool, GLM-5.3) there is an index key for every `spec.kind().pool` tokens, and `index_ape` float32
    `[pool, 128]` is added to the scores that weigh a pool's keys. Keys and queries of pools pass a Hadamard
    transform before they are quantised, as in SGLang and vLLM. Pools are selected whole, and every row attends to the
    tokens of an unfinished one: positions are int32 `[T, spec.index_width]`. The columns of `index_scores` are pools.
    They have no `batch_invariant`: their transform is a matrix product of XLA's.

    With `pages_axis`, as in `v4_layer`, each device has its own pages of kv and index keys; there must be no pools.
    """
    layer_checks.check_v32_layer(cache, rows, batch, index_scores, selected, index_ape, spec=spec)
    pool, options = spec.kind().pool, LayerOptions(index_scores, backend, batch_invariant, pages_axis=pages_axis)
    if batch_invariant and pool > 1:
        raise ValueError(f"v32_layer: batch_invariant serves no pools of index keys, got pools of {pool}")
    if pages_axis is not None and pool > 1:
        raise ValueError(f"v32_layer: pages_axis serves no pools of index keys, got pools of {pool}")
    cache = write_v32(cache, rows, batch, metadata, index_ape, pool, pages_axis)
    ragged, positions, slots = metadata.topk_transform is TopkTransform.RAGGED, selected, None
    if selected is not None and rows.index_k is not None:
        positions = seen_positions(selected, metadata.seqlens_expanded)
    elif selected is None:
        queries = None
        if index_scores is None:
            index_q, q_scale = quantize_index_q(rows.index_q if pool == 1 else hadamard_transform(rows.index_q))
            queries = index_q, rows.index_weights * q_scale
        entries = IndexedEntries(
            index_k=cache.index_k,
            lengths=metadata.seqlens_expanded // pool,
            page_table=metadata.page_table,
            row_to_request=metadata.row_to_request,
            page_size=spec.page_size,
        )
        # Layers that share positions share their slots too: XLA computes them once. A top-k that gives slots would be
        # a second one where the positions are wanted as well; that of pools gives no tokens.
        with_slots = not ragged and not cache.indexed and pool == 1
        positions, slots = select_entries(
            queries, entries, spec.index_topk // pool, options=options, at_once=not ragged, with_slots=with_slots
        )
        if pool > 1:
            positions = expand_pools(positions, metadata.seqlens_expanded, pool)
    if ragged:
        gather = gather_kv if pages_axis is None else functools.partial(gather_shared_kv, axis_name=pages_axis)
        out, _, _ = sparse_mla_prefill(
            rows.q,
            gather(cache.kv, metadata.kv_slots),
            add_or_minus_one(positions, metadata.topk_indices_offset[:, None]),
            softmax_scale=spec.softmax_scale,
            topk_length=metadata.topk_lengths,
            backend=backend,
            batch_invariant=batch_invariant,
        )
        return out, cache, positions
    if slots is None:
        request = metadata.row_to_request[:, None]
        slots = page_slot_or_minus_one(metadata.page_table, request, positions, spec.page_size)
    out = attend_paged(
        rows.q, cache.kv, slots, metadata.topk_lengths, softmax_scale=spec.softmax_scale, options=options
    )
    return out, cache, positions


def write_v32(
    cache: V32LayerCache,
    rows: V32Rows,
    batch: ForwardBatch,
    metadata: V32Metadata,
    ape: jax.Array | None = None,
    pool: int = 1,
    pages_axis: str | None = None,
) -> V32LayerCache:
    """The cache with the rows of the step's tokens and, of a layer with an indexer, their index keys or those of the
    pools that they finish; with `pages_axis`, what belongs into this device's pages."""
    keys, slots = rows.index_k, metadata.out_cache_loc
    if pages_axis is not None:
        slots = own_slots(slots, cache.kv, pages_axis)
    cache = dataclasses.replace(cache, kv=write_kv(cache.kv, slots, rows.kv))
    if keys is None:
        return cache
    if pool == 1:
        return dataclasses.replace(cache, index_k=write_index_k(cache.index_k, slots, keys))
    keys, of_rows, state = pool_keys(
        cache.index_state,
        keys,
        rows.index_score,
        positions=metadata.positions,
        req_rows=batch.req_pool_indices[metadata.row_to_request],
        ape=ape,
        pool=pool,
        num_requests=batch.seq_lens.shape[0],
    )
    # A page holds whole pools, so the slot of a pool's last token says where its key is.
    slots = jnp.where(of_rows >= 0, slots[jnp.maximum(of_rows, 0)] // pool, -1)
    keys = hadamard_transform(keys.astype(jnp.bfloat16))
    return dataclasses.replace(cache, index_k=write_index_k(cache.index_k, slots, keys), index_state=state)
