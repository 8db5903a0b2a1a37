"""The top-k kernels as JAX functions, the CUDA one and Triton's, for checked arguments; their records name them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch import build, tvm
from jax_sparse_mla.launch.triton_call import executor


def topk_triton(logits: jax.Array, lengths: jax.Array, **arguments) -> jax.Array:
    """As `topk_cuda`."""
    from jax_sparse_mla.indices.topk.triton import topk

    return topk(executor(), logits, lengths, **arguments)


@functools.cache
def _cuda_module():
    return build.topk_module(DeviceInfo.current().compute_capability)


def topk_cuda(
    logits: jax.Array,
    lengths: jax.Array,
    *,
    topk: int,
    row_starts: jax.Array | None = None,
    page_table: jax.Array | None = None,
    page_size: int = 1,
    row_to_request: jax.Array | None = None,
    offsets: jax.Array | None = None,
) -> jax.Array:
    """int32 `[rows, topk]`: positions; slots with a page table; rows of the concatenated KV with offsets."""
    operands = [logits, lengths]
    arguments = [tvm.Buffer(0), tvm.Buffer(1)]
    for x in (row_starts, page_table, row_to_request, offsets):
        arguments.append(None if x is None else tvm.Buffer(len(operands)))
        operands += [] if x is None else [x]
    arguments += [page_size, tvm.Buffer(len(operands))]
    out = jax.ShapeDtypeStruct((logits.shape[0], topk), jnp.int32)
    return tvm.call(_cuda_module, "topk", arguments, [out], *operands)[0]
