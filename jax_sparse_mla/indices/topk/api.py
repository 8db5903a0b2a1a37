"""Top-k over indexer logits, and the transforms of its positions to slots of a cache or rows of a gathered KV."""

from __future__ import annotations

import enum
import functools
import os

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_sparse_mla.argument_checks import FLOATS, INT32, ArgumentChecks, Checks
from jax_sparse_mla.indices.lookup import add_or_minus_one, page_slot_or_minus_one
from jax_sparse_mla.indices.topk.route import engine_here
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.sharding import PartitionRule

_INT_MIN = -(2**31)
OUTSIDE_KEY = _INT_MIN  # below every column of the window
_NAN_KEY = _INT_MIN + 1  # below every number; the key of −inf is INT_MIN + 0x7fffff


class TopkTransform(enum.Enum):
    """How the positions of a top-k are mapped.

    PAGED: slots of the paged cache, through the request's page table. RAGGED: rows of the concatenated KV of
    this step's requests.
    """

    PAGED = "paged"
    RAGGED = "ragged"


def topk_positions(logits: jax.Array, lengths: jax.Array, topk: int, row_starts: jax.Array | None = None) -> jax.Array:
    """The positions of the `topk` largest logits of each row's window.

    Row i's window is the columns `row_starts[i] … row_starts[i] + lengths[i] − 1`; column `row_starts[i] + j`
    is position j. A row with `lengths[i] <= topk` gives 0 … length−1 and does not read its logits. Ties go to
    the lower position, −0.0 equals +0.0, NaN is below every number, and −inf inside the window counts as any
    other value.

    Args:
      logits: float32 or bfloat16 `[rows, columns]`.
      lengths: int32 `[rows]`, positions of each row; negative means 0.
      topk: how many positions, at least 1 (static).
      row_starts: int32 `[rows]`, the column of each row's position 0; None means 0 everywhere.

    Returns:
      int32 `[rows, topk]`: positions in ascending order, padded with −1 at the end. In a row longer than topk,
      positions whose column is outside the logits are never given.

    Raises:
      TypeError: an array of another dtype, a topk that is not an int.
      ValueError: shapes that do not agree, a topk below 1.
    """
    check = ArgumentChecks("topk_positions")
    logits, lengths, topk, row_starts = check_topk(check, logits, lengths, topk, row_starts)
    return _topk(logits, lengths, topk, backend=_named_backend(), row_starts=row_starts)


def _named_backend() -> str | None:
    """Read at each call, so that each choice has programs of its own."""
    return os.environ.get("JAX_SPARSE_MLA_TOPK_BACKEND") or None


def check_topk(check: Checks, logits, lengths, topk: int, row_starts) -> tuple:
    """The arguments of `topk_positions`, checked; JAX's and torch's functions share this."""
    logits = check("logits", logits, ("rows", "columns"), FLOATS)
    lengths = check("lengths", lengths, ("rows",), INT32)
    row_starts = check.optional("row_starts", row_starts, ("rows",), INT32)
    return logits, lengths, check.static_int("topk", topk, minimum=1), row_starts


@functools.partial(jax.jit, static_argnames=("topk", "page_size", "backend"))
def _topk(logits, lengths, topk, page_size=1, *, backend, **optional):
    """`topk_reference` of the same arguments, or the kernel that equals it: `backend`'s, or the router's choice."""

    def kernel(logits, lengths, optional):
        engine = engine_here(*logits.shape, topk, backend)
        return engine(logits, lengths, topk=topk, page_size=page_size, **optional)

    def plain(logits, lengths, optional):
        return topk_reference(logits, lengths, topk, page_size, **optional)

    if logits.size == 0:
        return plain(logits, lengths, optional)
    of_rows = {name: None if x is None else P("rows") for name, x in optional.items()}
    if optional.get("row_to_request") is not None:
        of_rows["page_table"] = P()  # any row may ask for any request's
    rule = PartitionRule((P("rows"), P("rows"), of_rows), P("rows"))
    return dispatch(kernel, plain, logits, lengths, optional, rule=rule)


def topk_reference(logits, lengths, topk, page_size=1, *, row_starts=None, **tables):
    """Positions, or with a page table slots, or with offsets rows of the concatenated KV, in plain JAX."""
    return indices_of(_topk_positions(logits, lengths, topk, row_starts), page_size, **tables)


def indices_of(positions, page_size, *, page_table=None, row_to_request=None, offsets=None):
    """Positions as slots with a page table, as rows of the concatenated KV with offsets."""
    if offsets is not None:
        return add_or_minus_one(positions, offsets[:, None])
    if page_table is not None:
        row = jnp.arange(positions.shape[0], dtype=jnp.int32) if row_to_request is None else row_to_request
        return page_slot_or_minus_one(page_table, row[:, None], positions, page_size)
    return positions


def _topk_positions(logits, lengths, topk, row_starts):
    rows, columns = logits.shape
    lengths = jnp.maximum(lengths, 0)[:, None]
    starts = jnp.zeros((rows, 1), jnp.int32) if row_starts is None else row_starts[:, None]

    selected = jnp.full((rows, topk), -1, jnp.int32)
    if count := min(topk, columns):
        column = jnp.arange(columns, dtype=jnp.int32)[None, :]
        # Unsigned: the distance to a hostile negative start may exceed INT_MAX, and that of a column before
        # the start wraps to more than INT_MAX, which no length reaches.
        distance = column.astype(jnp.uint32) - starts.astype(jnp.uint32)
        inside = distance < lengths.astype(jnp.uint32)
        keys, chosen = jax.lax.top_k(jnp.where(inside, ordered_keys(logits), OUTSIDE_KEY), count)
        positions = jnp.where(keys == OUTSIDE_KEY, -1, chosen - starts)
        selected = ascending(selected.at[:, :count].set(positions))

    rank = jnp.arange(topk, dtype=jnp.int32)[None, :]
    everything = jnp.where(rank < lengths, rank, -1)
    return jnp.where(lengths <= topk, everything, selected)


def ascending(positions: jax.Array) -> jax.Array:
    """Each row sorted, −1 last: as an unsigned number it is the largest."""
    unsigned = jnp.sort(jax.lax.bitcast_convert_type(positions, jnp.uint32), axis=-1)
    return jax.lax.bitcast_convert_type(unsigned, jnp.int32)


def ordered_keys(logits: jax.Array) -> jax.Array:
    """int32 keys in the order of the floats, by their bits: float comparison may flush denormals to 0."""
    if logits.dtype == jnp.bfloat16:
        bits = jax.lax.bitcast_convert_type(logits, jnp.uint16).astype(jnp.int32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    ordered = jnp.where(bits < 0, -magnitude - 1, magnitude)
    ordered = jnp.where(magnitude == 0, 0, ordered)  # −0.0 is +0.0
    return jnp.where(magnitude > 0x7F800000, _NAN_KEY, ordered)


def topk_transform(
    logits: jax.Array,
    lengths: jax.Array,
    topk: int,
    *,
    method: TopkTransform,
    page_table: jax.Array | None = None,
    page_size: int = 1,
    row_to_request: jax.Array | None = None,
    topk_indices_offset: jax.Array | None = None,
    row_starts: jax.Array | None = None,
) -> jax.Array:
    """`topk_positions`, mapped to the slots or rows that an attention kernel reads.

    PAGED maps position j of row i to the slot `page_table[r, j // page_size] * page_size + j % page_size`
    with `r = row_to_request[i]`, or i without it. RAGGED maps it to `j + topk_indices_offset[i]`. Arguments
    of the other method are ignored, so one call serves both methods.

    Every backend gives the same result: the chosen positions stand in ascending order, so that an attention over them
    adds in the same order in every run. `JAX_SPARSE_MLA_TOPK_BACKEND` names a backend; a program keeps the one with
    which it was traced.

    Args:
      logits: float32 or bfloat16 `[rows, columns]`.
      lengths: int32 `[rows]`, positions of each row; negative means 0.
      topk: how many indices, at least 1 (static).
      method: PAGED or RAGGED (static); `select_topk_transform` chooses it.
      page_table: int32 `[R, pages]`, the pages of each request (PAGED).
      page_size: tokens per page of `page_table`, at least 1 (static, PAGED).
      row_to_request: int32 `[rows]`, each row's row of `page_table`; without it there must be one per row
        (PAGED).
      topk_indices_offset: int32 `[rows]`, where each row's request starts in the concatenated KV (RAGGED).
      row_starts: int32 `[rows]`, the column of each row's position 0; None means 0 everywhere.

    Returns:
      int32 `[rows, topk]`, in the order of the positions, padded with −1; −1 also at the place of a position whose
      page is negative or not in the table, whose row is not in the table, or whose index does not fit int32.

    Raises:
      TypeError: an array of another dtype, a method that is not a TopkTransform.
      ValueError: shapes that do not agree, PAGED without `page_table`, RAGGED without `topk_indices_offset`.
    """
    check = ArgumentChecks("topk_transform")
    logits, lengths, topk, row_starts = check_topk(check, logits, lengths, topk, row_starts)
    if not isinstance(method, TopkTransform):
        raise TypeError(f"topk_transform: method must be TopkTransform.PAGED or TopkTransform.RAGGED, got {method!r}")
    transformed = functools.partial(_topk, logits, lengths, topk, backend=_named_backend(), row_starts=row_starts)

    if method is TopkTransform.RAGGED:
        if topk_indices_offset is None:
            raise check.fail(
                "topk_indices_offset is missing, and TopkTransform.RAGGED needs it; build_v32_metadata "
                "builds it in ForwardMode.EXTEND only, with an fp8 cache and "
                'prefill_backend="flashmla_sparse" (RAGGED mode); every other step, decode among them, must '
                "be TopkTransform.PAGED"
            )
        offset = check("topk_indices_offset", topk_indices_offset, ("rows",), INT32)
        return transformed(offsets=offset)

    if page_table is None:
        raise check.fail("page_table is missing, and TopkTransform.PAGED needs it")
    page_table = check("page_table", page_table, ("R", None), INT32)
    page_size = check.static_int("page_size", page_size, minimum=1)
    row_to_request = check.optional("row_to_request", row_to_request, ("rows",), INT32)
    rows, requests = check.dims["rows"], check.dims["R"]
    if row_to_request is None and rows != requests:
        raise check.fail(
            f"page_table has {requests} rows for {rows} rows of logits: give row_to_request, or one row each"
        )
    return transformed(page_size=page_size, page_table=page_table, row_to_request=row_to_request)
