"""Products with quantised weights by CUDA kernels, as XLA calls them, and which of them takes a product.

`kernels_cuda/expert_rows/` multiplies few rows, `kernels_cuda/expert_tiles/` many rows that are sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla.backend import SM80_AND_UP, SM90, TVM_FFI, Backend
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch import build, tvm

FEW = Backend(
    name="cuda",
    devices=(SM80_AND_UP,),
    device_names="SM80 and up",
    needs=(TVM_FFI,),
    binaries={"expert_rows": ("expert_rows", None)},
)
MANY = Backend(
    name="cuda",
    devices=(SM90,),
    device_names="SM90",
    needs=(TVM_FFI,),
    binaries={"expert_tiles": ("expert_tiles", "90a")},
)

# Rows of a weight, on average, up to which the kernel of few rows serves, but for FP8 rows that are sorted by expert.
# On an H200 it was sooner than the kernel of many rows with 6 rows of FP4, and later with 12.
MOST_ROWS = 8
# FP8 rows of an expert, on average, from which on the kernel of many rows is sooner than Triton's.
FROM_ROWS = 24
MOST_NAMED = 1024  # rows that name an expert each, of one call; the kernel of few rows has room for so many
MOST_EXPERTS = 1024  # the kernel of many rows has room for their numbers
STEP_BYTES = 128  # of a weight's row, which both take in whole steps
OUT = 256  # rows of a weight in a tile of the kernel of many rows


def chosen(
    x: Any,
    weight: Any,
    which: Any = None,
    *,
    sizes: bool = False,
    dtype: str = "bfloat16",
    gated: bool = False,
    limit: float | None = None,
) -> Callable[..., jax.Array] | None:
    """The kernel, with these options, that takes a product here that `quantised_triton.product` can take; from shapes
    alone. None: Triton's does.

    Args:
      x, which: arrays or their shapes, as `few_rows` has them.
      weight: a `Quantised`.
      gated, limit: as `few_rows` has them; the kernel of many rows computes no SwiGLU.
    """
    k, named = x.shape[1] // (2 if gated else 1), which is not None and not sizes
    rows = (which if named else x).shape[0]
    experts, device = weight.shape[0] if weight.ndim == 3 else 1, DeviceInfo.current()
    if k // weight.format.per_byte % STEP_BYTES or weight.rows & (weight.rows - 1):
        return None
    # Eight rows of x and the sums of sixteen warps, beside the named rows.
    fits = 8 * (2 * k + 64) + 16 * 640 + 4 * MOST_NAMED <= device.shared_memory_optin and not (
        named and rows > MOST_NAMED
    )
    few = rows <= MOST_ROWS * experts and not (sizes and weight.format.per_byte == 1)
    if few and fits and FEW.missing("expert_rows", "jax", device) is None:
        return partial(few_rows, sizes=sizes, dtype=dtype, gated=gated, limit=limit)
    many = sizes and not gated and experts <= MOST_EXPERTS and weight.shape[-2] % 2 == 0
    many &= rows >= FROM_ROWS * experts or weight.format.per_byte == 2
    # Where rows that are spread over experts have fewer tiles than there are multiprocessors, Triton's smaller ones
    # keep more of these busy.
    many &= min(rows, experts) * -(-weight.shape[-2] // OUT) >= device.sm_count
    if many and MANY.missing("expert_tiles", "jax", device) is None:
        return partial(many_rows, dtype=dtype)
    return None


def few_rows(
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
    return _call(FEW, "expert_rows", [*arguments, tvm.Buffer(len(operands))], operands, rows, dtype)


def many_rows(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    sizes: jax.Array | None = None,
    *,
    dtype: str = "bfloat16",
) -> jax.Array:
    """As `quantised_triton.product`, of x in its own order, of rows that are sorted by expert, or of one weight.

    Args:
      sizes: int32 `[experts]`, how many rows each has, one expert's after the other's; None: the weight is `[N, K]`.
    """
    if values.shape[-1] < x.shape[-1]:
        x = in_lanes(x)
    operands = [x, values, scales, *([] if sizes is None else [sizes])]
    arguments = [*map(tvm.Buffer, range(3)), None if sizes is None else tvm.Buffer(3), tvm.Buffer(len(operands))]
    return _call(MANY, "expert_tiles", arguments, operands, x.shape[0], dtype)


def in_lanes(x: Any) -> Any:
    """x `[rows, K]`, its columns in the order in which `expert_tiles` multiplies FP4: each of the four lanes of a
    row has 64 neighbours of every 256, and numbers 16 bits apart in a word make a pair.

    Place 128 h + 8 i + 2 p + e of 256 has column 64 p + 32 h + 8 (i // 4) + 4 e + i % 4: p is the lane, i below 16.
    """
    return x.reshape(len(x), -1, 4, 8, 2, 4).transpose(0, 1, 3, 5, 2, 4).reshape(x.shape)


def _call(
    backend: Backend, name: str, arguments: list[Any], operands: list[jax.Array], rows: int, dtype: str
) -> jax.Array:
    out = jax.ShapeDtypeStruct((rows, operands[1].shape[-2]), jnp.dtype(dtype))
    return tvm.call(build.Binary(*backend.binary(name, DeviceInfo.current())), name, arguments, [out], *operands)[0]
