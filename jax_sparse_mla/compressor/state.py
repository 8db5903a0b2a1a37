"""The ring of tokens that each request carries between steps, and the weighted sum of a window of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import FLOAT32, ArgumentChecks
from jax_sparse_mla.kv_cache.pool import LayerPool, layer_shape
from jax_sparse_mla.models.kinds import INDEXED_RATIO

# Bytes of the windows that are compressed at the same time.
CHUNK_BYTES = 32 << 20


def row_halves(ratio: int, overlap: bool | None = None) -> int:
    """Halves of a row, and groups of a window: 2 where windows overlap; None: as in the published models."""
    return 2 if (ratio == INDEXED_RATIO if overlap is None else overlap) else 1


def compressor_window(ratio: int, overlap: bool | None = None) -> int:
    """Tokens of a group's window: twice the ratio where windows overlap, which None leaves to the ratio (8 for 4)."""
    return row_halves(ratio, overlap) * ratio


class CompressorArrays(NamedTuple):
    """The arrays of one `compress_kv`, under its names; `state_kv`, `state_score` and `score` may be None together."""

    state_kv: Any
    state_score: Any
    kv: Any
    score: Any
    positions: Any
    req_rows: Any
    query_start_loc: Any
    ape: Any
    norm_weight: Any
    inv_freq: Any


@pytree_dataclass
class CompressorState(LayerPool):
    """The last tokens of each request, as a ring: position p of a request lies at `[row, p % ring]`.

    It may hold the rings of several layers in one array each; `state.layer(i)` is the view of one, see `PagedKV`.

    Attributes:
      kv, score: float32 `[num_layers * max_requests, ring, coff * head_dim]`, `coff` 2 where windows overlap and 1
        otherwise; scores without ape.
      num_layers: how many layers' requests the arrays hold, one layer after the other (static).
      layer_index: the layer of a view; None for all of them (static).

    If all tokens of a request pass `compress_kv` or `pool_keys` from position 0 on, what an earlier request left in the
    row is never read. A request that starts later (a cached prefix) needs the ring of the request that it continues.
    """

    kv: jax.Array
    score: jax.Array
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)

    @classmethod
    def zeros(
        cls,
        max_requests: int,
        *,
        ratio: int,
        head_dim: int,
        ring: int | None = None,
        num_layers: int = 1,
        overlap: bool | None = None,
    ) -> CompressorState:
        """A state of zeros.

        Args:
          max_requests: rows, one per request that lives at a time.
          ratio: tokens per entry.
          head_dim: values of an entry.
          ring: tokens kept per request, at least the window; None is the window: `2 * ratio` with overlap, ratio
            otherwise. Where up to D tokens of a step may be rejected afterwards (speculative decoding) it
            must be at least `window + D`, so that rejected tokens do not replace those that the next step still
            needs; SGLang doubles it.
          num_layers: layers, each with rings of its own.
          overlap: whether windows overlap; None: those of ratio 4 do, as in V4. KPool's (`pool_keys`) never do.
        """
        check = ArgumentChecks("CompressorState.zeros")
        ratio = check.static_int("ratio", ratio, minimum=1)
        head_dim = check.static_int("head_dim", head_dim, minimum=1)
        coff = row_halves(ratio, overlap)
        window = coff * ratio
        ring = window if ring is None else check.static_int("ring", ring, minimum=window)
        shape = layer_shape(check, num_layers, ("max_requests", max_requests), ring, coff * head_dim)
        return cls(kv=jnp.zeros(shape, jnp.float32), score=jnp.zeros(shape, jnp.float32), num_layers=num_layers)

    @property
    def max_requests(self) -> int:
        """Rows of a layer."""
        return self.kv.shape[0] // self.num_layers


@pytree_dataclass
class Tokens:
    """This step's tokens; as in `compress_kv`."""

    kv: jax.Array
    score: jax.Array
    positions: jax.Array
    req_rows: jax.Array


def checked_state(check: ArgumentChecks, state: CompressorState, width: str, window: int) -> CompressorState:
    """The state with its arrays as jax arrays: of one layer, rows of `width` values, a ring of at least the window."""
    shape = "max_requests", "ring", width
    state = dataclasses.replace(
        state,
        kv=check("state.kv", state.kv, shape, FLOAT32),
        score=check("state.score", state.score, shape, FLOAT32),
    )
    state.check_view(check, "state", state.kv.shape[0])
    if check.dims["ring"] < window:
        raise check.fail(f"state must keep at least {window} tokens per request, got {check.dims['ring']}")
    return state


def window_sum(
    state: CompressorState, tokens: Tokens, ape: jax.Array, row: jax.Array, ratio: int, coff: int
) -> jax.Array:
    """The weighted sum over the window that ends at query row `row`; 0 for row −1. float32 `[head_dim]`."""
    ring, head_dim = state.kv.shape[1], state.kv.shape[2] // coff
    window = coff * ratio
    last = jnp.maximum(row, 0)
    request = jnp.clip(tokens.req_rows[last], 0, state.kv.shape[0] - 1)
    # The window's tokens, oldest first, by group; the first of two groups is the one before.
    back = jnp.arange(window - 1, -1, -1, dtype=jnp.int32).reshape(coff, ratio)
    position = tokens.positions[last] - back
    step_row = jnp.maximum(last - back, 0)
    # The row may be another request's or a padding row.
    in_step = (tokens.req_rows[step_row] == request) & (tokens.positions[step_row] == position)
    ring_slot = position % ring  # below position 0 it is in range as well, and masked below

    def gather(of_step, of_state):
        groups = []
        for group in range(coff):
            half = slice(group * head_dim, (group + 1) * head_dim)  # A of the group before, B of the last one
            from_step = of_step[step_row[group], half].astype(jnp.float32)
            from_state = of_state[request, ring_slot[group], half]
            groups.append(jnp.where(in_step[group][:, None], from_step, from_state))
        return jnp.concatenate(groups)  # [window, head_dim]

    exists = ((row >= 0) & (position >= 0)).reshape(window, 1)
    ape = ape.reshape(ratio, coff, head_dim).swapaxes(0, 1).reshape(window, head_dim)
    kv = jnp.where(exists, gather(tokens.kv, state.kv), 0.0)  # 0 · NaN is NaN: stale rows may hold anything
    score = jnp.where(exists, gather(tokens.score, state.score) + ape, -jnp.inf)
    top = jnp.max(score, axis=0)
    weight = jnp.exp(score - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weight, axis=0)
    return jnp.sum(weight * kv, axis=0) / jnp.where(total == 0, 1.0, total)


def zero_after(x: jax.Array) -> jax.Array:
    """A 0 (int32) that takes bfloat16 `x` to compute.

    Code that adds this 0 runs after x is known. XLA writes to a donated buffer in place only if all reads of the buffer
    provably come before; an optimization barrier is removed too early to prove that.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    return jnp.max(bits, initial=0) >> 16


def carry(state: CompressorState, tokens: Tokens, live: jax.Array, zero: jax.Array) -> CompressorState:
    """The state with the last `ring` tokens of each request of this step; not before `zero` is known."""
    max_requests, ring = state.kv.shape[:2]
    kept = live & ~_replaced_later(live, tokens.req_rows, ring)
    request = jnp.where(kept, tokens.req_rows, max_requests)  # out of range: dropped
    ring_slot = request + zero, tokens.positions % ring

    def write(old, new):
        return old.at[ring_slot].set(new.astype(jnp.float32), mode="drop")

    return CompressorState(kv=write(state.kv, tokens.kv), score=write(state.score, tokens.score))


def _replaced_later(live: jax.Array, req_rows: jax.Array, ring: int) -> jax.Array:
    """bool `[T]`: a later token of this step has the same place in the ring.

    Such a token must not be written, since it is not defined which of two writes to one place stays.
    """
    replaced = live[ring:] & (req_rows[ring:] == req_rows[:-ring])
    return jnp.pad(replaced, (0, live.shape[0] - replaced.shape[0]))
