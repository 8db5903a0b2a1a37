"""KPool of GLM-5.3: one index key for each pool of tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla._chunks import map_rows
from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.compressor.state import (
    CHUNK_BYTES,
    CompressorState,
    Tokens,
    carry,
    checked_state,
    window_sum,
    zero_after,
)


def pool_keys(
    state: CompressorState,
    k: jax.Array,
    score: jax.Array,
    *,
    positions: jax.Array,
    req_rows: jax.Array,
    ape: jax.Array,
    pool: int,
    num_requests: int,
) -> tuple[jax.Array, jax.Array, CompressorState]:
    """KPool (GLM-5.3): one index key for each `pool` tokens that this step's tokens complete.

    Per channel `key = Σ_t softmax_t(score_t + ape_t) * k_t` over the tokens t of a pool, `pool` tokens from a multiple
    of it on. Arithmetic is float32, and any chunking of a request's tokens over steps gives the same keys. transformers
    rounds the weights and the sum to the keys' dtype. It is plain JAX on every device.

    Args:
      state: the carried tokens: `CompressorState.zeros(..., ratio=pool, overlap=False)`.
      k, score: bfloat16 or float32 `[T, head_dim]`, after the keys' norm, and the gate's product; the rows of a request
        follow each other, their positions ascending by one.
      positions: int32 `[T]`, each token's position in its request; negative on padding rows (canonical: −1).
      req_rows: int32 `[T]`, the row of each token's request in the state. A row outside the state makes the token a
        padding row. No two requests of a step may share one.
      ape: float32 `[pool, head_dim]`, added to the score of a token by `position % pool`.
      pool: tokens of a key, at least 1 (static).
      num_requests: the most requests that the rows may be of (static).

    Returns:
      `(keys, rows, state)`: float32 `[N, head_dim]`, int32 `[N]` and the updated state, with
      `N = min(T, T // pool + num_requests)`. `rows[i]` is the row whose token completed key i, ascending; unused keys
      come last, have row −1 and are 0.

    Raises:
      TypeError: a wrong dtype, or state is no CompressorState.
      ValueError: shapes that do not agree with each other and with pool.
    """
    check = ArgumentChecks("pool_keys")
    if not isinstance(state, CompressorState):
        raise TypeError(f"pool_keys: state must be a CompressorState, got {type(state).__name__}")
    pool = check.static_int("pool", pool, minimum=1)
    tokens = Tokens(
        kv=check("k", k, ("T", "head_dim"), FLOATS),
        score=check("score", score, ("T", "head_dim"), FLOATS),
        positions=check("positions", positions, ("T",), INT32),
        req_rows=check("req_rows", req_rows, ("T",), INT32),
    )
    state = checked_state(check, state, "head_dim", pool)
    ape = check("ape", ape, (pool, "head_dim"), FLOAT32)
    num_requests = check.static_int("num_requests", num_requests, minimum=0)
    return _pool_keys(state, tokens, ape, pool=pool, num_requests=num_requests)


@functools.partial(jax.jit, static_argnames=("pool", "num_requests"))
def _pool_keys(state, tokens, ape, *, pool, num_requests):
    (num_tokens, head_dim), max_requests = tokens.kv.shape, state.max_requests
    num_keys = min(num_tokens, num_tokens // pool + num_requests)
    if num_keys == 0 or max_requests == 0:
        return jnp.zeros((num_keys, head_dim)), jnp.full((num_keys,), -1, jnp.int32), state
    live = (tokens.positions >= 0) & (tokens.req_rows >= 0) & (tokens.req_rows < max_requests)
    tokens = dataclasses.replace(tokens, req_rows=tokens.req_rows + state.first_of(max_requests))
    (rows,) = jnp.nonzero(live & (tokens.positions % pool == pool - 1), size=num_keys, fill_value=-1)
    rows = rows.astype(jnp.int32)
    at_most = CHUNK_BYTES // (4 * 4 * pool * head_dim)
    keys = map_rows(lambda row: window_sum(state, tokens, ape, row, pool, 1), rows, at_most)
    carried = carry(state, tokens, live, zero_after(keys.astype(jnp.bfloat16)))
    return keys, rows, dataclasses.replace(state, kv=carried.kv, score=carried.score)
