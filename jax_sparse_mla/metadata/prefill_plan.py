"""The plan of a V4 prefill chunk: the rows gathered into its workspace, and where each request's rows lie there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.indices.lookup import exclusive_cumsum, page_slot_or_minus_one, split_ragged
from jax_sparse_mla.indices.window import swa_gather_plan
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.metadata.rows import (
    bucket,
    check_step,
    expand_rows,
    request_pages,
)
from jax_sparse_mla.metadata.v4 import check_v4
from jax_sparse_mla.models import ModelSpec


@pytree_dataclass
class PrefillPlan:
    """The workspace of a prefill chunk, `[all compressed regions | all window regions]`; arrays are int32.

    Workspace row i is gathered from `compressed_slots[i]`; rows from `len(compressed_slots)` on are gathered from
    `swa_slots`. A row whose slot is −1 is gathered as zeros and is not a key: an index to it must be masked, as
    `sparse_mla_extend` does. The fields are the arguments of `combine_topk_swa_indices`.

    Attributes:
      compressed_slots: `[compressed_capacity]`, slots of the compressed cache, request by request, −1 padded;
        `[0]` for ratio 0.
      swa_slots: `[swa_capacity]`, slots of the sliding-window cache, request by request, −1 padded.
      compressed_base: `[B]`, the workspace row of each request's first compressed entry. A request whose
        entries do not all fit has `workspace_rows` here, so that no entry is mistaken for a window row.
      swa_base: `[B]`, the workspace row of each request's first gathered token.
      query_start_loc: `[B + 1]`, the first query row of each request, and the end of the last one.
      query_pos: `[T]`, the absolute position of each query row; −1 on padding rows.
      seq_lens: `[B]`, tokens of each request, this chunk included; 0 for padding requests.
      gather_lens: `[B]`, how many of each request's last tokens the window region holds.
      row_to_request: `[T]`, the row's request; 0 on padding rows.
      overflow: bool scalar: the capacities, the bucket or `out_cache_loc` were too small. What did not fit
        is left out of the attention.
      compress_ratio: 0, or tokens per compressed entry (static).
      window: tokens of the sliding window (static).
      topk: compressed entries per query: `index_topk` with an indexer, all of the bucket's without (at least
        1), 0 for ratio 0 (static).
      selected: whether the layers of this ratio attend to entries that an indexer selects (static).
    """

    compressed_slots: jax.Array
    swa_slots: jax.Array
    compressed_base: jax.Array
    swa_base: jax.Array
    query_start_loc: jax.Array
    query_pos: jax.Array
    seq_lens: jax.Array
    gather_lens: jax.Array
    row_to_request: jax.Array
    overflow: jax.Array
    compress_ratio: int = static()
    window: int = static()
    topk: int = static()
    selected: bool = static()

    @property
    def workspace_rows(self) -> int:
        """Rows of the workspace: both capacities."""
        return self.compressed_slots.shape[0] + self.swa_slots.shape[0]


def build_prefill_plan(
    spec: ModelSpec,
    batch: ForwardBatch,
    tables: RequestTables,
    *,
    compress_ratio: int,
    swa_capacity: int,
    compressed_capacity: int,
) -> PrefillPlan:
    """The plan of a V4 prefill chunk for layers of one compress ratio (SGLang's sparse-prefill workspace).

    Request b has `seq_lens[b] // compress_ratio` compressed rows and its last
    `min(seq_lens[b], extend_lens[b] + window - 1)` tokens, the union of its queries' windows.

    Args:
      spec: a model with a sliding window (static).
      batch: an EXTEND step.
      tables: the request tables, `full_to_swa` included.
      compress_ratio: 0, or one of the model's (static).
      swa_capacity: window rows of the workspace, at least 1 (static). `sum(extend_lens) + B * (window - 1)`
        always suffices.
      compressed_capacity: compressed rows of the workspace (static); ratio 0 has none, whatever is given.

    Returns:
      A PrefillPlan; see its attributes.

    Raises:
      TypeError: objects or arrays of another type.
      ValueError: another mode than EXTEND, a ratio that the model does not have, a model without a window,
        shapes that do not agree, or a capacity out of range.
    """
    check = ArgumentChecks("build_prefill_plan")
    batch, tables = check_step(check, spec, batch, tables)
    if batch.mode is not ForwardMode.EXTEND:
        raise check.fail(f"batch.mode must be EXTEND, got {batch.mode.name}")
    check_v4(check, spec, tables)
    compress_ratio = check.static_int("compress_ratio", compress_ratio, minimum=0)
    if compress_ratio not in (accepted := sorted({0, *spec.compress_ratios})):
        raise check.fail(f"compress_ratio must be one of {accepted} for {spec.name}, got {compress_ratio}")
    swa_capacity = check.static_int("swa_capacity", swa_capacity, minimum=1)
    compressed_capacity = check.static_int("compressed_capacity", compressed_capacity, minimum=0)
    if compress_ratio == 0:
        compressed_capacity = 0
    return _build_plan(spec, batch, tables, compress_ratio, swa_capacity, compressed_capacity)


@functools.partial(jax.jit, static_argnames=("spec", "compress_ratio", "swa_capacity", "compressed_capacity"))
def _build_plan(spec, batch, tables, compress_ratio, swa_capacity, compressed_capacity) -> PrefillPlan:
    rows = expand_rows(batch, tables)
    tokens = bucket(batch, tables)
    overflow = rows.overflow | jnp.any(rows.request_lens > tokens)
    swa_slots, _, gather_lens, swa_starts = swa_gather_plan(
        jnp.where(batch.extend_lens > 0, rows.request_lens, 0),  # no query rows, nothing to gather
        batch.extend_lens,
        rows.request_rows,
        tables.req_to_token,
        tables.full_to_swa,
        window=spec.window,
        capacity=swa_capacity,
    )
    overflow |= swa_starts[-1] > swa_capacity
    selected = spec.kind(compress_ratio).selected
    if compress_ratio == 0:
        topk = 0
        compressed_slots = jnp.zeros((0,), jnp.int32)
        compressed_base = jnp.zeros_like(rows.request_lens)
    else:
        topk = spec.index_topk if selected else max(tokens // compress_ratio, 1)
        pages = request_pages(tables, rows.request_rows, tokens, spec.page_size)
        compressed_slots, starts = _compressed_slots(
            pages, rows.request_lens // compress_ratio, spec.page_size // compress_ratio, compressed_capacity
        )
        overflow |= starts[-1] > compressed_capacity
        fits = starts[1:] <= compressed_capacity
        compressed_base = jnp.where(fits, starts[:-1], compressed_capacity + swa_capacity)
    return PrefillPlan(
        compressed_slots=compressed_slots,
        swa_slots=swa_slots,
        compressed_base=compressed_base,
        # A start past the capacity is past the workspace; clamped, the sum cannot wrap.
        swa_base=compressed_capacity + jnp.minimum(swa_starts[:-1], swa_capacity),
        query_start_loc=rows.query_start_loc,
        query_pos=rows.seq_lens_causal - 1,
        seq_lens=rows.request_lens,
        gather_lens=gather_lens,
        row_to_request=rows.row_to_request,
        overflow=overflow,
        compress_ratio=compress_ratio,
        window=spec.window,
        topk=topk,
        selected=selected,
    )


def _compressed_slots(pages: jax.Array, lengths: jax.Array, entries: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Slots `[capacity]` of each request's first `lengths` entries, concatenated; starts `[B + 1]`."""
    starts = exclusive_cumsum(lengths)
    request, entry = split_ragged(starts, capacity)
    return page_slot_or_minus_one(pages, request, entry, entries), starts
