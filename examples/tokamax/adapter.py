"""This library as an `implementation` of tokamax 0.0.17's `sparse_mla` and `lightning_indexer`.

    tokamax.sparse_mla(..., implementation=adapter.sparse_mla)

It shows that the two libraries mean the same operations. It is no way to deploy: tokamax keeps other cache bytes (int32
words, scales that repeat along the lanes), so every call decodes or lays out the whole cache anew.
"""

import jax
import jax.numpy as jnp
from tokamax._src.ops.lightning_indexer import reference as tokamax_indexer
from tokamax._src.ops.sparse_mla import reference as tokamax_attention

import jax_sparse_mla as mla


def sparse_mla(
    q, cache_kv_nope, cache_kv_rope, topk_indices, page_indices, cu_q_lens, distribution, attention_sinks,
    swa_accumution, swa_l, swa_m, *, sm_scale=1.0,
):  # fmt: skip
    """tokamax's arguments: the sliding window comes as its sums (numerator, denominator, maximum) and is merged."""
    rows = tokamax_attention.dequantize_kv_cache(cache_kv_nope, cache_kv_rope)
    page_size = rows.shape[1]
    request, alive = _requests(cu_q_lens, distribution[2], q.shape[0])
    pages = page_indices.reshape(cu_q_lens.shape[0] - 1, -1)
    page = jnp.take_along_axis(pages[request], jnp.clip(topk_indices // page_size, 0, pages.shape[1] - 1), -1)
    slots = jnp.where((topk_indices >= 0) & alive[:, None], page * page_size + topk_indices % page_size, -1)
    out, _, lse = mla.sparse_mla_prefill(q, rows.reshape(-1, rows.shape[-1]), slots, softmax_scale=sm_scale)
    window = swa_accumution.astype(jnp.float32) / swa_l[..., None]
    out, lse = mla.merge_attention([out.astype(jnp.float32), window], [lse, swa_m + jnp.log(swa_l)])
    return mla.apply_attn_sink(out, lse, attention_sinks.astype(jnp.float32)).astype(q.dtype)


def lightning_indexer(
    q, indexer_weights, cache_kv, seq_lens, page_indices, cu_q_lens, distribution, *, k, compression_ratio=1,
    kv_layout="head_along_sublane", cp_size=1, cp_rank=0, interleave_size=1, return_scores=False,
):  # fmt: skip
    """tokamax's arguments; it masks by query position // ratio, so the group of the query itself is visible."""
    if cp_size != 1 or q.shape[-1] != mla.DEEPSEEK_V4_FLASH.index_dim:
        raise NotImplementedError("lightning_indexer: served are one rank and index heads of 128 values")
    keys, scales = tokamax_indexer._dequantize_cache_kv(
        cache_kv, q.shape[-1], tokamax_indexer.KVLayout.parse(kv_layout)
    )
    num_pages = len(scales)
    cache = jnp.concatenate([_bytes(keys, num_pages), _bytes(scales.astype(jnp.float32), num_pages)], -1)
    request, alive = _requests(cu_q_lens, distribution[2], q.shape[0])
    last = seq_lens[request] - cu_q_lens[request + 1] + jnp.arange(q.shape[0])  # the query's own position
    visible = jnp.minimum(last // compression_ratio + 1, seq_lens[request] // compression_ratio)
    lengths = jnp.where(alive, visible, 0).astype(jnp.int32)
    pages = jnp.clip(page_indices.reshape(len(seq_lens), -1), 0, num_pages - 1)[request]
    logits = mla.index_logits(q, indexer_weights.astype(jnp.float32), cache, pages, lengths)
    chosen = mla.topk_positions(logits, lengths, k)
    if not return_scores:
        return chosen
    scores = jnp.where(chosen >= 0, jnp.take_along_axis(logits, jnp.maximum(chosen, 0), -1), -jnp.inf)
    return chosen, jax.lax.bitcast_convert_type(scores, jnp.int32)


def _requests(cu_q_lens, num_requests, num_rows):
    """int32 `[num_rows]`: the request of each row; and whether it belongs to one."""
    most, row = cu_q_lens.shape[0] - 1, jnp.arange(num_rows, dtype=jnp.int32)
    ends = jnp.where(jnp.arange(most) < num_requests, cu_q_lens[1:], jnp.iinfo(jnp.int32).max)
    request = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    return jnp.minimum(request, most - 1), row < cu_q_lens[num_requests]


def _bytes(x, num_pages):
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(num_pages, -1)
