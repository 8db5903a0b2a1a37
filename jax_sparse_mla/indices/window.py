"""The sliding window (SWA): the slots that a query row reads, and those that a prefill chunk gathers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.indices.lookup import (
    INT_MAX,
    exclusive_cumsum,
    split_ragged,
    take_2d_or_minus_one,
    take_or_minus_one,
)
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import launching


def swa_slots(
    positions: jax.Array, req_rows: jax.Array, req_to_token: jax.Array, full_to_swa: jax.Array, *, window: int
) -> jax.Array:
    """The sliding-window slots that each query row reads, newest first, as SGLang's paged decode orders them.

    Column k of row t is `full_to_swa[req_to_token[req_rows[t], positions[t] - k]]`.

    Args:
      positions: int32 `[T]`, the absolute position of each query row; negative marks a padding row.
      req_rows: int32 `[T]`, each row's request, as a row of `req_to_token`.
      req_to_token: int32 `[max_requests, max_len]`, the full-pool slot of each position.
      full_to_swa: int32 `[pool + 1]`, the sliding-window slot of each full-pool slot; the last entry is −1.
      window: tokens of the window, at least 1 (static).

    Returns:
      int32 `[T, window]`; −1 past the start of the request, in padding rows, for a request or a position that
      the table does not have, and where a token has no sliding-window slot.

    Raises:
      TypeError: an array that is not int32, a window that is not an int.
      ValueError: shapes that do not agree, a window below 1.
    """
    check = ArgumentChecks("swa_slots")
    positions = check("positions", positions, ("T",), INT32)
    req_rows = check("req_rows", req_rows, ("T",), INT32)
    req_to_token = check("req_to_token", req_to_token, (None, None), INT32)
    full_to_swa = check("full_to_swa", full_to_swa, (None,), INT32)
    window = check.static_int("window", window, minimum=1)
    return swa_slots_reference(positions, req_rows, req_to_token, full_to_swa, window)


# Plain JAX serves on a GPU too, where XLA makes one or two kernels of it. On an H200 they take 2.1 µs for 64 rows of
# 128 and 7.0 for 8,192 rows; a Triton kernel took 2.2 and 7.8.
@functools.partial(jax.jit, static_argnames=("window",))
def swa_slots_reference(positions, req_rows, req_to_token, full_to_swa, window):
    """`swa_slots` of validated arguments."""
    newest = jnp.maximum(positions, -1)[:, None]  # INT_MIN − 1 would wrap to a valid position
    back = jnp.arange(window, dtype=jnp.int32)
    return take_or_minus_one(full_to_swa, take_2d_or_minus_one(req_to_token, req_rows[:, None], newest - back))


def swa_gather_plan(
    seq_lens: jax.Array,
    extend_lens: jax.Array,
    req_rows: jax.Array,
    req_to_token: jax.Array,
    full_to_swa: jax.Array,
    *,
    window: int,
    capacity: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The sliding-window slots that a prefill chunk gathers: of each request, the union of its rows' windows.

    Request b gathers its last `gather_lens[b] = min(seq_lens[b], extend_lens[b] + window - 1)` positions, in
    ascending order, from `offsets[b]` on (SGLang's rule). A request without tokens gathers nothing.

    Args:
      seq_lens: int32 `[B]`, tokens of each request, this chunk included; at most 0 marks a padding request.
      extend_lens: int32 `[B]`, query rows of each request in this chunk.
      req_rows: int32 `[B]`, each request's row of `req_to_token`.
      req_to_token: int32 `[max_requests, max_len]`, the full-pool slot of each position.
      full_to_swa: int32 `[pool + 1]`, the sliding-window slot of each full-pool slot; the last entry is −1.
      window: tokens of the window, at least 1 (static).
      capacity: length of `slots` (static).

    Returns:
      `(slots, first_pos, gather_lens, offsets)`, all int32. `slots` `[capacity]`: padded with −1, and −1
      where a position has no slot. `first_pos` `[B]`: the first position gathered, `seq_len - gather_len`.
      `gather_lens` `[B]`. `offsets` `[B + 1]`: exclusive sums of the gather lengths, never shortened by the
      capacity (they stop at INT_MAX): `offsets[-1] > capacity` tells that the last tokens did not fit.

    Raises:
      TypeError: an array that is not int32, a static argument that is not an int.
      ValueError: shapes that do not agree, a window below 1, a negative capacity.
    """
    check = ArgumentChecks("swa_gather_plan")
    seq_lens = check("seq_lens", seq_lens, ("B",), INT32)
    extend_lens = check("extend_lens", extend_lens, ("B",), INT32)
    req_rows = check("req_rows", req_rows, ("B",), INT32)
    req_to_token = check("req_to_token", req_to_token, (None, None), INT32)
    full_to_swa = check("full_to_swa", full_to_swa, (None,), INT32)
    window = check.static_int("window", window, minimum=1)
    capacity = check.static_int("capacity", capacity, minimum=0)
    return _swa_gather_plan(seq_lens, extend_lens, req_rows, req_to_token, full_to_swa, window, capacity)


@functools.partial(jax.jit, static_argnames=("window", "capacity"))
def _swa_gather_plan(seq_lens, extend_lens, req_rows, req_to_token, full_to_swa, window, capacity):
    args = seq_lens, extend_lens, req_rows, req_to_token, full_to_swa
    kernel = launching("metadata.triton.window.swa_gather_plan", window=window, capacity=capacity)
    plain = functools.partial(swa_gather_plan_reference, window=window, capacity=capacity)
    return dispatch(kernel, plain, *args) if capacity and all(x.size for x in args) else plain(*args)


def swa_gather_plan_reference(seq_lens, extend_lens, req_rows, req_to_token, full_to_swa, window, capacity):
    """`swa_gather_plan` in plain JAX."""
    seq_lens = jnp.maximum(seq_lens, 0)
    wanted = jnp.minimum(extend_lens, INT_MAX - (window - 1)) + (window - 1)
    gather_lens = jnp.clip(wanted, 0, seq_lens)
    first_pos = seq_lens - gather_lens
    offsets = exclusive_cumsum(gather_lens)

    request, index = split_ragged(offsets, capacity)
    position = jnp.where(request >= 0, take_or_minus_one(first_pos, request) + index, -1)
    full = take_2d_or_minus_one(req_to_token, take_or_minus_one(req_rows, request), position)
    return take_or_minus_one(full_to_swa, full), first_pos, gather_lens, offsets
