"""Attention metadata of DeepSeek-V4 and V4.1: sliding window and compressed caches, one entry per query row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.indices.lookup import take_or_minus_one
from jax_sparse_mla.indices.window import swa_slots_reference
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import executor
from jax_sparse_mla.metadata.batch import ForwardBatch, RequestTables, row_constants
from jax_sparse_mla.metadata.rows import QueryRows, bucket, check_step, expand_rows, request_pages, round_up
from jax_sparse_mla.models import LayerKind, ModelSpec

# FlashMLA's paged decode scans indices in blocks of 64.
INDEX_WIDTH_MULTIPLE = 64


@pytree_dataclass
class CompressedMetadata:
    """One compressed cache, of compress ratio r; all int32. Padding rows have length 0, entries −1, slot 0.

    Attributes:
      out_loc: `[T]`, the slot to which the row's compressed entry is written: `out_cache_loc // r` where the
        row completes a group (`seq_len % r == 0`), or −1 if the row then has no slot; 0, the dummy slot, where it
        completes none.
      lengths: `[T]`, complete entries before the row's end, `seq_len // r`; may be 0.
      topk_lengths: `[T]`, how many leading columns of the row's indices a kernel scans: `max(lengths, 1)`,
        where layers select (V4's ratio 4, V4.1's 1 and 2) also at most `index_topk`.
      page_indices: `[T, width]`, width a multiple of 64, slots of the compressed cache. Where layers select:
        all −1, each layer's indexer fills it. Elsewhere: entry j of the request in column j < lengths, −1
        behind them.
      pool_tokens, pool_requests: slots of the full pool and rows of `req_to_token`, against which the layers check
        their caches and states (static); `prepare_v4_step` fills them in, None elsewhere.
    """

    out_loc: jax.Array
    lengths: jax.Array
    topk_lengths: jax.Array
    page_indices: jax.Array
    pool_tokens: int | None = static(default=None)
    pool_requests: int | None = static(default=None)


def _of_ratio(ratio: int, field: str) -> property:
    def get(metadata: V4Metadata) -> jax.Array:
        if ratio not in metadata.compressed:
            raise AttributeError(f"V4Metadata: no compress ratio {ratio}; there are {sorted(metadata.compressed)}")
        return getattr(metadata.compressed[ratio], field)

    return property(get, doc=f"`compressed[{ratio}].{field}`, see CompressedMetadata.")


@pytree_dataclass
class V4Metadata:
    """The metadata that all layers of a V4 step share; rows are query tokens, all int32 but `overflow`.

    Padding rows have `seq_lens_causal` 0, position −1, every length 0, every page and index −1, every write
    slot 0.

    Attributes:
      seq_lens_causal: `[T]`, tokens that the row attends to, its own included.
      positions: `[T]`, `seq_lens_causal - 1`.
      row_to_request: `[T]`, the row's request; 0 on padding rows.
      query_start_loc: `[B + 1]`, each request's first row, and the end of the last one.
      page_table: `[T, P]`, the request's pages of 256 tokens, `P = ⌈min(max_seq_len, max_len) / 256⌉`; also
        those past the row's length; −1 where the request table holds no slot.
      out_cache_loc: `[T]`, the full-pool slot of the row's own token.
      swa_page_indices: `[T, ceil64(window)]`, slots of the sliding-window cache, newest first, −1 past the
        start.
      swa_topk_lengths: `[T]`, `min(seq_lens_causal, window)`.
      swa_out_cache_loc: `[T]`, the sliding-window slot of the row's own token; −1 where it has none.
      compressed: per nonzero compress ratio, its CompressedMetadata. `c4_*` and `c128_*` read the two of V4.
      overflow: bool scalar: a row is longer than the bucket (what the page table does not cover is −1), or an
        EXTEND batch has more rows than `out_cache_loc`.
    """

    seq_lens_causal: jax.Array
    positions: jax.Array
    row_to_request: jax.Array
    query_start_loc: jax.Array
    page_table: jax.Array
    out_cache_loc: jax.Array
    swa_page_indices: jax.Array
    swa_topk_lengths: jax.Array
    swa_out_cache_loc: jax.Array
    compressed: dict[int, CompressedMetadata]
    overflow: jax.Array

    c4_out_loc = _of_ratio(4, "out_loc")
    c4_lengths = _of_ratio(4, "lengths")
    c4_topk_lengths = _of_ratio(4, "topk_lengths")
    c4_page_indices = _of_ratio(4, "page_indices")
    c128_out_loc = _of_ratio(128, "out_loc")
    c128_lengths = _of_ratio(128, "lengths")
    c128_topk_lengths = _of_ratio(128, "topk_lengths")
    c128_page_indices = _of_ratio(128, "page_indices")


def build_v4_metadata(spec: ModelSpec, batch: ForwardBatch, tables: RequestTables) -> V4Metadata:
    """The metadata of a V4 step, built once and shared by all layers (formulas: SGLang's `DSV4AttnMetadata`).

    One compilation per mode, shapes and bucket; lengths, requests and slots are data.

    Args:
      spec: a model with a sliding window (static).
      batch: the step. DECODE: T = B. EXTEND: T is `out_cache_loc`'s length, rows past the last request's are
        padding. TARGET_VERIFY and DRAFT_EXTEND: T = B * num_draft_tokens. IDLE: all rows are padding.
      tables: the request tables, `full_to_swa` included.

    Returns:
      V4Metadata of T rows. A request whose pool index is not in the table keeps its lengths and has −1
      entries.

    Raises:
      TypeError: objects or arrays of another type, `tables.full_to_swa` missing.
      ValueError: a model without a window, or a batch whose shapes do not fit its mode.
    """
    check = ArgumentChecks("build_v4_metadata")
    batch, tables = check_step(check, spec, batch, tables)
    check_v4(check, spec, tables)
    return _build_v4(spec, batch, tables)


def check_v4(check: ArgumentChecks, spec: ModelSpec, tables: RequestTables) -> None:
    """Refuses a model without a window, ratios that cut a page, and tables without `full_to_swa`."""
    if not spec.windowed:
        raise check.fail(f"spec must be a model with a sliding window, got {spec.name} (window {spec.window})")
    for ratio in spec.compress_ratios:
        if ratio < 0 or (ratio > 0 and spec.page_size % ratio):
            raise check.fail(f"spec.compress_ratios must divide spec.page_size={spec.page_size}, got {ratio}")
    check("tables.full_to_swa", tables.full_to_swa, (None,), INT32)


@functools.partial(jax.jit, static_argnames=("spec",))
def _build_v4(spec: ModelSpec, batch: ForwardBatch, tables: RequestTables) -> V4Metadata:
    tokens = bucket(batch, tables)

    def kernel(batch, tables):
        from jax_sparse_mla.metadata.triton import v4

        mode, requests = row_constants(batch.mode, batch.num_draft_tokens), batch.seq_lens.shape[0]
        constants = v4.v4_constants(spec, mode, requests, tokens)
        return assemble_v4(v4.v4_metadata(executor(), constants, batch, tables, tokens=tokens))

    plain = functools.partial(build_v4_reference, spec)
    if not has_v4_kernel(spec) or not tokens or not all(x.size for x in jax.tree.leaves((batch, tables))):
        return plain(batch, tables)
    return dispatch(kernel, plain, batch, tables)


def assemble_v4(arrays: dict[str | tuple[int, str], Any]) -> V4Metadata:
    """The metadata of arrays by name: a field's, or a compress ratio and a field's of its CompressedMetadata."""
    fields, by_ratio = {}, {}
    for name, x in arrays.items():
        if isinstance(name, tuple):
            by_ratio.setdefault(name[0], {})[name[1]] = x
        else:
            fields[name] = x
    compressed = {ratio: CompressedMetadata(**of_ratio) for ratio, of_ratio in by_ratio.items()}
    return V4Metadata(compressed=compressed, **fields)


def has_v4_kernel(spec: ModelSpec) -> bool:
    """Whether the kernel serves the model's compress ratios: none, or one whose layers select by keys of a second
    compressor, and beside it one whose layers do not select."""
    kinds = [kind for kind in spec.kinds if kind.ratio]
    return not kinds or (len(kinds) <= 2 and [x.index_keys for x in kinds if x.selected] == ["compressor"])


def build_v4_reference(spec: ModelSpec, batch: ForwardBatch, tables: RequestTables) -> V4Metadata:
    """`build_v4_metadata` in plain JAX, of validated arguments."""
    rows = expand_rows(batch, tables)
    seq_lens = rows.seq_lens_causal
    positions = seq_lens - 1
    window = swa_slots_reference(positions, rows.req_rows, tables.req_to_token, tables.full_to_swa, window=spec.window)
    page_table = request_pages(tables, rows.req_rows, bucket(batch, tables), spec.page_size)
    return V4Metadata(
        seq_lens_causal=seq_lens,
        positions=positions,
        row_to_request=rows.row_to_request,
        query_start_loc=rows.query_start_loc,
        page_table=page_table,
        out_cache_loc=rows.out_cache_loc,
        swa_page_indices=_pad_columns(window, round_up(spec.window, INDEX_WIDTH_MULTIPLE)),
        swa_topk_lengths=jnp.minimum(seq_lens, spec.window),
        swa_out_cache_loc=jnp.where(rows.live, take_or_minus_one(tables.full_to_swa, rows.out_cache_loc), 0),
        compressed={kind.ratio: _compressed(spec, kind, rows, page_table) for kind in spec.kinds if kind.ratio},
        overflow=rows.overflow,
    )


def _compressed(spec: ModelSpec, kind: LayerKind, rows: QueryRows, page_table: jax.Array) -> CompressedMetadata:
    ratio, seq_lens, write_slots = kind.ratio, rows.seq_lens_causal, jnp.maximum(rows.out_cache_loc, -1)
    completes_group = rows.live & (seq_lens % ratio == 0)
    lengths = seq_lens // ratio
    topk_lengths = jnp.where(rows.live, jnp.maximum(lengths, 1), 0)
    if kind.selected:
        topk_lengths = jnp.minimum(topk_lengths, spec.index_topk)
        width = round_up(spec.index_topk, INDEX_WIDTH_MULTIPLE)
        page_indices = jnp.full((seq_lens.shape[0], width), -1, jnp.int32)
    else:
        page_indices = _all_entries(page_table, lengths, spec.page_size // ratio)
    return CompressedMetadata(
        # Floor division keeps −1 at −1.
        out_loc=jnp.where(completes_group, write_slots // ratio, 0),
        lengths=lengths,
        topk_lengths=topk_lengths,
        page_indices=page_indices,
    )


def _all_entries(page_table: jax.Array, lengths: jax.Array, entries: int) -> jax.Array:
    """Slots `page_table[j // entries] * entries + j % entries` of the entries j < lengths, −1 padded."""
    num_rows, pages = page_table.shape
    # No product wraps: a page is a slot divided by page_size >= entries.
    slots = page_table[:, :, None] * entries + jnp.arange(entries, dtype=jnp.int32)
    slots = jnp.where(page_table[:, :, None] >= 0, slots, -1).reshape(num_rows, pages * entries)
    scanned = jnp.arange(pages * entries, dtype=jnp.int32)[None, :] < lengths[:, None]
    return _pad_columns(jnp.where(scanned, slots, -1), round_up(pages * entries, INDEX_WIDTH_MULTIPLE))


def _pad_columns(indices: jax.Array, width: int) -> jax.Array:
    return jnp.pad(indices, ((0, 0), (0, width - indices.shape[1])), constant_values=-1)
