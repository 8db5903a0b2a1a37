"""Decode steps of a DeepSeek-V4-Flash sliding-window layer in a JAX stack: one jitted step, the cache in place."""

from functools import partial

import jax
import jax.numpy as jnp

import jax_sparse_mla as mla

spec = mla.DEEPSEEK_V4_FLASH


@partial(jax.jit, donate_argnums=0)
def step(cache, q, kv, attn_sink, batch, tables):
    metadata = mla.build_v4_metadata(spec, batch, tables)  # once a step, shared by all layers
    cache = mla.write_kv(cache, metadata.swa_out_cache_loc, kv)
    indices, lengths = metadata.swa_page_indices[:, None], metadata.swa_topk_lengths
    out, _ = mla.sparse_mla_decode(
        q[:, None], cache, indices, softmax_scale=spec.softmax_scale, topk_length=lengths, attn_sink=attn_sink
    )
    return cache, out[:, 0]


def main(num_steps: int = 4) -> jax.Array:
    cache = mla.PagedKV.zeros(spec.kv_layout, num_pages=3, page_size=spec.page_size)
    slots = spec.page_size + jnp.arange(2 * spec.page_size, dtype=jnp.int32)  # page 0 takes the padding rows' writes
    swa = jnp.append(jnp.arange(3 * spec.page_size, dtype=jnp.int32), -1)  # window slots are the pool's own here
    tables = mla.RequestTables(req_to_token=slots.reshape(2, -1), full_to_swa=swa)
    for i, key in enumerate(jax.random.split(jax.random.key(0), num_steps)):
        q = jax.random.normal(key, (2, spec.num_heads, spec.qk_dim), jnp.bfloat16)
        kv = jax.random.normal(key, (2, spec.qk_dim), jnp.bfloat16)
        batch = mla.ForwardBatch(
            mode=mla.ForwardMode.DECODE, max_seq_len=256, req_pool_indices=jnp.arange(2),
            seq_lens=jnp.full(2, i + 1), out_cache_loc=tables.req_to_token[:, i],
        )  # fmt: skip
        cache, out = step(cache, q, kv, jnp.zeros(spec.num_heads), batch, tables)
    print("compilations:", step._cache_size(), "| out:", out.shape, out.dtype)
    return out


if __name__ == "__main__":
    main()
