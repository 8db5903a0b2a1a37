"""KPool's selection: pools of tokens, expanded to the tokens that attention reads (GLM-5.3)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.indices.lookup import INT_MAX


def expand_pools(pools: jax.Array, lengths: jax.Array, pool: int) -> jax.Array:
    """The positions of selected pools' tokens, and behind them those of the unfinished pool at the end.

    A pool is `pool` tokens from a multiple of it on, and is selected whole. The last `length % pool` tokens are in none
    yet: every row attends to them.

    Args:
      pools: int32 `[rows, k]`, as `topk_positions(scores, lengths // pool, k)` gives them: −1 behind the last one.
      lengths: int32 `[rows]`, tokens that each row sees; negative means 0.
      pool: tokens of a pool, at least 1 (static).

    Returns:
      int32 `[rows, k * pool + pool - 1]`: positions in the order of the pools, −1 padded. Of a row of `n` pools
      `n * pool + length % pool` are valid. A token whose position does not fit int32 is −1.

    Raises:
      TypeError: an array of another dtype, a pool that is not an int.
      ValueError: shapes that do not agree, a pool below 1.
    """
    check = ArgumentChecks("expand_pools")
    pools = check("pools", pools, ("rows", None), INT32)
    lengths = check("lengths", lengths, ("rows",), INT32)
    return _expand_pools(pools, lengths, pool=check.static_int("pool", pool, minimum=1))


@functools.partial(jax.jit, static_argnames="pool")
def _expand_pools(pools, lengths, *, pool):
    rows, k = pools.shape
    lengths = jnp.maximum(lengths, 0)[:, None]
    in_pool = jnp.arange(pool, dtype=jnp.int32)
    tokens = pools[:, :, None]
    fits = (tokens >= 0) & (tokens <= (INT_MAX - in_pool) // pool)
    tokens = jnp.where(fits, jnp.where(fits, tokens, 0) * pool + in_pool, -1).reshape(rows, k * pool)
    tokens = jnp.pad(tokens, ((0, 0), (0, pool - 1)), constant_values=-1)
    # The tail stands right behind the last pool.
    behind = jnp.arange(tokens.shape[1], dtype=jnp.int32) - pool * jnp.sum(pools >= 0, axis=1, dtype=jnp.int32)[:, None]
    is_tail = (behind >= 0) & (behind < lengths % pool)
    return jnp.where(is_tail, lengths - lengths % pool + jnp.where(is_tail, behind, 0), tokens)
