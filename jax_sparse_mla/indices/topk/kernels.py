"""The top-k kernels as JAX functions, the CUDA one and Triton's, for checked arguments; their records name them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indices.topk.route import TOPK_BACKENDS
from jax_sparse_mla.launch import build, tvm
from jax_sparse_mla.launch.triton_call import executor


def topk_triton(logits: jax.Array, lengths: jax.Array, *, topk: int, row_starts=None, **tables) -> jax.Array:
    """As `topk_cuda`."""
    from jax_sparse_mla.indices.topk import triton as kernels

    transform = kernels.Transform(**tables)
    return kernels.topk(executor(), logits, lengths, topk=topk, row_starts=row_starts, transform=transform)


def topk_cuda(
    logits, lengths, *, topk, row_starts=None, page_table=None, page_size=1, row_to_request=None, offsets=None
) -> jax.Array:
    """int32 `[rows, topk]`: positions; slots with a page table; rows of the concatenated KV with offsets."""
    operands = [logits, lengths]
    arguments = [tvm.Buffer(0), tvm.Buffer(1)]
    for x in (row_starts, page_table, row_to_request, offsets):
        arguments.append(None if x is None else tvm.Buffer(len(operands)))
        operands += [] if x is None else [x]
    arguments += [page_size, tvm.Buffer(len(operands))]
    out = jax.ShapeDtypeStruct((logits.shape[0], topk), jnp.int32)
    kernel = build.Binary(*TOPK_BACKENDS["cuda"].binary("topk", DeviceInfo.current()))
    return tvm.call(kernel, "topk", arguments, [out], *operands)[0]
