"""Products of few rows with quantised weights by `kernels_cuda/expert_rows/`, as XLA calls them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla.backend import SM80_AND_UP, TVM_FFI, Backend
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch import build, tvm

BACKEND = Backend(
    name="cuda",
    devices=(SM80_AND_UP,),
    device_names="SM80 and up",
    needs=(TVM_FFI,),
    binaries={"expert_rows": ("expert_rows", None)},
)

# Rows of a weight, on average, up to which this kernel serves and Triton's from there on: on an H200 it takes 0.6 of
# Triton's time with 6 rows of FP4. Of FP8 rows that are sorted by expert, Triton's takes as long or less.
MOST_ROWS = 8
MOST_NAMED = 1024  # rows that name an expert each, of one call; the kernel has room for so many
STEP_BYTES = 128  # of a weight's row, which it takes in whole steps


def serves(
    x: Any,
    weight: Any,
    which: Any = None,
    *,
    sizes: bool = False,
    dtype: str = "bfloat16",
    gated: bool = False,
    limit: float | None = None,
) -> bool:
    """Whether this kernel takes a product here that `quantised_triton.product` can take; from shapes alone.

    Args:
      x, which: arrays or their shapes, as `product` has them.
      weight: a `Quantised`.
    """
    del dtype, limit
    k, named = x.shape[1] // (2 if gated else 1), which is not None and not sizes
    rows = (which if named else x).shape[0]
    experts, device = weight.shape[0] if weight.ndim == 3 else 1, DeviceInfo.current()
    # Eight rows of x and the sums of sixteen warps, beside the named rows.
    shared = 8 * (2 * k + 64) + 16 * 640 + 4 * MOST_NAMED
    fits = k // weight.format.per_byte % STEP_BYTES == 0 and not weight.rows & (weight.rows - 1)
    if sizes and weight.format.per_byte == 1:
        return False
    if not fits or rows > MOST_ROWS * experts or (named and rows > MOST_NAMED) or shared > device.shared_memory_optin:
        return False
    return BACKEND.missing("expert_rows", "jax", device) is None


def product(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    which: jax.Array | None = None,
    *,
    sizes: bool = False,
    dtype: str = "bfloat16",
    gated: bool = False,
    limit: float | None = None,
) -> jax.Array:
    """As `quantised_triton.product`, of x in its own order.

    Where rows name experts, x may have fewer rows, a divisor of theirs: as many rows in turn take one of x.

    Args:
      gated: x is `[rows, 2 * K]`, and `layers.swiglu` of it, rounded once, is multiplied.
      limit: of `swiglu`, above 0.
    """
    rows = x.shape[0] if which is None or sizes else which.shape[0]
    operands = [x, values, scales, *([] if which is None else [which])]
    arguments = [*map(tvm.Buffer, range(3)), None if which is None else tvm.Buffer(3), sizes, gated, float(limit or 0)]
    arguments += [tvm.Buffer(len(operands))]
    out = jax.ShapeDtypeStruct((rows, values.shape[-2]), jnp.dtype(dtype))
    kernel = build.Binary(*BACKEND.binary("expert_rows", DeviceInfo.current()))
    return tvm.call(kernel, "expert_rows", arguments, [out], *operands)[0]
