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

from jax_sparse_mla.argument_checks import FLOATS, ArgumentChecks
from jax_sparse_mla.kv_cache.layout import KVLayout

E4M3_MAX = 448.0  # 1.75 * 2^8, the largest float8_e4m3fn
E2M1_MAX = 6.0

# Halfway between neighbouring e2m1 numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6, and whether the one above has the even code.
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
_E4M3_NAN = 0x7F
_E4M3_BIAS = 7

# The largest number that a writer quantises. From 248 * 2^120 on (the largest bfloat16 is 255 * 2^120) a
# value rounds to 256 units of 2^120, which reads back as infinity; 240 is the next smaller e4m3 number.
MAX_QUANTISED = 240 * 2.0**120

EXPONENT_BIAS = 127
MANTISSA_BITS = 23
MANTISSA_MASK = 0x007FFFFF
MAGNITUDE_MASK = 0x7FFFFFFF
MIN_NORMAL = 0x00800000  # also a mantissa's implicit bit
_MANTISSA_OF_1_75 = 0x00600000
F32_INF = 0x7F800000
_F32_NAN = 0x7FC00000
F32_ONE = 0x3F800000
F32_448 = 0x43E00000
_BF16_INF = 0x7F80
UE8M0_NAN = 255


def float32_bits(x: jax.Array) -> jax.Array:
    """The bits of float32 numbers, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def bits_to_float32(bits: jax.Array) -> jax.Array:
    """The float32 numbers of int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def _shifted(bits: jax.Array, places: int) -> jax.Array:
    """int32 bits moved to the right, zeros behind them; also where `jax_enable_x64` makes a Python number int64."""
    return lax.shift_right_logical(bits, jnp.int32(places))


def bfloat16_bits(bits: jax.Array) -> jax.Array:
    """float32 bits (int32) rounded to the nearest bfloat16, ties to even: its bits, int32 in [0, 65535]."""
    high = _shifted(bits, 16)
    # To add before the shift would wrap for negative NaNs, so the low half is compared instead.
    low = bits & 0xFFFF
    round_up = (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1))
    is_nan = (bits & MAGNITUDE_MASK) > F32_INF
    return jnp.where(is_nan, high | 0x40, high + round_up.astype(jnp.int32))


def divide(numerator: jax.Array, divisor: jax.Array | int) -> jax.Array:
    """The bits of the float32 quotient, rounded to nearest, of the bits of two positive normal numbers.

    Computed in integers: XLA turns a division by a constant into a product with its reciprocal, may reorder quotients,
    and does not round a division correctly on a GPU. Each is sometimes off by a unit in the last place, and a cache's
    bytes would then differ from those that torch and CUDA write.

    A quotient that is no normal number is 0 or infinity; a numerator that is none gives 0. An infinity or NaN on either
    side gives NaN.
    """
    divisor = jnp.asarray(divisor, jnp.int32)
    above, below = ((x & MANTISSA_MASK) | MIN_NORMAL for x in (numerator, divisor))
    smaller = (above < below).astype(jnp.int32)
    exponent = (numerator >> MANTISSA_BITS) - (divisor >> MANTISSA_BITS) + EXPONENT_BIAS - smaller
    # Both mantissas have 24 bits, and the quotient of `above * 2^smaller` lies in [1, 2). Long division finds 24 bits
    # after the first, 8 at a time because uint32 holds no more. The last one rounds: no quotient of two float32 numbers
    # is halfway between two others.
    below = below.astype(jnp.uint32)
    quotient, remainder = jnp.uint32(1), (above << smaller).astype(jnp.uint32) - below
    for _ in range(3):
        digits = (remainder << 8) // below
        quotient, remainder = (quotient << 8) + digits, (remainder << 8) - digits * below
    bits = ((exponent - 1) << MANTISSA_BITS) + ((quotient + 1) >> 1).astype(jnp.int32)
    bits = jnp.where((bits >= MIN_NORMAL) & (numerator >= MIN_NORMAL), bits, 0)
    bits = jnp.where(exponent > 254, F32_INF, bits)
    return jnp.where((numerator >= F32_INF) | (divisor >= F32_INF), _F32_NAN, bits)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """float32 `2^exponent` for int32 exponents in [-126, 127], exact."""
    return bits_to_float32((exponent + EXPONENT_BIAS) << MANTISSA_BITS)


def scale_exponent(amax_bits: jax.Array, min_exponent: int) -> jax.Array:
    """`max(ceil(log2(amax / 448)), min_exponent)`, exact, of the bits (int32) of non-negative float32 numbers.

    With `amax = m * 2^k`, `1 <= m < 2`, and `448 = 1.75 * 2^8`, the ceiling is `k - 8`, plus 1 where `m > 1.75`.
    The floor is at least -126, so that zeros and subnormal numbers need no care. Infinity gives 120, as the largest
    finite numbers do.
    """
    exponent = _shifted(amax_bits, MANTISSA_BITS) - EXPONENT_BIAS
    above = (amax_bits & MANTISSA_MASK) > _MANTISSA_OF_1_75
    return jnp.maximum(exponent - 8 + above.astype(jnp.int32), min_exponent)


def quantize_groups(x: jax.Array, group: int, min_exponent: int) -> tuple[jax.Array, jax.Array]:
    """Quantises each `group` of values of float32 `[..., d]` to float8_e4m3fn with a scale of `2^min_exponent` or more.

    Returns `(values, exponents)`, `[..., d]` and int32 `[..., d // group]`; a value stands for `value * 2^exponent`.
    Infinite values become +-448 units; a NaN stays one.
    """
    grouped, amax_bits = _groups(x, group)
    exponents = scale_exponent(amax_bits, min_exponent)
    return _to_e4m3(grouped * power_of_two(-exponents)[..., None]).reshape(x.shape), exponents


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
    return as_rounded(values), (exponents + EXPONENT_BIAS).astype(jnp.uint8)


def as_rounded(values: jax.Array) -> jax.Array:
    """FP8 numbers for whoever computes with them: on a GPU XLA drops a cast to FP8 and back, but across no barrier."""
    return lax.optimization_barrier(values)


def encode_rows(layout: KVLayout, kv: jax.Array, tensor_scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The bytes of K rows, bfloat16 or float32 `[n, qk_dim]`.

    Rows are rounded to bfloat16 first; finite values that would round to infinity become the largest bfloat16, and what
    is quantised is clipped to `MAX_QUANTISED`.

    Returns `(rows, scales)`: uint8 `[n, data_bytes]` and the footer scales, uint8 `[n, scale_bytes]` (`[n, 0]` for
    layouts without a footer).
    """
    bf16 = _finite_bfloat16_bits(kv)
    parts, scales = [], jnp.zeros((kv.shape[0], 0), jnp.uint8)
    if layout.quantised_dim:
        x = jnp.clip(bits_to_float32(bf16[:, : layout.quantised_dim] << 16), -MAX_QUANTISED, MAX_QUANTISED)
        if layout.has_tensor_scale:
            codes = _by_tensor_scale(x, tensor_scale)
        else:
            codes, scales = _WRITERS[layout.scales](x, layout.group, layout.least_exponent)
        parts.append(codes)
        if layout.inline_scale_bytes:
            parts.append(scales)
    parts.append(_to_bytes(bf16[:, layout.quantised_dim :].astype(jnp.uint16)))
    return jnp.concatenate(parts, axis=-1), scales if layout.footer_scale_bytes else scales[:, :0]


def _by_ue8m0(x: jax.Array, group: int, least: int) -> tuple[jax.Array, jax.Array]:
    """`(codes, scales)` of float32 `[..., d]`, uint8 as a row holds them; `least` is `KVLayout.least_exponent`'s."""
    values, exponents = quantize_groups(x, group, least)
    return _to_bytes(values), (exponents + EXPONENT_BIAS).astype(jnp.uint8)


def _by_float32(x: jax.Array, group: int, least: int | None) -> tuple[jax.Array, jax.Array]:
    """As `_by_ue8m0`, with float32 scales: powers of two, or `amax / 448` where `least` is None."""
    if least is not None:
        values, exponents = quantize_groups(x, group, least)
        return _to_bytes(values), _to_bytes(power_of_two(exponents))
    grouped, amax_bits = _groups(x, group)
    scales = divide(amax_bits, F32_448)
    # SGLang's has no floor: the scale of an all-zero group is 0, and 0 · (1 / 0) a NaN, which we do not make.
    inverse = bits_to_float32(jnp.where(scales == 0, 0, divide(F32_ONE, scales)))[..., None]
    # A CPU takes subnormal numbers for zeros, a GPU does not: the bytes must not depend on it.
    normal = (float32_bits(grouped) & MAGNITUDE_MASK) >= MIN_NORMAL
    values = jnp.where(normal, grouped * inverse, jnp.copysign(0.0, grouped))
    return _to_bytes(_to_e4m3(values).reshape(x.shape)), _to_bytes(bits_to_float32(scales))


def _by_e4m3(x: jax.Array, group: int, least: int) -> tuple[jax.Array, jax.Array]:
    """As `_by_ue8m0`: e2m1 values, two a byte, with e4m3 scales `clip(amax / 6, 2^least, 448)`, to nearest even.

    A group with a NaN has a NaN for its scale and codes of 0: e2m1 has none.
    """
    grouped, amax_bits = _groups(x, group)
    amax = bits_to_float32(jnp.minimum(amax_bits, F32_INF))
    # By multiplication: the quotient's e4m3 number for every bfloat16 amax, which tests go through.
    scales = jnp.clip(amax * np.float32(1 / E2M1_MAX), 2.0**least, E4M3_MAX).astype(jnp.float8_e4m3fn)
    is_nan, scales = amax_bits > F32_INF, _to_bytes(scales)
    # For bfloat16 x the products are exact and a quotient never rounds to a midpoint, so this is the quotient's code.
    codes = jnp.where(is_nan[..., None], 0, e2m1_codes(grouped, _scales_of_bytes(scales)[..., None]))
    return pack_e2m1(codes.reshape(x.shape)), jnp.where(is_nan, jnp.uint8(_E4M3_NAN), scales)


def e2m1_codes(x: jax.Array, units: jax.Array) -> jax.Array:
    """int32 codes of the e2m1 numbers nearest to `x / units` (float32), ties to the even code, at most ±6; −0 is 8."""
    magnitude, codes = jnp.abs(x), 0
    for midpoint, even_above in _E2M1_MIDPOINTS:
        above = magnitude >= units * midpoint if even_above else magnitude > units * midpoint
        codes += above.astype(jnp.int32)
    return codes | (_shifted(float32_bits(x), 31) << 3)


def pack_e2m1(codes: jax.Array) -> jax.Array:
    """uint8 `[..., d / 2]` of codes `[..., d]`: the even one in the low nibble."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).astype(jnp.uint8)


def _scales_of_bytes(scales: jax.Array) -> jax.Array:
    """The float32 numbers of positive e4m3 bytes. On bits: a GPU's compiler drops a cast to e4m3 and back again."""
    normal = (scales.astype(jnp.int32) + ((EXPONENT_BIAS - _E4M3_BIAS) << 3)) << (MANTISSA_BITS - 3)
    return jnp.where(scales < 8, scales.astype(jnp.float32) * 2.0**-9, bits_to_float32(normal))


def _by_tensor_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The bytes of `e4m3(x / scale)`, clipped to ±448; scale is a positive normal number."""
    bits = float32_bits(x)
    quotient = divide(bits & MAGNITUDE_MASK, float32_bits(scale)) | (bits & ~MAGNITUDE_MASK)
    return _to_bytes(_to_e4m3(bits_to_float32(quotient)))


_WRITERS = {"ue8m0": _by_ue8m0, "float32": _by_float32, "e4m3": _by_e4m3}


def decode_rows(
    layout: KVLayout, rows: jax.Array, scales: jax.Array, tensor_scale: jax.Array | None = None
) -> jax.Array:
    """The K rows of bytes, as bfloat16 bits: values are `bfloat16(float32(code) * scale)`.

    Rows are uint8 `[..., data_bytes]`, footer scales uint8 `[..., scale_bytes]`, ignored for layouts without a footer.
    The result is uint16 `[..., qk_dim]`: bits, so that masking or moving them changes no NaN and no subnormal number.
    """
    end, scale_end = layout.quantised_bytes, layout.quantised_bytes + layout.inline_scale_bytes
    bf16 = _from_bytes(rows[..., scale_end:], jnp.uint16)
    if not layout.quantised_dim:
        return bf16
    batch = rows.shape[:-1]
    values = e2m1_values(rows[..., :end]).astype(jnp.float32) if layout.fp4_dim else _e4m3_values(rows[..., :end])
    values = values.reshape(*batch, layout.num_groups, layout.group)
    if layout.has_tensor_scale:
        bits = float32_bits(values * tensor_scale)
    else:
        scales = scales if layout.footer_scale_bytes else rows[..., end : end + layout.scale_bytes]
        bits = _READERS[layout.scales](values, scales)
    quantised = bfloat16_bits(bits).astype(jnp.uint16).reshape(*batch, layout.quantised_dim)
    return jnp.concatenate([quantised, bf16], axis=-1)


def _e4m3_values(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def e2m1_values(packed: jax.Array) -> jax.Array:
    """The numbers of bytes that hold two e2m1 numbers each, the even one in the low nibble, as float8_e4m3fn."""
    codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    magnitude = codes & 7
    # 0.5 apart, e2m1 is subnormal; from 1 on its exponent and mantissa move into those of e4m3, whose bias is 6 more.
    bits = jnp.where(magnitude < 2, magnitude * 0x30, (magnitude + 12) << 2)
    return lax.bitcast_convert_type((bits | ((codes & 8) << 4)).astype(jnp.uint8), jnp.float8_e4m3fn)


def _times_float32(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The float32 bits of values `[..., groups, group]` times scales, the bytes of `[..., groups]`."""
    return float32_bits(values * _from_bytes(scales, jnp.float32)[..., None])


def _times_e4m3(values: jax.Array, scales: jax.Array) -> jax.Array:
    return float32_bits(values * _e4m3_values(scales)[..., None])


def _times_ue8m0(values: jax.Array, scales: jax.Array) -> jax.Array:
    return times_ue8m0(values, scales[..., None])


_READERS = {"ue8m0": _times_ue8m0, "float32": _times_float32, "e4m3": _times_e4m3}


def _groups(x: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """`[..., groups, group]`, and the bits (int32) of each group's largest magnitude; a NaN is the largest."""
    grouped = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return grouped, jnp.max(float32_bits(grouped) & MAGNITUDE_MASK, axis=-1)


def _to_e4m3(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def _finite_bfloat16_bits(x: jax.Array) -> jax.Array:
    """As `bfloat16_bits` of bfloat16 or float32 numbers, but no finite number becomes infinite."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    bits = float32_bits(x)
    rounded = bfloat16_bits(bits)
    became_inf = ((rounded & 0x7FFF) == _BF16_INF) & ((bits & MAGNITUDE_MASK) < F32_INF)
    return rounded - became_inf.astype(jnp.int32)  # one below infinity is the largest finite number


def times_ue8m0(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The float32 bits of `values * 2^(scales - 127)`, exact for subnormal numbers too.

    Byte 0 is 2^-127, itself subnormal, and byte 255 is NaN. A device that flushes subnormal numbers would lose them
    in a multiplication, so the exponent is added in integers.

    Values are float32 numbers that float8_e4m3fn holds: they have 4 significant bits and are not subnormal.
    """
    bits, scales = float32_bits(values), scales.astype(jnp.int32)
    magnitude, sign = bits & MAGNITUDE_MASK, bits & ~MAGNITUDE_MASK
    shift = scales - EXPONENT_BIAS
    exponent = (magnitude >> MANTISSA_BITS) + shift
    normal = magnitude + (shift << MANTISSA_BITS)
    # At most 10 places (2^-9 * 2^-127): the 4 significant bits stay above the last place.
    subnormal = ((magnitude & MANTISSA_MASK) | MIN_NORMAL) >> jnp.clip(1 - exponent, 0, 31)
    product = jnp.where(exponent > 0, normal, subnormal)
    product = jnp.where(exponent > 254, F32_INF, product)
    product = jnp.where(magnitude == 0, 0, product)
    product = jnp.where((magnitude > F32_INF) | (scales == UE8M0_NAN), _F32_NAN, product)
    return sign | product


def _to_bytes(x: jax.Array) -> jax.Array:
    """The bytes of `[..., k]` numbers, little endian, uint8 `[..., k * itemsize]`."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def _from_bytes(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The inverse of `_to_bytes`."""
    itemsize = np.dtype(dtype).itemsize
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // itemsize, itemsize), dtype)
