"""The gradient of prefill on SM90 by `kernels_cuda/sparse_backward/`, as XLA calls it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla.attention.backend import GRADIENT_BACKENDS, GradientArrays
from jax_sparse_mla.launch import build, tvm


def backward(execute: Any, arrays: GradientArrays, *, softmax_scale: float) -> tuple[jax.Array, jax.Array]:
    """dq, and dkv in float32 `[num_keys, qk_dim]`, whose last bits differ from run to run.

    Raises:
      TypeError: an array of another dtype, whose memory the kernel would read as its own.
    """
    del execute  # TVM FFI launches it
    q, kv, indices, lengths, grad, lse, factor, offset, _ = arrays
    dtypes = {"bfloat16": (q, kv, grad), "int32": (indices, lengths), "float32": (lse, factor, offset)}
    for dtype, members in dtypes.items():
        if wrong := [str(x.dtype) for x in members if x is not None and x.dtype != dtype]:
            raise TypeError(f"sparse_backward: {dtype} is wanted, got {', '.join(wrong)}")
    arrays = q, kv, indices, lengths, grad, lse, factor, offset
    operands = [x for x in arrays if x is not None]
    buffers = iter(map(tvm.Buffer, range(len(operands) + 2)))
    arguments = [None if x is None else next(buffers) for x in arrays] + [float(softmax_scale), *buffers]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv.shape, jnp.float32)]
    kernel = build.Binary(*GRADIENT_BACKENDS["hopper"].binaries["gradient"])
    dq, dkv = tvm.call(kernel, "sparse_backward", arguments, results, *operands)
    return dq, columns_in_order(dkv)


def columns_in_order(dkv: jax.Array) -> jax.Array:
    """`dkv`, `[num_keys, qk_dim]`, with its columns in order.

    The kernel leaves each 16 columns in the order of its `add_rows`: of four neighbours that a thread adds, the last
    two are columns 8 further.
    """
    return dkv.reshape(-1, 4, 2, 2).swapaxes(1, 2).reshape(dkv.shape)
