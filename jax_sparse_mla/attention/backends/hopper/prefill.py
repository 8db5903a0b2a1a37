"""Prefill on SM90 by our kernels in Pallas Mosaic GPU: `attention/hopper/prefill/`, docs/internals/kernels-prefill.md.

One serves few heads, the other any number. JAX compiles them itself, when the program is compiled: a program
that uses them needs no torch, lowers on a machine without a GPU, exports through `jax.export` (the call is on its list
of stable ones), and shards under `shard_map`. Any head count and any topk; lengths and indices are data, so one
compilation serves a bucket.
"""

from __future__ import annotations

from functools import partial

import jax

from jax_sparse_mla.device import DeviceInfo

_H200_SM_COUNT = 132  # what a program is made for where there is no GPU; it is right on any other, too


@partial(jax.jit, static_argnames=("softmax_scale", "batch_invariant"))
def prefill(
    q: jax.Array,  # [q_len, heads, qk_dim], qk_dim 512 or 576
    kv: jax.Array,  # [kv_len, qk_dim]
    indices: jax.Array,  # [q_len, topk] rows of kv
    topk_length: jax.Array | None,  # [q_len]; None scans all columns
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out bfloat16 `[q_len, heads, v_dim]`, max_logits and lse float32 `[q_len, heads]`."""
    del batch_invariant  # a row's result never depends on the others
    from jax_sparse_mla.attention.hopper.prefill.few_heads.kernel import serves, sparse_prefill_few_heads
    from jax_sparse_mla.attention.hopper.prefill.kernel import sparse_prefill

    sm_count = DeviceInfo.current().sm_count or _H200_SM_COUNT
    attend = sparse_prefill_few_heads if serves(*q.shape[1:]) else sparse_prefill
    return attend(q, kv, indices, topk_length, attn_sink, softmax_scale=softmax_scale, sm_count=sm_count)
