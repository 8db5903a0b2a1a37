"""The logits of keys in one piece, as training has them, and their gradient: blocks of rows and columns go through.

With s = q_h · k_j and g the gradient of a logit that its row sees (0 of the others)

    logit = Σ_h w_h · relu(s)        ds  = g · w_h · [s > 0]
    dw_h  = Σ_j g · relu(s)          dq_h = Σ_j ds · k_j        dk_j = Σ_rows Σ_h ds · q_h

Nothing but the arguments is saved: scores are computed again. At a time there are at most `CHUNK_BYTES` of the scores
of all heads, and a few arrays of that size; beside them a gradient takes its results, in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.indexer.keys import INDEX_DIM, IndexFormat, quantize_fp8
from jax_sparse_mla.indices.lookup import INT_MAX
from jax_sparse_mla.launch.transforms import varying_alike, varying_like

# Bytes of float32 scores of a block, `rows · heads · columns`; and its columns at most.
CHUNK_BYTES = 32 << 20
MAX_COLUMNS = 1024


def contiguous_index_logits(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    row_starts: jax.Array,
    lengths: jax.Array,
    *,
    fp8: bool = False,
) -> jax.Array:
    """The indexer's logits of keys in one piece, with a gradient in q, weights and keys: for its training.

    `logits[t, j] = Σ_h relu(q_h · k_j) * weights[t, h]` of the keys that row t sees, as `index_logits` computes it of
    paged ones. The logits are the largest array: no `[rows, heads, columns]` is made, neither here nor for the
    gradient, and nothing but the arguments is kept for it. It is plain JAX on every platform; blocks in which no row
    sees a key are left out. The gradient of a sum of many rows repeats to the bit.

    Args:
      q: bfloat16 or float32 `[rows, heads, 128]`.
      weights: float32 `[rows, heads]`, as in `index_logits`.
      keys: bfloat16 or float32 `[n, 128]`, of the dtype of q; those of several sequences one behind the other. Keys
        that a row sees must be finite.
      row_starts: int32 `[rows]`, the first key that each row sees, as `topk_transform` takes it; outside `[0, n)` the
        row sees those that are in it.
      lengths: int32 `[rows]`, how many keys it sees: in a causal sequence one more than the row's position in it.
      fp8: queries and keys are rounded to FP8 as serving rounds them (`quantize_index_q`, `write_index_k`); the
        gradient is that of the rounded ones, and passes the rounding as it is (straight-through) (static).

    Returns:
      float32 `[rows, n]`: column j is key j; −inf where the row does not see it.

    Raises:
      TypeError: a wrong dtype, `fp8` that is no bool.
      ValueError: shapes that do not agree.
    """
    check = ArgumentChecks("contiguous_index_logits")
    q = check("q", q, ("rows", "heads", INDEX_DIM), FLOATS)
    weights = check("weights", weights, ("rows", "heads"), FLOAT32)
    keys = check("keys", keys, ("n", INDEX_DIM), (q.dtype,))
    row_starts, lengths = (
        check(name, x, ("rows",), INT32) for name, x in (("row_starts", row_starts), ("lengths", lengths))
    )
    if not isinstance(fp8, bool):
        raise TypeError(f"contiguous_index_logits: fp8 must be a static bool, got {type(fp8).__name__}")
    return _of_checked(q, weights, keys, row_starts, lengths, fp8=fp8)


@functools.partial(jax.jit, static_argnames="fp8")
def _of_checked(q, weights, keys, row_starts, lengths, *, fp8):
    if 0 in (len(q), len(keys)):
        return jnp.full((q.shape[0], keys.shape[0]), -jnp.inf, jnp.float32)
    if not fp8:
        return _logits(*varying_alike((q, weights, keys, row_starts, lengths)))
    q, q_scale = _rounded(q)
    keys, k_scale = _rounded(keys)
    return _logits(*varying_alike((q, weights * q_scale, keys, row_starts, lengths))) * k_scale


@jax.custom_vjp
def _rounded(x):
    """FP8 values in the dtype of x, and their scales."""
    values, scale = quantize_fp8(x, IndexFormat.FP8)
    return values.astype(x.dtype), scale


def _rounded_forward(x):
    values, scale = _rounded(x)
    return (values, scale), scale


def _rounded_backward(scale, cotangents):
    g, _ = cotangents  # a scale is none of what is trained
    return ((g.astype(jnp.float32) / scale[..., None]).astype(g.dtype),)


_rounded.defvjp(_rounded_forward, _rounded_backward)


@jax.custom_vjp
def _logits(q, weights, keys, row_starts, lengths):
    def block(logits, rows_at, columns_at, of_rows, keys, seen):
        def scored():
            return jnp.where(seen, jnp.sum(_relu(_scores(of_rows[0], keys)) * of_rows[1][..., None], 1), -jnp.inf)

        def unseen():
            return varying_like(jnp.full(seen.shape, -jnp.inf, jnp.float32), logits)

        return lax.dynamic_update_slice(logits, lax.cond(jnp.any(seen), scored, unseen), (rows_at, columns_at))

    empty = jnp.zeros((q.shape[0], keys.shape[0]), jnp.float32)
    return _over_blocks(block, empty, q, weights, keys, row_starts, lengths)


def _save(*arguments):
    return _logits(*arguments), arguments


def _pull(arguments, g):
    q, weights, keys, row_starts, lengths = arguments
    keys = jnp.where(_seen_by_any(keys.shape[0], row_starts, lengths)[:, None], keys, 0)  # others may be NaN

    def block(gradients, rows_at, columns_at, of_rows, keys, seen):
        def added():
            q, weights = of_rows
            dq, dw, dk = gradients
            scores = _scores(q, keys)
            g_block = jnp.where(seen, lax.dynamic_slice(g, (rows_at, columns_at), seen.shape), 0.0)[:, None]
            ds = jnp.where(scores > 0, g_block * weights[..., None], 0.0).astype(q.dtype)
            return (
                _add(dq, _product("rhc,cd->rhd", ds, keys), rows_at),
                _add(dw, jnp.sum(g_block * _relu(scores), -1), rows_at),
                _add(dk, _product("rhc,rhd->cd", ds, q), columns_at),
            )

        return lax.cond(jnp.any(seen), added, lambda: gradients)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, weights, keys))
    dq, dw, dk = _over_blocks(block, zeros, *arguments[:2], keys, row_starts, lengths, once=True)
    return dq.astype(q.dtype), dw, dk.astype(keys.dtype), None, None


_logits.defvjp(_save, _pull)


def _over_blocks(block, carry, q, weights, keys, row_starts, lengths, *, once: bool = False):
    """`carry = block(carry, first row, first column, (q, weights), keys, seen)` for each block of rows and columns.

    The last block of either begins earlier where it is not filled. `once`: what it has again it does not see again.
    """
    (rows, heads, _), columns = q.shape, keys.shape[0]
    rows_of_block, of_block = block_sizes(rows, heads, columns)
    in_row = -(-columns // of_block)
    starts, ends = _windows(columns, row_starts, lengths)

    def turn(i, carry):
        row, column = i // in_row * rows_of_block, i % in_row * of_block
        rows_at, columns_at = jnp.minimum(row, rows - rows_of_block), jnp.minimum(column, columns - of_block)

        def of_rows(x):
            return lax.dynamic_slice_in_dim(x, rows_at, rows_of_block)

        at = columns_at + jnp.arange(of_block, dtype=jnp.int32)
        seen = (at >= of_rows(starts)[:, None]) & (at < of_rows(ends)[:, None])
        if once:
            new_rows = rows_at + jnp.arange(rows_of_block, dtype=jnp.int32) >= row
            seen &= new_rows[:, None] & (at >= column)
        keys_of_block = lax.dynamic_slice_in_dim(keys, columns_at, of_block)
        return block(carry, rows_at, columns_at, (of_rows(q), of_rows(weights)), keys_of_block, seen)

    carry = jax.tree.map(lambda x: varying_like(x, q), carry)
    return lax.fori_loop(0, -(-rows // rows_of_block) * in_row, turn, carry)


def block_sizes(rows: int, heads: int, columns: int) -> tuple[int, int]:
    """The rows and the columns of a block."""
    of_columns = min(columns, MAX_COLUMNS)
    return max(1, min(rows, CHUNK_BYTES // (4 * max(1, heads) * of_columns))), of_columns


def _scores(q, keys):
    return _product("rhd,cd->rhc", q, keys)


def _product(dims: str, a, b):
    return jnp.einsum(dims, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _relu(scores):
    return jnp.where(scores <= 0, 0.0, scores)  # a maximum of NaN and 0 may be 0 on a CPU


def _add(x, more, at):
    """x with `more` added to its first axis from `at` on."""
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, at, more.shape[0]) + more, at, 0)


def _windows(columns: int, row_starts, lengths):
    """The first column that each row sees, and the one behind the last; either may be outside."""
    starts = jnp.minimum(row_starts, columns)
    return starts, starts + jnp.clip(lengths, 0, INT_MAX - jnp.maximum(starts, 0))


def _seen_by_any(columns: int, row_starts, lengths):
    """bool `[columns]`, whether a row sees the key."""
    first, last = (jnp.clip(x, 0, columns) for x in _windows(columns, row_starts, lengths))
    steps = jnp.zeros(columns + 1, jnp.int32).at[first].add(1).at[last].add(-1)
    return jnp.cumsum(steps)[:-1] > 0
