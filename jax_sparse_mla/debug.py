"""Validates values, for debugging: says which row of an argument is wrong, and what it holds.

Arrays cannot raise under `jit`, so all other functions mask bad values. The functions here return nothing and work in
two ways.

* Called outside `jit` it raises a ValueError that lists the first bad entries.
* Inside a function transformed by `jax.experimental.checkify.checkify`, jitted or not, it reports the first
  bad entry in the error that `checkify` returns. Under a plain `jit` JAX refuses it.

>>> error, out = checkify.checkify(jax.jit(step))(batch)
>>> error.throw()
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.metadata.prefill_plan import PrefillPlan
from jax_sparse_mla.metadata.rows import check_batch as check_batch_shapes
from jax_sparse_mla.metadata.rows import expand_rows
from jax_sparse_mla.metadata.v4 import V4Metadata
from jax_sparse_mla.metadata.v32 import V32Metadata

_LISTED = 5  # bad entries that an eager error lists


def check_indices(indices: jax.Array, num_slots: int, *, topk_length: jax.Array | None = None) -> None:
    """Attention indices: each scanned one is −1 or one of `num_slots` slots, and lengths fit the width.

    Args:
      indices: int32 `[..., topk]`.
      num_slots: slots of the cache (rows of kv in a prefill).
      topk_length: int32, the leading axes of indices or the first of them; columns from it on are not
        scanned.

    Raises:
      ValueError: an index out of range, a length outside `[0, topk]`.
    """
    check = ArgumentChecks("check_indices")
    num_slots = check.static_int("num_slots", num_slots, minimum=0)
    indices = check("indices", indices, (None,) * max(1, check.rank("indices", indices)), INT32)
    topk = indices.shape[-1]
    scanned = jnp.ones(indices.shape, bool)
    if topk_length is not None:
        leading = indices.shape[:-1][: check.rank("topk_length", topk_length)]
        length = check("topk_length", topk_length, leading, INT32)
        bad = (length < 0) | (length > topk)
        _require("check_indices", "topk_length", length, bad, f"outside [0, topk={topk}]")
        scanned = jnp.arange(topk) < length.reshape(length.shape + (1,) * (indices.ndim - length.ndim))
    bad = scanned & ((indices < -1) | (indices >= num_slots))
    _require("check_indices", "indices", indices, bad, f"neither -1 nor below num_slots={num_slots}")


def check_slots(slots: jax.Array, num_slots: int) -> None:
    """Slots to write to or to gather: each is −1 (skipped) or below `num_slots`.

    Args:
      slots: int32, any shape.
      num_slots: slots of the cache.

    Raises:
      ValueError: a slot out of range.
    """
    check = ArgumentChecks("check_slots")
    num_slots = check.static_int("num_slots", num_slots, minimum=0)
    slots = check("slots", slots, (None,) * check.rank("slots", slots), INT32)
    bad = (slots < -1) | (slots >= num_slots)
    _require("check_slots", "slots", slots, bad, f"neither -1 nor below num_slots={num_slots}")


def check_batch(batch: ForwardBatch, tables: RequestTables) -> None:
    """A step's values: finds those that the metadata builders would mask or report as overflow.

    Padding requests (`seq_lens` 0) and padding rows may hold anything else. It validates

    * `seq_lens`: not negative, and no longer than the request table's rows and `max_seq_len` (with the drafts
      in TARGET_VERIFY);
    * `extend_lens` (EXTEND): within `[0, seq_lens]`, in all no more than the rows of the batch;
    * `req_pool_indices`: rows of the request table;
    * `out_cache_loc`: slots of the pool, if `full_to_swa` tells its size; else only that they are not negative;
    * the last entry of `full_to_swa`: −1. It stands for "no slot"; without it the pool's last slot is taken for none.

    Raises:
      ValueError: a value out of range.
    """
    check = ArgumentChecks("check_batch")
    if not isinstance(tables, RequestTables):
        raise TypeError(f"check_batch: tables must be a RequestTables, got {type(tables).__name__}")
    batch = check_batch_shapes(check, batch)
    req_to_token = check("tables.req_to_token", tables.req_to_token, (None, None), INT32)
    full_to_swa = check.optional("tables.full_to_swa", tables.full_to_swa, (None,), INT32)
    max_requests, max_len = req_to_token.shape

    def require(field, bad, what):
        _require("check_batch", f"batch.{field}", getattr(batch, field), bad, what)

    drafts = batch.num_draft_tokens if batch.mode is ForwardMode.TARGET_VERIFY else 0
    longest = min(max_len, batch.max_seq_len) - drafts
    in_use = batch.seq_lens > 0
    and_drafts = f" less {drafts} draft tokens" if drafts else ""
    require("seq_lens", batch.seq_lens < 0, "negative")
    require(
        "seq_lens",
        in_use & (batch.seq_lens > longest),
        f"above max_seq_len={batch.max_seq_len} or the {max_len} columns of req_to_token{and_drafts}",
    )
    if batch.extend_lens is not None:
        num_rows = batch.out_cache_loc.shape[0]
        bad = (batch.extend_lens < 0) | (batch.extend_lens > jnp.maximum(batch.seq_lens, 0))
        require("extend_lens", bad, "outside [0, seq_lens]")
        total = jnp.cumsum(batch.extend_lens)  # of checked lengths; it may wrap only where they are absurd
        bad, what = (total > num_rows) | (total < 0), f"above the {num_rows} rows of out_cache_loc"
        _require("check_batch", "cumsum(batch.extend_lens)", total, bad, what)
    bad = (batch.req_pool_indices < 0) | (batch.req_pool_indices >= max_requests)
    require("req_pool_indices", in_use & bad, f"outside the {max_requests} rows of req_to_token")

    if full_to_swa is not None and full_to_swa.size:
        bad = (jnp.arange(full_to_swa.shape[0]) == full_to_swa.shape[0] - 1) & (full_to_swa != -1)
        what = "the last entry, which must be -1: full_to_swa is [pool + 1], the pool's slots and -1 behind them"
        _require("check_batch", "tables.full_to_swa", full_to_swa, bad, what)
    live = _live_rows(batch, tables)
    bad = batch.out_cache_loc < 0
    where = "negative"
    if full_to_swa is not None:
        pool = full_to_swa.shape[0] - 1
        bad |= batch.out_cache_loc >= pool
        where = f"outside the pool of {pool} slots"
    require("out_cache_loc", live & bad, where)


@jax.jit
def _live_rows(batch: ForwardBatch, tables: RequestTables) -> jax.Array:
    return expand_rows(batch, tables).live


def check_metadata(metadata: V4Metadata | V32Metadata | PrefillPlan) -> None:
    """The `overflow` flag of a builder's result, which says that something did not fit its static capacity.

    Raises:
      ValueError: the flag is set; the message names the longest row.
    """
    if isinstance(metadata, V4Metadata):
        name, lengths = "seq_lens_causal", metadata.seq_lens_causal
    elif isinstance(metadata, V32Metadata):
        name, lengths = "seqlens_expanded", metadata.seqlens_expanded
    elif isinstance(metadata, PrefillPlan):
        name, lengths = "seq_lens", metadata.seq_lens
    else:
        kind = type(metadata).__name__
        raise TypeError(f"check_metadata: metadata must be a V4Metadata, V32Metadata or PrefillPlan, got {kind}")
    lengths = jnp.append(lengths, 0)  # so that there is a longest row also where there is none
    longest = jnp.arange(lengths.shape[0]) == jnp.argmax(lengths)
    what = "the longest row, and the step overflows: raise max_seq_len, the capacities or out_cache_loc's length"
    _require("check_metadata", f"metadata.{name}", lengths, longest & metadata.overflow, what)


def _require(function: str, name: str, values: jax.Array, bad: jax.Array, what: str) -> None:
    """Raises or reports where `bad` (like `values`) holds: "function: name[3, 17] is 900, what"."""
    if bad.size == 0:
        return
    if not isinstance(bad, jax.core.Tracer):
        _raise_first(function, name, np.asarray(values), np.asarray(bad), what)
        return
    where = jnp.unravel_index(jnp.argmax(bad), bad.shape)
    subscript = ", ".join("{}" for _ in where)
    value = values[tuple(where)]
    checkify.check(~jnp.any(bad), f"{function}: {name}[{subscript}] is {{}}, {what}", *where, value)


def _raise_first(function: str, name: str, values: np.ndarray, bad: np.ndarray, what: str) -> None:
    where = np.argwhere(bad)
    if len(where) == 0:
        return
    listed = ", ".join(f"{name}{i.tolist()} is {values[tuple(i)]}" for i in where[:_LISTED])
    more = f" and {len(where) - _LISTED} more" if len(where) > _LISTED else ""
    raise ValueError(f"{function}: {listed}{more}, {what}")
