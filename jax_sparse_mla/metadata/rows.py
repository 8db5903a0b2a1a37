"""Expands requests to query rows, the first step of every metadata builder.

A step of B requests has T query rows, one per query token, requests in order. A row's causal length is the
number of tokens it attends to, its own included; rows with none are padding rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.argument_checks import INT32, Checks
from jax_sparse_mla.indices.lookup import (
    INT_MAX,
    exclusive_cumsum,
    split_ragged,
    take_2d_or_minus_one,
    take_or_minus_one,
)
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.models import ModelSpec

_FIXED_ROWS_MODES = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


@pytree_dataclass
class QueryRows:
    """A batch expanded to its T query rows; all int32.

    Attributes:
      request_lens: `[B]`, tokens of each request with this step's (drafts included in TARGET_VERIFY); 0 for a
        padding request, and for every request of an IDLE step.
      request_rows: `[B]`, each request's row in the request tables; −1 for a padding request.
      query_start_loc: `[B + 1]`, each request's first row and the end of the last one. It stops at the end
        of the last row that is not padding, so requests that pad the end of the batch have no rows.
      owner: `[T]`, the request of each row; −1 on padding rows.
      seq_lens_causal: `[T]`, tokens that each row attends to; 0 on padding rows.
      req_rows: `[T]`, each row's row in the request tables; −1 on padding rows.
      out_cache_loc: `[T]`, the batch's, with 0 on padding rows.
      overflow: bool scalar, whether a row is longer than the bucket or the batch has more rows than T.
    """

    request_lens: jax.Array
    request_rows: jax.Array
    query_start_loc: jax.Array
    owner: jax.Array
    seq_lens_causal: jax.Array
    req_rows: jax.Array
    out_cache_loc: jax.Array
    overflow: jax.Array

    @property
    def live(self) -> jax.Array:
        """bool `[T]`: not a padding row."""
        return self.owner >= 0

    @property
    def row_to_request(self) -> jax.Array:
        """`[T]`, the request of each row; 0 on padding rows, to stay a valid index."""
        return jnp.maximum(self.owner, 0)


def check_step(
    check: Checks, spec: ModelSpec, batch: ForwardBatch, tables: RequestTables
) -> tuple[ForwardBatch, RequestTables]:
    """Refuses what is not a model, a batch and its tables; returns both with the arrays that `check` returns.

    JAX's and torch's functions share this.

    Raises:
      TypeError: an object or an array of another type.
      ValueError: shapes that do not agree, or a batch that lacks what its mode needs.
    """
    for name, value, cls in (("spec", spec, ModelSpec), ("tables", tables, RequestTables)):
        if not isinstance(value, cls):
            raise TypeError(f"{check.function}: {name} must be a {cls.__name__}, got {type(value).__name__}")
    batch = check_batch(check, batch)
    return batch, dataclasses.replace(
        tables,
        req_to_token=check("tables.req_to_token", tables.req_to_token, (None, None), INT32),
        full_to_swa=check.optional("tables.full_to_swa", tables.full_to_swa, (None,), INT32),
    )


def check_batch(check: Checks, batch: ForwardBatch) -> ForwardBatch:
    """Refuses a batch whose arrays do not fit each other or its mode."""
    if not isinstance(batch, ForwardBatch):
        raise TypeError(f"{check.function}: batch must be a ForwardBatch, got {type(batch).__name__}")
    if not isinstance(batch.mode, ForwardMode):
        raise TypeError(f"{check.function}: batch.mode must be a ForwardMode, got {batch.mode!r}")
    check.static_int("batch.max_seq_len", batch.max_seq_len, minimum=0)
    seq_lens = check("batch.seq_lens", batch.seq_lens, ("B",), INT32)
    req_pool_indices = check("batch.req_pool_indices", batch.req_pool_indices, ("B",), INT32)
    out_cache_loc = check("batch.out_cache_loc", batch.out_cache_loc, ("T",), INT32)
    num_requests, num_rows = check.dims["B"], check.dims["T"]
    if batch.mode is ForwardMode.DECODE and num_rows != num_requests:
        raise check.fail(
            f"batch.out_cache_loc must have one entry per request in DECODE, [{num_requests}], got "
            f"[{num_rows}]; for a step of a multi-step draft, slice it with draft_step_batch first"
        )
    # Fields that the mode does not read are dropped, so that they do not select another compilation.
    extend_lens, drafts = None, None
    if batch.mode is ForwardMode.EXTEND:
        if batch.extend_lens is None:
            raise check.fail("batch.extend_lens must be given in EXTEND, got None")
        extend_lens = check("batch.extend_lens", batch.extend_lens, ("B",), INT32)
    if batch.mode in _FIXED_ROWS_MODES:
        if batch.num_draft_tokens is None:
            raise check.fail(f"batch.num_draft_tokens must be given in {batch.mode.name}, got None")
        drafts = check.static_int("batch.num_draft_tokens", batch.num_draft_tokens, minimum=1)
        if num_rows != num_requests * drafts:
            raise check.fail(
                f"batch.out_cache_loc must have B * num_draft_tokens = {num_requests} * {drafts} entries in "
                f"{batch.mode.name}, got [{num_rows}]"
            )
    return dataclasses.replace(
        batch,
        seq_lens=seq_lens,
        req_pool_indices=req_pool_indices,
        out_cache_loc=out_cache_loc,
        extend_lens=extend_lens,
        num_draft_tokens=drafts,
    )


def bucket(batch: ForwardBatch, tables: RequestTables) -> int:
    """Tokens that a page table of this step covers: `max_seq_len`, clamped to the request table's width."""
    return min(batch.max_seq_len, tables.req_to_token.shape[1])


def expand_rows(batch: ForwardBatch, tables: RequestTables) -> QueryRows:
    """The query rows of a validated batch. A row k rows before its request's last one ends k tokens earlier."""
    num_rows = batch.out_cache_loc.shape[0]
    request_lens, starts, owner = _requests_of_rows(batch)
    # Not from the next request's start, which stops at INT_MAX.
    by_request = batch.mode is ForwardMode.EXTEND
    row_counts = jnp.maximum(batch.extend_lens, 0) if by_request else starts[1:] - starts[:-1]
    row_in_request = jnp.arange(num_rows, dtype=jnp.int32) - take_or_minus_one(starts, owner)
    rows_after = take_or_minus_one(row_counts, owner) - 1 - row_in_request
    causal = take_or_minus_one(request_lens, owner) - rows_after
    live = (owner >= 0) & (causal > 0)
    owner = jnp.where(live, owner, -1)
    causal = jnp.where(live, causal, 0)

    request_rows = jnp.where(request_lens > 0, jnp.maximum(batch.req_pool_indices, -1), -1)
    rows_end = jnp.max(jnp.where(live, jnp.arange(1, num_rows + 1, dtype=jnp.int32), 0), initial=0)
    return QueryRows(
        request_lens=request_lens,
        request_rows=request_rows,
        query_start_loc=jnp.minimum(starts, rows_end),
        owner=owner,
        seq_lens_causal=causal,
        req_rows=take_or_minus_one(request_rows, owner),
        out_cache_loc=jnp.where(live, batch.out_cache_loc, 0),
        overflow=jnp.any(causal > bucket(batch, tables)) | (starts[-1] > num_rows),
    )


def _requests_of_rows(batch: ForwardBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Request lengths `[B]`, first rows `[B + 1]`, the request of each row `[T]`, −1 past the last."""
    num_requests, num_rows = batch.seq_lens.shape[0], batch.out_cache_loc.shape[0]
    request_lens = jnp.maximum(batch.seq_lens, 0)
    if batch.mode is ForwardMode.EXTEND:
        starts = exclusive_cumsum(jnp.maximum(batch.extend_lens, 0))
        return request_lens, starts, split_ragged(starts, num_rows)[0]
    if batch.mode is ForwardMode.IDLE:
        nothing = jnp.zeros((num_requests + 1,), jnp.int32)
        return nothing[1:], nothing, jnp.full((num_rows,), -1, jnp.int32)
    rows_each = batch.num_draft_tokens if batch.mode in _FIXED_ROWS_MODES else 1
    if batch.mode is ForwardMode.TARGET_VERIFY:
        # The engine's lengths do not have the drafts yet. Test before adding: int32 sums wrap.
        longest = INT_MAX - rows_each
        request_lens = jnp.where(request_lens > 0, jnp.minimum(request_lens, longest) + rows_each, 0)
    starts = jnp.arange(num_requests + 1, dtype=jnp.int32) * rows_each
    return request_lens, starts, jnp.arange(num_rows, dtype=jnp.int32) // rows_each


def request_pages(tables: RequestTables, req_rows: jax.Array, tokens: int, page_size: int) -> jax.Array:
    """The pages of each request: `req_to_token[row, 0:tokens:page_size] // page_size`.

    Args:
      tables: the request tables.
      req_rows: int32 `[n]`, rows of `req_to_token`.
      tokens: how many tokens the pages cover (static).
      page_size: tokens per page (static).

    Returns:
      int32 `[n, ⌈tokens / page_size⌉]`; −1 for an invalid row and where the table holds no slot.
    """
    first_token = jnp.arange(0, tokens, page_size, dtype=jnp.int32)
    # Floor division keeps −1 at −1.
    return take_2d_or_minus_one(tables.req_to_token, req_rows[:, None], first_token[None, :]) // page_size


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple
