"""The gradient of prefill on SM90 (`kernels_cuda/sparse_backward/`): what its kernel serves, and how XLA calls it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_sparse_mla.launch import build, tvm

QK_DIMS = (512, 576)


def serves(capability: tuple[int, int] | None, qk_dim: int) -> bool:
    """Whether the kernel takes calls of this dimension on such a device; the binary is built if need be."""
    return capability == (9, 0) and qk_dim in QK_DIMS and build.sparse_backward_module() is not None


def backward(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    lengths: jax.Array | None,
    grad: jax.Array,
    lse: jax.Array,
    factor: jax.Array,
    offset: jax.Array,
    *,
    softmax_scale: float,
) -> tuple[jax.Array, jax.Array]:
    """dq, and dkv in float32 `[num_keys, qk_dim]`, whose last bits differ from run to run.

    The arrays are those of `attention/triton/backward.py`.

    Raises:
      TypeError: an array of another dtype, whose memory the kernel would read as its own.
    """
    dtypes = {"bfloat16": (q, kv, grad), "int32": (indices, lengths), "float32": (lse, factor, offset)}
    for dtype, given in dtypes.items():
        if wrong := [str(x.dtype) for x in given if x is not None and x.dtype != dtype]:
            raise TypeError(f"sparse_backward: {dtype} is wanted, got {', '.join(wrong)}")
    arrays = q, kv, indices, lengths, grad, lse, factor, offset
    operands = [x for x in arrays if x is not None]
    places = iter(map(tvm.Buffer, range(len(operands) + 2)))
    arguments = [None if x is None else next(places) for x in arrays] + [float(softmax_scale), *places]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv.shape, jnp.float32)]
    dq, dkv = tvm.call(build.sparse_backward_module, "sparse_backward", arguments, results, *operands)
    return dq, columns_in_order(dkv)


def columns_in_order(dkv: jax.Array) -> jax.Array:
    """`dkv`, `[num_keys, qk_dim]`, with its columns in order.

    The kernel leaves each 16 columns in the order of its `add_rows`: of four neighbours that a thread adds, the last
    two are columns 8 further.
    """
    return dkv.reshape(-1, 4, 2, 2).swapaxes(1, 2).reshape(dkv.shape)
