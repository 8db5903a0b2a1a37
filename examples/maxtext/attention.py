"""MaxText's DeepSeek-V4 and V3.2 attend to their selected keys alone: forward pass and gradient, nothing else changes.

    attention.install()      # before MaxText builds or traces a model; attention.uninstall() takes it back

MaxText 0.2.5 attends densely on GPUs and hides with masks what was not selected. Both models reach that attention by
one method, `AttentionOp.__call__`. The function here has its signature, turns the masks into indices and calls
`sparse_mla_prefill`. It takes training and whole sequences (`model_mode="train"`) of V4 with `head_dim=512`, and of
V3.2 with `use_mla_absorbed_mqa=True mla_naive_kvcache=False`; every other call goes to MaxText's own method.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from maxtext.common.common_types import MODEL_MODE_TRAIN, DecoderBlockType
from maxtext.layers import attention_op

import jax_sparse_mla as mla

_dense = attention_op.AttentionOp.__call__


def install() -> None:
    attention_op.AttentionOp.__call__ = _attend


def uninstall() -> None:
    attention_op.AttentionOp.__call__ = _dense


def _attend(self, query, key, value, decoder_segment_ids, inputs_positions, model_mode, *others, **options):
    """`[batch, length, heads, 512]` from query `[batch, length, heads, dim]`, which is scaled, and key of one head."""
    if model_mode != MODEL_MODE_TRAIN or not _served(self, key, **options):
        arguments = query, key, value, decoder_segment_ids, inputs_positions, model_mode, *others
        return _dense(self, *arguments, **options)
    rows, length, sinks = key[:, :, 0], key.shape[1], options.get("sinks")
    if self.is_absorbed_mqa:
        indices = _selected(options["indexer_mask"], self.config.indexer_topk)
    else:
        indices = _window(length, self.sliding_window_size, decoder_segment_ids)
        entries = options.get("compressed_kv")
        if entries is not None and entries.shape[1]:
            rows = jnp.concatenate([rows, entries[:, :, 0]], 1)
            most = _most_entries(self.config, options["compress_ratio"])
            columns = _selected(options["compressed_mask"][:, 0, 0], most)
            columns = jnp.where(columns < 0, -1, columns + length)
            indices = jnp.broadcast_to(indices, (*columns.shape[:2], indices.shape[-1]))
            indices = jnp.concatenate([columns, indices], -1)
    indices = jnp.broadcast_to(indices, (*query.shape[:2], indices.shape[-1]))
    sinks = jnp.full(query.shape[2], -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    if self.mesh.size == 1:
        return _by_kernel(query, rows, indices, sinks)
    batch, heads = self._logical_to_mesh_axes(("activation_batch_attn", "activation_heads"))
    shares = (P(batch, None, heads), P(batch), P(batch), P(heads))
    run = jax.shard_map(_by_kernel, mesh=self.mesh, in_specs=shares, out_specs=shares[0])
    return run(query, rows, indices, sinks)


def _served(self, key, *, indexer_mask=None, record_max_logits=False, **_):
    """Who asks for the largest logits asks for those of MaxText's attention."""
    deepseek4 = self.config.decoder_block is DecoderBlockType.DEEPSEEK4  # its layers of ratio 0 are LOCAL_SLIDING
    v4 = deepseek4 and key.shape[-1] == mla.DEEPSEEK_V4_FLASH.qk_dim
    v32 = self.is_absorbed_mqa and indexer_mask is not None and key.shape[-1] == mla.DEEPSEEK_V32.qk_dim
    return (v4 or v32) and not record_max_logits


def _most_entries(config, ratio):
    """How many compressed entries a row attends to; None: every one that its mask shows."""
    warm_up = config.indexer_loss_scaling_factor > 0 and not config.indexer_sparse_training
    return config.indexer_topk if ratio == 4 and config.use_indexer and not warm_up else None


def _selected(mask, most):
    """int32 `[batch, length, most]`: the columns that an additive mask `[batch, length, columns]` shows, padded by −1.
    Of more than `most`, which MaxText shows where scores tie, the first."""
    *shape, columns = mask.shape
    if most is None or most >= columns:
        return jnp.where(mask > -1, jnp.arange(columns, dtype=jnp.int32), -1)
    shown = (jax.lax.stop_gradient(mask) > -1).reshape(-1, columns)
    chosen = mla.topk_positions(shown.astype(jnp.float32), jnp.full(len(shown), columns, jnp.int32), most)
    chosen = jnp.where(jnp.take_along_axis(shown, chosen, 1), chosen, -1)  # topk < columns: no −1 among them
    return chosen.reshape(*shape, most)


def _window(length, window, segments):
    """int32 `[batch or 1, length, window]`: the latest tokens of each row's own document, padded with −1."""
    columns = jnp.arange(length, dtype=jnp.int32)[:, None] - jnp.arange(window, dtype=jnp.int32)
    if segments is None:
        return jnp.maximum(columns, -1)[None]
    same = segments[:, jnp.maximum(columns, 0)] == segments[:, :, None]
    return jnp.where(same & (columns >= 0), columns, -1)


def _by_kernel(query, rows, indices, sinks):
    """Sequences one after the other: their rows are a workspace, in which `indices` count from their own sequence."""
    batch, count = rows.shape[:2]
    first = count * jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    indices = jnp.where(indices < 0, -1, indices + first)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (query, rows, indices)]
    out, _, _ = mla.sparse_mla_prefill(*flat, softmax_scale=1.0, attn_sink=sinks)
    return out.reshape(*query.shape[:3], -1)
