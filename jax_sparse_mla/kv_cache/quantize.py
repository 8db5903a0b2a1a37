"""From float rows to the bytes of a layout and back, in exact arithmetic.

Scales are powers of two and are computed from the bits of float32. XLA turns `x / 448` into `x * (1 / 448)`, which
is off by one unit in the last place near powers of two, and a device's log2 is approximate. Rounding to bfloat16 uses
bits as well: XLA may drop a float32 -> bfloat16 -> float32 round trip, and its CPU backend flushes subnormal numbers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla._checks import FLOATS, ArgumentChecks
from jax_sparse_mla.kv_cache.layout import KVLayout

E4M3_MAX = 448.0  # 1.75 * 2^8, the largest float8_e4m3fn

# The largest number that a writer quantises. From 248 * 2^120 on (the largest bfloat16 is 255 * 2^120) a
# value rounds to 256 units of 2^120, which reads back as infinity; 240 is the next smaller e4m3 number.
MAX_QUANTISED = 240 * 2.0**120

_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
_MANTISSA_MASK = 0x007FFFFF
_MAGNITUDE_MASK = 0x7FFFFFFF
_IMPLICIT_ONE = 0x00800000
_MANTISSA_OF_1_75 = 0x00600000
_F32_INF = 0x7F800000
_F32_NAN = 0x7FC00000
_BF16_INF = 0x7F80
_UE8M0_NAN = 255


def float32_bits(x: jax.Array) -> jax.Array:
    """The bits of float32 numbers, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def bits_to_float32(bits: jax.Array) -> jax.Array:
    """The float32 numbers of int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def bfloat16_bits(bits: jax.Array) -> jax.Array:
    """float32 bits (int32) rounded to the nearest bfloat16, ties to even: its bits, int32 in [0, 65535]."""
    high = lax.shift_right_logical(bits, 16)
    # To add before the shift would wrap for negative NaNs, so the low half is compared instead.
    low = bits & 0xFFFF
    round_up = (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1))
    is_nan = (bits & _MAGNITUDE_MASK) > _F32_INF
    return jnp.where(is_nan, high | 0x40, high + round_up.astype(jnp.int32))


def power_of_two(exponent: jax.Array) -> jax.Array:
    """float32 `2^exponent` for int32 exponents in [-126, 127], exact."""
    return bits_to_float32((exponent + _EXPONENT_BIAS) << _MANTISSA_BITS)


def scale_exponent(amax_bits: jax.Array, min_exponent: int) -> jax.Array:
    """`max(ceil(log2(amax / 448)), min_exponent)`, exact.

    With `amax = m * 2^k`, `1 <= m < 2`, and `448 = 1.75 * 2^8`, the ceiling is `k - 8`, plus 1 where
    `m > 1.75`.

    Args:
      amax_bits: the bits (int32) of non-negative float32 numbers.
      min_exponent: the floor, at least -126 (so that zeros and subnormal numbers need no care).

    Returns:
      int32. Infinity gives 120, as the largest finite numbers do.
    """
    exponent = lax.shift_right_logical(amax_bits, _MANTISSA_BITS) - _EXPONENT_BIAS
    above = (amax_bits & _MANTISSA_MASK) > _MANTISSA_OF_1_75
    return jnp.maximum(exponent - 8 + above.astype(jnp.int32), min_exponent)


def quantize_groups(x: jax.Array, group: int, min_exponent: int) -> tuple[jax.Array, jax.Array]:
    """Quantises groups of neighbouring values to float8_e4m3fn with one power-of-two scale each.

    Args:
      x: float32 `[..., d]`.
      group: values per scale; divides d.
      min_exponent: the smallest scale is `2^min_exponent`.

    Returns:
      `(values, exponents)`: float8_e4m3fn `[..., d]` and int32 `[..., d // group]`; a value stands for
      `value * 2^exponent`. Infinite values become +-448 units; a NaN stays one.
    """
    grouped = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax_bits = jnp.max(float32_bits(grouped) & _MAGNITUDE_MASK, axis=-1)
    exponents = scale_exponent(amax_bits, min_exponent)
    scaled = grouped * power_of_two(-exponents)[..., None]
    values = jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return values.reshape(x.shape), exponents


def quantize_ue8m0(x: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Quantises groups of values to float8_e4m3fn with UE8M0 scales, by DeepSeek-V4's rule.

    Per group, `s = max(amax, 1e-4) / 448` is rounded up to a power of two, `2^(byte - 127)`, and each value
    is `e4m3(clip(x * 2^(127 - byte), -448, 448))`, rounded to nearest even. SGLang's V4 writers do the same.

    Values from 248 * 2^120 on round up to 2^128, which reads back as infinity; `write_kv` clips them.

    Args:
      x: bfloat16 or float32 `[..., d]`; float32 is quantised as it is, not rounded to bfloat16 first.
      group: values per scale (64 in V4); must divide d. Static.

    Returns:
      `(values, scales)`: float8_e4m3fn `[..., d]` and uint8 `[..., d // group]`. An all-zero group has zeros
      and scale byte 105 (2^-22). Finite input never gives a NaN.

    Raises:
      TypeError: x is of another dtype, or group is no int.
      ValueError: x has no dimension, or group does not divide its last one.
    """
    check = ArgumentChecks("quantize_ue8m0")
    x = check("x", x, (None,) * check.rank("x", x), FLOATS)
    group = check.static_int("group", group, minimum=1)
    if x.ndim == 0:
        raise check.fail("x must have shape [..., d], got []")
    if x.shape[-1] % group:
        raise check.fail(f"group must divide the last dimension of x, {x.shape[-1]}, got {group}")
    return _quantize_ue8m0(x, group)


@functools.partial(jax.jit, static_argnames="group")
def _quantize_ue8m0(x: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    values, exponents = quantize_groups(x.astype(jnp.float32), group, KVLayout.V4_FP8.min_scale_exponent)
    return values, (exponents + _EXPONENT_BIAS).astype(jnp.uint8)


def encode_rows(layout: KVLayout, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bytes of K rows.

    Args:
      layout: the byte layout.
      kv: bfloat16 or float32 `[n, qk_dim]`. Rows are rounded to bfloat16 first; finite values that would
        round to infinity become the largest bfloat16, and what is quantised is clipped to `MAX_QUANTISED`.

    Returns:
      `(rows, scales)`: uint8 `[n, data_bytes]` and the UE8M0 footer scales, uint8 `[n, num_groups]` (`[n, 0]`
      for layouts without a footer).
    """
    bf16 = _finite_bfloat16_bits(kv)
    parts = []
    scales = jnp.zeros((kv.shape[0], 0), jnp.uint8)
    if layout.fp8_dim:
        x = jnp.clip(bits_to_float32(bf16[:, : layout.fp8_dim] << 16), -MAX_QUANTISED, MAX_QUANTISED)
        values, exponents = quantize_groups(x, layout.group, layout.min_scale_exponent)
        parts.append(lax.bitcast_convert_type(values, jnp.uint8))
        if layout.inline_scale_bytes:
            parts.append(_to_bytes(power_of_two(exponents)))
        else:
            scales = (exponents + _EXPONENT_BIAS).astype(jnp.uint8)
    parts.append(_to_bytes(bf16[:, layout.fp8_dim :].astype(jnp.uint16)))
    return jnp.concatenate(parts, axis=-1), scales


def decode_rows(layout: KVLayout, rows: jax.Array, scales: jax.Array) -> jax.Array:
    """The K rows of bytes, as bfloat16 bits: values are `bfloat16(float32(e4m3) * scale)`.

    Args:
      layout: the byte layout.
      rows: uint8 `[..., data_bytes]`.
      scales: UE8M0 footer scales, uint8 `[..., num_groups]`; ignored for layouts without a footer.

    Returns:
      uint16 `[..., qk_dim]`: bits, so that masking or moving them changes no NaN and no subnormal number.
    """
    fp8_end, scale_end = layout.fp8_dim, layout.fp8_dim + layout.inline_scale_bytes
    bf16 = _from_bytes(rows[..., scale_end:], jnp.uint16)
    if not layout.fp8_dim:
        return bf16
    batch = rows.shape[:-1]
    values = lax.bitcast_convert_type(rows[..., :fp8_end], jnp.float8_e4m3fn).astype(jnp.float32)
    values = values.reshape(*batch, layout.num_groups, layout.group)
    if layout.inline_scale_bytes:
        inline = _from_bytes(rows[..., fp8_end:scale_end], jnp.float32)
        bits = float32_bits(values * inline[..., None])
    else:
        bits = _times_ue8m0(values, scales[..., None])
    quantised = bfloat16_bits(bits).astype(jnp.uint16).reshape(*batch, layout.fp8_dim)
    return jnp.concatenate([quantised, bf16], axis=-1)


def _finite_bfloat16_bits(x: jax.Array) -> jax.Array:
    """As `bfloat16_bits` of bfloat16 or float32 numbers, but no finite number becomes infinite."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    bits = float32_bits(x)
    rounded = bfloat16_bits(bits)
    became_inf = ((rounded & 0x7FFF) == _BF16_INF) & ((bits & _MAGNITUDE_MASK) < _F32_INF)
    return rounded - became_inf.astype(jnp.int32)  # one below infinity is the largest finite number


def _times_ue8m0(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The float32 bits of `values * 2^(scales - 127)`, exact for subnormal numbers too.

    Byte 0 is 2^-127, itself subnormal, and byte 255 is NaN. A device that flushes subnormal numbers would lose them
    in a multiplication, so the exponent is added in integers.

    Args:
      values: float32 numbers that float8_e4m3fn holds: they have 4 significant bits and are not subnormal.
      scales: uint8, broadcast against values.
    """
    bits, scales = float32_bits(values), scales.astype(jnp.int32)
    magnitude, sign = bits & _MAGNITUDE_MASK, bits & ~_MAGNITUDE_MASK
    shift = scales - _EXPONENT_BIAS
    exponent = (magnitude >> _MANTISSA_BITS) + shift
    normal = magnitude + (shift << _MANTISSA_BITS)
    # At most 10 places (2^-9 * 2^-127): the 4 significant bits stay above the last place.
    subnormal = ((magnitude & _MANTISSA_MASK) | _IMPLICIT_ONE) >> jnp.clip(1 - exponent, 0, 31)
    product = jnp.where(exponent > 0, normal, subnormal)
    product = jnp.where(exponent > 254, _F32_INF, product)
    product = jnp.where(magnitude == 0, 0, product)
    product = jnp.where((magnitude > _F32_INF) | (scales == _UE8M0_NAN), _F32_NAN, product)
    return sign | product


def _to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of `[..., k]` numbers, little endian, uint8 `[..., k * itemsize]`."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def _from_bytes(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The inverse of `_to_bytes`."""
    itemsize = np.dtype(dtype).itemsize
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // itemsize, itemsize), dtype)
