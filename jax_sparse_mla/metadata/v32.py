"""Attention and indexer metadata of DeepSeek-V3.2, and of GLM-5.3, whose index keys stand for pools of tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.indices.lookup import (
    INT_MAX,
    exclusive_cumsum,
    split_ragged,
    take_2d_or_minus_one,
    take_or_minus_one,
)
from jax_sparse_mla.indices.topk.api import TopkTransform
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.metadata.rows import bucket, check_step, expand_rows, request_pages
from jax_sparse_mla.metadata.selection import topk_transform_of
from jax_sparse_mla.models import ModelSpec


@pytree_dataclass
class V32Metadata:
    """The metadata that all layers of a V3.2 step share; all int32 but `overflow`.

    Padding rows have every length 0, position −1, every offset and the write slot 0; padding requests have
    length 0 and pages −1.

    Attributes:
      cache_seqlens: `[B]`, tokens of each request, this step's included (the drafts too in TARGET_VERIFY).
      seqlens_expanded: `[T]`, tokens that each query row attends to, its own included.
      topk_lengths: `[T]`, `min(seqlens_expanded, index_topk)`: how many indices a kernel scans. With pools of P tokens
        `min(p, index_topk) + seqlens_expanded % P`, p the tokens in finished pools.
      positions: `[T]`, `seqlens_expanded - 1`.
      out_cache_loc: `[T]`, the slot of the row's own token.
      cu_seqlens_q: where query rows start: `[B + 1]` by request in EXTEND (requests that pad the end of the
        batch have none), else `arange(T + 1)`, each row a query of its own.
      cu_seqlens_k: `[B + 1]`, exclusive sums of `cache_seqlens` (they stop at INT_MAX).
      page_table: `[B, ⌈min(max_seq_len, max_len) / page_size⌉]`, the request's pages of 64 tokens (with pools 64
        pools); −1 where the request table holds no slot. `row_to_request` maps a query row to its row here.
      row_to_request: `[T]`, the row's request; 0 on padding rows.
      index_row_starts, index_row_ends: `[T]`, the columns of the row's request in index logits over the
        concatenated keys of all requests: from `cu_seqlens_k` of its request, `seqlens_expanded` columns. With pools
        the keys are those of finished pools.
      overflow: bool scalar: a request is longer than the bucket (what the tables do not cover is −1), or an
        EXTEND batch has more rows than `out_cache_loc`.
      topk_transform: what the indexer's positions become (static).
      topk_indices_offset: `[T]`, where the row's request starts in the concatenated keys; exactly when
        `topk_transform` is RAGGED, else None.
      kv_slots: `[B * min(max_seq_len, max_len)]`, the slots that RAGGED indices address: those of all
        requests' tokens, concatenated and padded with −1; exactly when `topk_transform` is RAGGED, else None.
    """

    cache_seqlens: jax.Array
    seqlens_expanded: jax.Array
    topk_lengths: jax.Array
    positions: jax.Array
    out_cache_loc: jax.Array
    cu_seqlens_q: jax.Array
    cu_seqlens_k: jax.Array
    page_table: jax.Array
    row_to_request: jax.Array
    index_row_starts: jax.Array
    index_row_ends: jax.Array
    overflow: jax.Array
    topk_transform: TopkTransform = static()
    topk_indices_offset: jax.Array | None = None
    kv_slots: jax.Array | None = None


def build_v32_metadata(
    spec: ModelSpec, batch: ForwardBatch, tables: RequestTables, *, fp8_kv_cache: bool, prefill_backend: str
) -> V32Metadata:
    """The metadata of a V3.2 step, built once and shared by all layers (formulas: SGLang's DSA metadata).

    One compilation per mode, shapes and bucket; lengths, requests and slots are data.

    Args:
      spec: a model without a sliding window (static).
      batch: the step. DECODE: T = B. EXTEND: T is `out_cache_loc`'s length, rows past the last request's are
        padding. TARGET_VERIFY and DRAFT_EXTEND: T = B * num_draft_tokens. IDLE: all rows are padding.
      tables: the request tables; `full_to_swa` is not read.
      fp8_kv_cache, prefill_backend: see `select_topk_transform`, which they and the mode decide (static).

    Returns:
      V32Metadata of B requests and T rows.

    Raises:
      TypeError: objects or arrays of another type.
      ValueError: a model with a window, a batch whose shapes do not fit its mode, an unknown
        `prefill_backend`.
    """
    check = ArgumentChecks("build_v32_metadata")
    batch, tables = check_step(check, spec, batch, tables)
    if spec.windowed:
        raise check.fail(f"spec must be a model without a sliding window, got {spec.name} (window {spec.window})")
    transform = topk_transform_of(check.function, batch.mode, fp8_kv_cache, prefill_backend)
    return _build_v32(spec, batch, RequestTables(req_to_token=tables.req_to_token), transform)


@functools.partial(jax.jit, static_argnames=("spec", "transform"))
def _build_v32(spec: ModelSpec, batch: ForwardBatch, tables: RequestTables, transform: TopkTransform) -> V32Metadata:
    rows = expand_rows(batch, tables)
    tokens = bucket(batch, tables)
    num_rows = rows.owner.shape[0]
    cu_seqlens_k = exclusive_cumsum(rows.request_lens)
    row_starts = jnp.where(rows.live, take_or_minus_one(cu_seqlens_k, rows.owner), 0)
    pool, lengths, key_starts = spec.kind().pool, rows.seq_lens_causal, row_starts
    if pool > 1:
        cu_keys = exclusive_cumsum(rows.request_lens // pool)
        key_starts = jnp.where(rows.live, take_or_minus_one(cu_keys, rows.owner), 0)
    by_request = batch.mode is ForwardMode.EXTEND
    ragged = transform is TopkTransform.RAGGED
    return V32Metadata(
        cache_seqlens=rows.request_lens,
        seqlens_expanded=rows.seq_lens_causal,
        topk_lengths=jnp.minimum(lengths - lengths % pool, spec.index_topk) + lengths % pool,
        positions=rows.seq_lens_causal - 1,
        out_cache_loc=rows.out_cache_loc,
        cu_seqlens_q=rows.query_start_loc if by_request else jnp.arange(num_rows + 1, dtype=jnp.int32),
        cu_seqlens_k=cu_seqlens_k,
        page_table=request_pages(tables, rows.request_rows, tokens, spec.page_size),
        row_to_request=rows.row_to_request,
        index_row_starts=key_starts,
        # Saturates like cu_seqlens_k.
        index_row_ends=key_starts + jnp.minimum(lengths // pool, INT_MAX - key_starts),
        overflow=rows.overflow | jnp.any(rows.request_lens > tokens),
        topk_transform=transform,
        topk_indices_offset=row_starts if ragged else None,
        kv_slots=_ragged_slots(tables, rows.request_rows, cu_seqlens_k, tokens) if ragged else None,
    )


def _ragged_slots(tables: RequestTables, request_rows: jax.Array, cu_seqlens_k: jax.Array, tokens: int) -> jax.Array:
    request, position = split_ragged(cu_seqlens_k, request_rows.shape[0] * tokens)
    return take_2d_or_minus_one(tables.req_to_token, take_or_minus_one(request_rows, request), position)
