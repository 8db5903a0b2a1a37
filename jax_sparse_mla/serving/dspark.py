"""DSpark's drafter of DeepSeek-V4: it drafts a block of tokens at once, and a table of tokens corrects one by one.

Its stages are window layers. Their keys of the text are not made of their own rows, but of what some of the model's
layers put out (the targets): the mean of the streams, those of all targets in a row, one product, a norm. The block
begins with the last token; noise tokens stand for the others. Each row of the block sees the last `window` tokens of
the text and the whole block. From its logits the tokens are chosen in order; a product of two small matrices adds to
the logits what the token before says.

The keys of a request are kept in the model's dtype, those of position p in row p modulo the window. Only tokens that
have been verified leave keys.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.layers import V4Rows
from jax_sparse_mla.serving.config import V4Config
from jax_sparse_mla.serving.decoder import ATTENTION, Streams, after_attention, block_input, embed, last_rows, logits
from jax_sparse_mla.serving.deepseek_v4 import project, project_out
from jax_sparse_mla.serving.layers import linear, matmul, rms_norm
from jax_sparse_mla.serving.params import LayerParams, ModelParams
from jax_sparse_mla.serving.sampling import greedy


@pytree_dataclass
class BlockDraft:
    """State of the drafter between steps; a row belongs to a request."""

    keys: jax.Array  # `[requests, stages, window, 512]`
    begins: jax.Array  # int32 `[requests]`, the first position of those kept that follow each other
    ends: jax.Array  # int32 `[requests]`, the position behind the last one


def new_state(config: V4Config, max_requests: int, dtype: jnp.dtype) -> BlockDraft:
    """Nothing kept."""
    shape = max_requests, len(config.block_drafter.targets), config.spec.window, config.spec.qk_dim
    begins, ends = (jnp.zeros(max_requests, jnp.int32) for _ in range(2))  # a step takes each array donated
    return BlockDraft(keys=jnp.zeros(shape, dtype), begins=begins, ends=ends)


def forget(draft: BlockDraft, rows: jax.Array) -> BlockDraft:
    """The state after rows have been given to new requests; rows past the last are none."""
    return dataclasses.replace(draft, ends=draft.ends.at[rows].set(0, mode="drop"))


def keep(
    config: V4Config,
    params: ModelParams,
    draft: BlockDraft,
    states: jax.Array,
    row_of: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
) -> BlockDraft:
    """The state after a step of the model.

    Args:
      states: `[T, targets * hidden]`, `ForwardOutput.states`.
      row_of, positions: int32 `[T]`, each row's request and position; rows past the last are padding.
      rows, starts, ends: int32 `[requests]`: the step's positions of each request, without rejected drafts.
    """
    window = config.spec.window
    x = rms_norm(linear(states, params.draft.target_proj), params.draft.target_norm, config.norm_eps)
    # The queries that come with them are not used.
    keys = jnp.stack([_project(config, stage, x, positions).kv for stage in params.draft.stages], 1)
    begin, before = (x.at[rows].get(mode="fill", fill_value=0) for x in (draft.begins, draft.ends))
    begin = jnp.where(starts <= before, jnp.minimum(jnp.maximum(begin, before - window), starts), starts)
    end = draft.ends.at[rows].set(ends, mode="drop")
    # Of positions that share a place the last one stays: a scatter has no order.
    behind = end.at[row_of].get(mode="fill", fill_value=0)
    kept = (positions < behind) & (positions >= behind - window)
    places = jnp.where(kept, row_of, draft.ends.shape[0])
    return BlockDraft(
        keys=draft.keys.at[places, :, positions % window].set(keys, mode="drop"),
        begins=draft.begins.at[rows].set(begin, mode="drop"),
        ends=end,
    )


def propose(
    config: V4Config,
    params: ModelParams,
    draft: BlockDraft,
    rows: jax.Array,
    tokens: jax.Array,
    starts: jax.Array,
    proposals: jax.Array,
) -> jax.Array:
    """Drafts int32 `[requests, K]`, the most likely tokens.

    Args:
      rows: int32 `[requests]`, of the state.
      tokens, starts: int32 `[requests]`, each request's last token and its position, where the model has not been yet.
      proposals: int32 `[requests, K]`, tokens that replace drafts, where not negative. A block has as many rows as it
        was trained with, or K.
    """
    drafter, window, (n, count) = config.block_drafter, config.spec.window, proposals.shape
    size = max(drafter.block, count)
    block = jnp.full((n, size), drafter.noise, jnp.int32).at[:, 0].set(tokens).reshape(-1)
    positions = (starts[:, None] + jnp.arange(size)).reshape(-1)
    kept, begins, ends = (x.at[rows].get(mode="fill", fill_value=0) for x in (draft.keys, draft.begins, draft.ends))
    text = starts[:, None] - window + jnp.arange(window)
    first, end = jnp.maximum(begins, ends - window), jnp.minimum(ends, starts)
    visible = (text >= first[:, None]) & (text < end[:, None])
    kept = jnp.take_along_axis(kept, (text % window)[:, None, :, None], 2)
    kept = jnp.where(visible[:, None, :, None], kept, 0)  # a weight of 0 leaves another request's NaN
    streams = embed(config, params, block)
    for i, stage in enumerate(params.draft.stages):
        streams, x, mixing = block_input(config, stage.weights, stage.norms, streams, block=ATTENTION)
        out = _attend(config, stage, x, positions, kept[:, i], visible)
        streams = after_attention(config, stage.weights, stage.norms, streams, out, mixing, block)
    rows = streams.joined()
    rows = rows.reshape(n, size, *rows.shape[1:])[:, :count]
    hidden, _ = last_rows(config, params.draft.head, Streams(rows.reshape(n * count, *rows.shape[2:])))
    of_block, drafts = logits(params, hidden).reshape(n, count, -1), []
    for i in range(count):
        from_before = matmul(params.draft.markov_rows[tokens], params.draft.markov_logits)
        chosen = greedy(of_block[:, i] + from_before)[0]
        tokens = jnp.where(proposals[:, i] >= 0, proposals[:, i], chosen)
        drafts.append(tokens)
    return jnp.stack(drafts, 1)


def _project(config: V4Config, stage: LayerParams, x: jax.Array, positions: jax.Array) -> V4Rows:
    return project(config, 0, stage.weights.attention, stage.norms.latent, x, positions)


def _attend(
    config: V4Config, stage: LayerParams, x: jax.Array, positions: jax.Array, kept: jax.Array, visible: jax.Array
) -> jax.Array:
    """A stage's attention to kept keys `[requests, window, 512]` where visible, and to the block; as x."""
    n, _, dim = kept.shape
    rows = _project(config, stage, x, positions)
    size = x.shape[0] // n
    keys = jnp.concatenate([kept, rows.kv.reshape(n, size, dim)], 1)
    q = rows.q.reshape(n, size, *rows.q.shape[1:])
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    options = {"precision": precision, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("nbhd,nkd->nbhk", q, keys, **options) * config.spec.softmax_scale
    seen = jnp.concatenate([visible, jnp.ones((n, size), bool)], 1)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    sink = stage.attention.attn_sink[:, None]
    largest = jnp.maximum(jnp.max(scores, -1, keepdims=True), sink)
    weights = jnp.exp(scores - largest)
    weights = weights / (jnp.sum(weights, -1, keepdims=True) + jnp.exp(sink - largest))
    out = jnp.einsum("nbhk,nkd->nbhd", weights.astype(x.dtype), keys, **options)
    out = out.reshape(n * size, *out.shape[2:]).astype(x.dtype)
    return project_out(config, 0, stage.weights.attention, out, positions)
