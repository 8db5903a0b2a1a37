"""Weights as quantised checkpoints store them, and the products that read them.

A product multiplies values by scales when it reads them, so the device holds what the checkpoint holds.
`multiplied_out` defines what a weight stands for. Kernels read the bytes: in CUDA C++ for few rows, in Triton for more.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.kv_cache.quantize import bits_to_float32, e2m1_values, times_ue8m0
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.transforms import differentiated_as
from jax_sparse_mla.launch.triton_call import launching
from jax_sparse_mla.serving import quantised_cuda
from jax_sparse_mla.serving.config import WEIGHT_BLOCK


class WeightFormat(enum.Enum):
    """How many values a byte holds, and how many rows and columns of a checkpoint's weight share a scale."""

    FP4 = 2, 1, 32  # e2m1, the even value in the low nibble
    FP8 = 1, *WEIGHT_BLOCK  # e4m3

    @property
    def per_byte(self) -> int:
        return self.value[0]

    @property
    def rows(self) -> int:
        return self.value[1]

    @property
    def group(self) -> int:
        return self.value[2]


@pytree_dataclass
class Quantised:
    """A weight `[…, out, in]`. Values and scales have as many dimensions, so one PartitionSpec serves both.

    A scale is that of `rows` rows: one of FP4, up to 128 of FP8.
    """

    format: WeightFormat = static()
    dtype: np.dtype = static()  # of the numbers that it stands for, the model's
    values: jax.Array  # uint8 `[…, out, in / per_byte]`
    scales: jax.Array  # UE8M0 bytes, uint8, or float32, `[…, out / rows, ⌈in / group⌉]`

    @classmethod
    def stored(cls, form: WeightFormat, values: np.ndarray, scales: np.ndarray, dtype: Any) -> Quantised:
        """A checkpoint's weight on the device.

        Args:
          values: uint8 `[…, out, in / per_byte]`.
          scales: UE8M0 bytes, uint8, or float32, `[…, ⌈out / form.rows⌉, ⌈in / group⌉]`.
          dtype: of the numbers that the weight stands for.
        """
        rows = math.gcd(form.rows, values.shape[-2])  # a last block that is cut short divides the scales' rows
        if rows < form.rows:
            scales = np.repeat(scales, form.rows // rows, axis=-2)[..., : values.shape[-2] // rows, :]
        return cls(format=form, dtype=np.dtype(dtype), values=jax.device_put(values), scales=jax.device_put(scales))

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-1], self.values.shape[-1] * self.format.per_byte

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def rows(self) -> int:
        """How many rows share a scale."""
        return self.values.shape[-2] // self.scales.shape[-2]

    @property
    def kind(self) -> tuple:
        """What weights have in common that can be joined."""
        return self.format, self.dtype, self.scales.dtype

    def __getitem__(self, index: Any) -> Quantised:
        """Of leading dimensions."""
        return jax.tree.map(lambda x: x[index], self)

    def with_rows(self, rows: int) -> Quantised:
        """The same weight, with a scale for so many rows, which divide those of now."""
        if rows == self.rows:
            return self
        return dataclasses.replace(self, scales=jnp.repeat(self.scales, self.rows // rows, axis=-2))

    def part(self, start: int, stop: int) -> Quantised:
        """Rows from `start` to `stop` of `[out, in]`."""
        rows = math.gcd(self.rows, start, stop)
        scales = self.with_rows(rows).scales[start // rows : stop // rows]
        return dataclasses.replace(self, values=self.values[start:stop], scales=scales)

    def divides(self, axis: int, count: int) -> bool:
        """Whether an axis can be cut in so many equal parts, with its scales."""
        units = {self.ndim - 2: self.rows, self.ndim - 1: self.format.group}
        return self.shape[axis] % (count * units.get(axis, 1)) == 0


@pytree_dataclass
class JoinedRows:
    """Weights of one input whose outputs stand one behind the other, where one array cannot hold them."""

    parts: list[Any]


Weight: TypeAlias = jax.Array | Quantised | JoinedRows


def join_rows(weights: Sequence[Weight]) -> Weight:
    """Weights `[…, out, in]`, one behind the other along `out`: in one array, or one of each kind in a row."""
    runs = [
        _join(list(run))
        for _, run in itertools.groupby(weights, lambda x: x.kind if isinstance(x, Quantised) else None)
    ]
    return runs[0] if len(runs) == 1 else JoinedRows(parts=runs)


def in_groups(weight: jax.Array | Quantised, groups: int) -> jax.Array | Quantised:
    """The weight `[groups * out, in]` as `[groups, out, in]`."""
    if isinstance(weight, Quantised):
        weight = weight.with_rows(math.gcd(weight.rows, weight.shape[0] // groups))
    return jax.tree.map(lambda x: x.reshape(groups, -1, x.shape[-1]), weight)


def _join(weights: list[Any]) -> jax.Array | Quantised:
    if isinstance(weights[0], Quantised):
        rows = math.gcd(*(x.rows for x in weights))
        weights = [x.with_rows(rows) for x in weights]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-2) if len(parts) > 1 else parts[0], *weights)


def multiplied_out(weight: Weight) -> jax.Array:
    """`[…, out, in]` in the weight's dtype; an array is itself.

    A number is the float32 product of value and scale, rounded once. FP4 and FP8 times a power of two are exact in
    bfloat16 where the product is a normal number; a float32 scale rounds the product by up to 2^-9 of it.
    """
    if isinstance(weight, JoinedRows):
        return jnp.concatenate([multiplied_out(part) for part in weight.parts], axis=-2)
    return _multiplied_out(weight) if isinstance(weight, Quantised) else weight


@jax.jit
def _multiplied_out(weight: Quantised) -> jax.Array:
    """One matrix after the other, so that nothing larger than one is held in between."""
    if weight.ndim > 2:
        return lax.map(_multiplied_out, weight)
    is_fp4, columns = weight.format is WeightFormat.FP4, weight.shape[-1]
    codes = e2m1_values(weight.values) if is_fp4 else lax.bitcast_convert_type(weight.values, jnp.float8_e4m3fn)
    scales = jnp.repeat(jnp.repeat(weight.scales, weight.rows, axis=-2), weight.format.group, axis=-1)[:, :columns]
    values = codes.astype(jnp.float32)
    if weight.scales.dtype == jnp.uint8:
        return bits_to_float32(times_ue8m0(values, scales)).astype(weight.dtype)
    return (values * scales).astype(weight.dtype)


def kernel_serves(x: jax.Array, weight: Weight) -> bool:
    """Whether a kernel can take a product of these rows: bfloat16, and whole groups of FP8's scales."""
    fits = isinstance(weight, Quantised) and x.dtype == weight.dtype == jnp.bfloat16
    return fits and weight.shape[-1] % WeightFormat.FP8.group == 0 and x.shape[0] > 0


def takes_swiglu(gate_up: jax.Array, weight: Weight, *which: jax.Array, **static: Any) -> bool:
    """Whether `stored_product` computes the SwiGLU of its rows, `gated`."""
    if not isinstance(weight, Quantised) or not gate_up.dtype == weight.dtype == jnp.bfloat16 or not gate_up.shape[0]:
        return False
    return quantised_cuda.chosen(gate_up, weight, *which, gated=True, **static) is not None


def stored_product(plain: Callable[..., jax.Array], x: jax.Array, weight: Quantised, *which: jax.Array, **static: Any):
    """A kernel of `quantised_cuda` or `quantised_triton.product` on GPUs, elsewhere `plain(x, weight, *which)`, whose
    derivatives it has. Rows that name experts may share those of x, as many in turn each.
    """

    def kernel(x: jax.Array, *others: Any) -> jax.Array:
        if product := quantised_cuda.chosen(x, weight, *which, **static):
            return product(x, *jax.tree.leaves(others))
        if which and not static.get("sizes"):
            x = jnp.repeat(x, which[0].shape[0] // x.shape[0], axis=0)
        if weight.format is WeightFormat.FP4:  # even values first
            x = x.reshape(x.shape[0], -1, 2).swapaxes(1, 2).reshape(x.shape)
        return launching("serving.quantised_triton.product", **static)(x, *others)

    return differentiated_as(functools.partial(dispatch, kernel, plain), plain)(x, weight, *which)
