"""The same from torch: tensors cross over by DLPack without a copy; JAX owns the cache and updates it in place."""

import jax
import torch
from sparse_mla_torch import call, to_jax

import jax_sparse_mla as mla

spec = mla.DEEPSEEK_V32
write = jax.jit(mla.write_kv, donate_argnums=0)


def main() -> torch.Tensor:
    cache = mla.PagedKV.zeros(spec.kv_layout, num_pages=4, page_size=spec.page_size)
    kv = torch.randn(100, spec.qk_dim, dtype=torch.bfloat16)
    slots = torch.randperm(cache.num_slots)[:100].to(torch.int32)
    cache = write(cache, to_jax(slots), to_jax(kv))

    q = torch.randn(2, 1, spec.num_heads, spec.qk_dim, dtype=torch.bfloat16)
    indices = slots.repeat(2, 1, 1)  # [batch, q_len, topk]
    out, lse = call(mla.sparse_mla_decode, q, cache, indices, softmax_scale=spec.softmax_scale)
    print("out:", tuple(out.shape), out.dtype, "| lse:", tuple(lse.shape), lse.dtype)
    return out


if __name__ == "__main__":
    main()
