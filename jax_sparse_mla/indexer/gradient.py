"""The gradient of paged `index_logits` in queries and weights; a cache of bytes has none.

With s = q_h · k_j, the scale c_j of key j, and g the gradient of a logit that its row sees (0 of the others)

    logit = c_j · Σ_h w_h · relu(s)    dw_h = Σ_j g · c_j · relu(s)    dq_h = Σ_j g · c_j · w_h · [s > 0] · k_j

Only the arguments are saved, and scores are computed again. At a time there are some rows with a block of their pages
each, `CHUNK_BYTES` of keys and scores, and a few arrays of that size; beside them the results, in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import sharding
from jax_sparse_mla.indexer.logits import INDEX_DIM, as_index_keys, blocking, keys_of_runs
from jax_sparse_mla.launch.transforms import shared, varying_alike, varying_like

_RULE = sharding.PartitionRule((P("rows"), P("rows"), P(), P("rows"), P("rows"), P("rows")), (P("rows"), P("rows")))


@jax.jit
def index_logits_gradient(q, weights, index_cache, page_table, lengths, g) -> tuple[jax.Array, jax.Array]:
    """dq in the dtype of q and dweights, by plain JAX on every platform.

    Arguments as of `index_logits`, checked, and g float32 `[rows, P * page_size]`, of which only what stands at logits
    other than −inf is read. The gradient of a relu at 0 is 0. A row's gradient is NaN where it sees a key with a NaN.
    """
    return shared(_gradient, _RULE)(q, weights, index_cache, page_table, lengths, g)


def _gradient(q, weights, index_cache, page_table, lengths, g):
    keys = as_index_keys(index_cache)
    unit, (rows, heads, _), pages = keys.page_size, q.shape, page_table.shape[1]
    if 0 in (rows, heads, pages * unit, keys.num_pages):
        return jnp.zeros_like(q), jnp.zeros_like(weights)
    q, weights, page_table, lengths, g = varying_alike((q, weights, page_table, lengths, g))
    blocks, per_block, at_once = blocking(rows, heads, pages, unit, jnp.float32)
    width = per_block * unit
    over = blocks * per_block - pages
    table = jnp.pad(page_table, ((0, 0), (0, over)), constant_values=-1)
    g = jnp.pad(g, ((0, 0), (0, over * unit)))

    def of_row(row):
        q_row, w_row, length = q[row].astype(jnp.float32), weights[row], lengths[row]
        product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

        def add(block, sums):
            found = lax.dynamic_slice(table, (row, block * per_block), (1, per_block))[0]
            of_block = lax.dynamic_slice(g, (row, block * width), (1, width))[0]
            values, scales, valid = keys_of_runs(keys, unit, found, block * width, length, jnp.float32)
            values = jnp.where(valid[:, None], values, 0.0)  # others may be NaN
            of_block = jnp.where(valid, of_block * scales, 0.0)
            scores = product("hd,cd->hc", q_row, values)
            dw = jnp.sum(jnp.where(scores <= 0, 0.0, scores) * of_block, axis=1)
            ds = jnp.where(scores <= 0, 0.0, of_block * w_row[:, None])
            return sums[0] + product("hc,cd->hd", ds, values), sums[1] + dw

        zeros = jnp.zeros((heads, INDEX_DIM), jnp.float32), jnp.zeros(heads, jnp.float32)
        return lax.fori_loop(0, blocks, add, jax.tree.map(lambda x: varying_like(x, q), zeros))

    dq, dw = lax.map(of_row, jnp.arange(rows, dtype=jnp.int32), batch_size=min(rows, at_once))
    return dq.astype(q.dtype), dw
