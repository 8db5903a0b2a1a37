"""Sparse MLA in plain jax.numpy: the contract of the two attention functions, and the oracle of every kernel.

For each query row, with K the cached rows that its indices name and V their leading `v_dim` values:

    s_j   = softmax_scale · q · K_j                      over the valid j
    lse   = log Σ_j exp(s_j)                             −inf where no j is valid
    out   = Σ_j exp(s_j) V_j / (Σ_j exp(s_j) + exp(sink))    0 where no j is valid

An index is valid if it lies within the row's length (a span of columns, not a count) and names an existing row;
invalid ones are skipped, never read and never counted; an index given twice counts twice. All arithmetic is
float32. Runs on every platform; differentiable in q, kv and the sink, also on rows without a valid key and with
infinite sinks. Rows go through in chunks: beside the inputs and outputs, memory does not grow
with the number of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse_mla._chunks import map_rows
from jax_sparse_mla.attention.index_table import IndexTable
from jax_sparse_mla.attention.merge import sink_factor
from jax_sparse_mla.kv_cache.layout import workspace_layout
from jax_sparse_mla.kv_cache.rows import gather_rows_reference

# Bytes of one chunk of query rows: its gathered keys (bf16 and float32) and scores. Several chunks are a loop, and
# a loop's inputs exist in memory: of a single large chunk XLA's CPU compiler fuses all that makes the indices into the
# gather, and computes each index again for every one of its row's 512 values.
CHUNK_BYTES = 32 << 20


@partial(jax.jit, static_argnames=("softmax_scale", "assume_valid_indices", "batch_invariant"))
def decode(
    q: jax.Array,  # [batch, q_len, heads, qk_dim]
    tables: Sequence[IndexTable],  # one or two
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    assume_valid_indices: bool = False,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out `[batch, q_len, heads, v_dim]` in q's dtype, lse float32 `[batch, q_len, heads]`."""
    del assume_valid_indices  # every index is checked
    batch, q_len, heads, qk_dim = q.shape
    v_dim = tables[0].cache.layout.v_dim

    def one_row(row):
        q_row, slots_and_lengths = row
        keys, valid = [], []
        for (cache, _, _), (slots, length) in zip(tables, slots_and_lengths):
            keys.append(gather_rows_reference(cache, slots).astype(jnp.float32))
            valid.append(valid_columns(slots, length, cache.num_slots))
        out, _, lse = _attend(q_row, jnp.concatenate(keys), jnp.concatenate(valid), softmax_scale, v_dim, attn_sink)
        return out, lse

    flat = [table.rows()[1:] for table in tables]
    columns = sum(slots.shape[-1] for slots, _ in flat)
    rows, shape = (q.reshape(-1, heads, qk_dim), flat), (columns, heads, qk_dim)
    out, lse = _map_rows(one_row, rows, *shape, alone=batch_invariant)
    return out.reshape(batch, q_len, heads, v_dim), lse.reshape(batch, q_len, heads)


@partial(jax.jit, static_argnames=("softmax_scale", "batch_invariant"))
def prefill(
    q: jax.Array,  # [q_len, heads, qk_dim]
    kv: jax.Array,  # [kv_len, qk_dim]
    indices: jax.Array,  # [q_len, topk] rows of kv
    topk_length: jax.Array | None,  # [q_len]; None scans all columns
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out `[q_len, heads, v_dim]` in q's dtype, max_logits and lse float32 `[q_len, heads]`."""
    _, heads, qk_dim = q.shape
    v_dim = workspace_layout(qk_dim).v_dim

    def one_row(row):
        q_row, index, length = row
        valid = valid_columns(index, length, kv.shape[0])
        keys = kv[jnp.where(valid, index, 0)].astype(jnp.float32)
        return _attend(q_row, keys, valid, softmax_scale, v_dim, attn_sink)

    rows, shape = (q, indices, topk_length), (indices.shape[-1], heads, qk_dim)
    return _map_rows(one_row, rows, *shape, alone=batch_invariant)


def valid_columns(index: jax.Array, length: jax.Array | None, num_rows: int) -> jax.Array:
    """bool `[columns]`: inside the scanned span, and naming an existing row."""
    exists = (index >= 0) & (index < num_rows)
    return exists if length is None else exists & (jnp.arange(index.shape[0]) < length)


def _attend(
    q: jax.Array, keys: jax.Array, valid: jax.Array, softmax_scale: float, v_dim: int, attn_sink: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One query row: q `[heads, qk_dim]`, keys float32 `[columns, qk_dim]`, valid `[columns]`."""
    keys = jnp.where(valid[:, None], keys, 0.0)  # 0 · NaN is NaN: what is skipped must not be multiplied either
    scores = softmax_scale * jnp.einsum("hd,kd->hk", q.astype(jnp.float32), keys, precision="highest")
    # initial: max of no columns is −inf.
    top = jnp.max(jnp.where(valid, scores, -jnp.inf), axis=-1, initial=-jnp.inf)
    # Masked scores become the maximum, not −inf: exp stays finite and so does its gradient.
    shift = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))[:, None]
    weights = jnp.where(valid, jnp.exp(jnp.where(valid, scores, shift) - shift), 0.0)
    total = jnp.sum(weights, axis=-1)
    empty = ~jnp.any(valid)
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, shift[:, 0] + jnp.log(total))
    out = jnp.einsum("hk,kd->hd", weights / total[:, None], keys[:, :v_dim], precision="highest")
    if attn_sink is not None:
        out = out * sink_factor(lse, attn_sink)[:, None]
    return out.astype(q.dtype), top, lse


def _map_rows(function, rows, columns: int, heads: int, qk_dim: int, *, alone: bool):
    """Maps `function` over the leading axis in chunks of at most CHUNK_BYTES, recomputed in the backward pass.

    `alone`: row by row, for a product of several rows may be summed in another order than that of one.
    """
    if alone:
        count = len(rows[0])
        if count == 1:  # twice: XLA compiles a loop of one turn otherwise than a longer one
            rows = jax.tree.map(lambda x: jnp.concatenate([x, x]), rows)
        results = jax.lax.map(jax.checkpoint(function), rows)
        return jax.tree.map(lambda x: x[:count], results)
    return map_rows(jax.checkpoint(function), rows, rows_at_once(columns, heads, qk_dim))


def rows_at_once(columns: int, heads: int, qk_dim: int) -> int:
    """How many query rows CHUNK_BYTES hold the keys (bfloat16 and float32) and scores of."""
    return max(1, CHUNK_BYTES // (columns * (6 * qk_dim + 16 * heads) + 1))
