"""How an index key is stored: its byte layout, and each engine's rule of quantising keys and queries.

A page of `page_size` keys holds their values, one key after the other, and behind them their scales. FP8 keys take 132
bytes (SGLang's and DeepGEMM's page for V3.2 and V4, vLLM's for V4.1 too), FP4 keys 68 (SGLang's for V4.1, vLLM's on
SM100). Pages of both can have the same length, so a cache of FP4 keys says it by name.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla.kv_cache.quantize import (
    E4M3_MAX,
    EXPONENT_BIAS,
    F32_448,
    F32_INF,
    F32_ONE,
    MAGNITUDE_MASK,
    MANTISSA_BITS,
    MANTISSA_MASK,
    MIN_NORMAL,
    UE8M0_NAN,
    as_rounded,
    bits_to_float32,
    divide,
    e2m1_codes,
    e2m1_values,
    float32_bits,
    pack_e2m1,
    power_of_two,
    quantize_groups,
    times_ue8m0,
)

INDEX_DIM = 128  # values of an index key, in all models
SCALE_BYTES = 4  # of a key, in both formats

_MIN_AMAX = np.float32(1e-4)  # SGLang's floor: an all-zero key has a scale too
_LEAST_FP8_EXPONENT = -22  # of 2^ceil(log2(1e-4 / 448)), where scales are powers of two
_LEAST_QUERY_EXPONENT = -126  # both engines floor amax at 6 * 2^-126 where they round queries to FP4

_MANTISSA_OF_1_5 = 0x00400000
_MAX_FINITE_BITS = 0x7F7FFFFF
# 6 * 2^125. A larger value would round to 4 or 6 units of 2^126, which read back as infinity.
_MAX_FP4_BITS = 0x7F400000


@dataclasses.dataclass(frozen=True)
class IndexFormat:
    """The format of an index key of 128 values.

    Attributes:
      name: "FP8" or "FP4".
      value_bytes: of a key.
      group: values that share a scale. FP8: 128, a float32; FP4: 32, a UE8M0 byte each, group 0 first.
      quantizers: the engines whose rules are known, the default first, each with the exponent of its smallest scale
        where scales are powers of two, and None where they are not.
      writer: whose rule keys and queries are quantised by.

    `IndexFormat.FP8` has one float32 scale, `max(amax, 1e-4) / 448`; vLLM rounds it up to a power of two for V4.1.
    `IndexFormat.FP4` has e2m1 values, two a byte, the even one in the low nibble. A scale is `amax / 6`, rounded up to
    a power of two. SGLang's smallest is that of 1e-4, and it writes no −0; vLLM floors amax at 6 · 2^−126 and keeps −0.
    """

    name: str
    value_bytes: int
    group: int
    quantizers: tuple[tuple[str, int | None], ...]
    writer: str = "sglang"

    FP8: ClassVar[IndexFormat]
    FP4: ClassVar[IndexFormat]

    @property
    def key_bytes(self) -> int:
        """Bytes of a key, its scales included."""
        return self.value_bytes + SCALE_BYTES

    @property
    def least_exponent(self) -> int | None:
        """The exponent of the writer's smallest scale; None where scales are no powers of two."""
        return dict(self.quantizers)[self.writer]

    def written_by(self, engine: str) -> IndexFormat:
        """The same bytes, quantised as an engine does it: "sglang" or "vllm". Readers see no other.

        Raises:
          ValueError: another engine.
        """
        if engine not in dict(self.quantizers):
            known = " or ".join(repr(name) for name, _ in self.quantizers)
            raise ValueError(f"written_by: engine of {self.name} index keys must be {known}, got {engine!r}")
        return dataclasses.replace(self, writer=engine)

    def __repr__(self) -> str:
        by = "" if self.writer == "sglang" else f".written_by({self.writer!r})"
        return f"IndexFormat.{self.name}{by}"


IndexFormat.FP8 = IndexFormat("FP8", 128, 128, (("sglang", None), ("vllm", _LEAST_FP8_EXPONENT)))
IndexFormat.FP4 = IndexFormat("FP4", 64, 32, (("sglang", -13), ("vllm", _LEAST_QUERY_EXPONENT)))


# --- to bytes and back -----------------------------------------------------------------------------


def encode_keys(format: IndexFormat, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bytes of keys `[n, 128]`: `(values, scales)`, uint8 `[n, value_bytes]` and `[n, 4]`."""
    if format.name == "FP8":
        values, scales = quantize_fp8(k, format)
        return lax.bitcast_convert_type(values, jnp.uint8), lax.bitcast_convert_type(scales, jnp.uint8)
    codes, scales = _quantize_fp4(k, format.least_exponent)
    if format.writer == "sglang":
        codes = jnp.where(codes == 8, 0, codes)
    return pack_e2m1(codes), scales


def decode_keys(format: IndexFormat, values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys of bytes: what is stored of a key's values, and what each group of them is multiplied by.

    They are float8_e4m3fn `[..., 128]`, which holds every e2m1 number, and float32 `[..., 128 / group]`.
    """
    if format.name == "FP8":
        scales = lax.bitcast_convert_type(scales, jnp.float32)[..., None]
        return lax.bitcast_convert_type(values, jnp.float8_e4m3fn), scales
    return e2m1_values(values), bits_to_float32(times_ue8m0(jnp.float32(1), scales))


def keys_of_bytes(format: IndexFormat, values: jax.Array, scales: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """`[..., 128]` of a float dtype and float32 `[...]`, whose products are the keys of bytes as in `decode_keys`.

    FP8 keys keep their scale apart, as the kernels do; those of FP4 have several, and bfloat16 holds their products.
    """
    values, factors = decode_keys(format, values, scales)
    if format.name == "FP8":
        return values.astype(dtype), factors[..., 0]
    return _times(values, scales).astype(dtype), jnp.ones(values.shape[:-1], jnp.float32)


def _times(values: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 `[..., 128]`: e2m1 numbers times their groups' UE8M0 scales, exact for subnormal products too."""
    groups = values.astype(jnp.float32).reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    return bits_to_float32(times_ue8m0(groups, scales[..., None])).reshape(values.shape)


# --- quantising ------------------------------------------------------------------------------------


def quantize_fp8(x: jax.Array, format: IndexFormat = IndexFormat.FP8) -> tuple[jax.Array, jax.Array]:
    """e4m3 values `[..., d]` and a float32 scale per row of the last axis, `[...]`."""
    x = x.astype(jnp.float32)
    if format.least_exponent is not None:
        values, exponents = quantize_groups(x, x.shape[-1], format.least_exponent)
        return as_rounded(values), power_of_two(exponents)[..., 0]
    amax_bits = jnp.max(float32_bits(x) & MAGNITUDE_MASK, axis=-1, initial=0)
    floor = int(_MIN_AMAX.view(np.int32))
    # An infinity is clipped.
    scale_bits = divide(jnp.clip(amax_bits, floor, _MAX_FINITE_BITS), F32_448)
    inverse = bits_to_float32(divide(F32_ONE, scale_bits))
    values = jnp.clip(x * inverse[..., None], -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return as_rounded(values), bits_to_float32(scale_bits)


def round_queries_to_fp4(q: jax.Array) -> jax.Array:
    """bfloat16 `[..., 128]`: the products of e2m1 numbers and scales of FP4, of each group of 32 values."""
    codes, scales = _quantize_fp4(q, _LEAST_QUERY_EXPONENT)
    return _times(e2m1_values(pack_e2m1(codes)), scales).astype(jnp.bfloat16)


def _quantize_fp4(x: jax.Array, least: int) -> tuple[jax.Array, jax.Array]:
    """e2m1 codes, int32 `[..., d]`, −0 kept, and the UE8M0 bytes of the groups' scales, uint8 `[..., d / 32]`.

    Ties go to the even code. A group with a NaN has a NaN for its scale and codes of 0. Infinities are clipped, and
    subnormal numbers count as zeros: a CPU takes them so, a GPU does not.
    """
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // IndexFormat.FP4.group, IndexFormat.FP4.group)
    bits = float32_bits(groups)
    magnitude, sign = bits & MAGNITUDE_MASK, bits & ~MAGNITUDE_MASK
    is_nan = jnp.any(magnitude > F32_INF, axis=-1)
    magnitude = jnp.where(magnitude < MIN_NORMAL, 0, jnp.minimum(magnitude, _MAX_FP4_BITS))
    amax = jnp.max(magnitude, axis=-1)
    # amax = m * 2^k with 1 <= m < 2, and 6 = 1.5 * 2^2: the ceiling is k - 2, plus 1 where m > 1.5.
    exponent = (amax >> MANTISSA_BITS) - EXPONENT_BIAS - 2 + ((amax & MANTISSA_MASK) > _MANTISSA_OF_1_5)
    exponent = jnp.maximum(exponent, least)
    # Scaled by a power of two no value is rounded.
    codes = e2m1_codes(bits_to_float32(magnitude | sign) * power_of_two(-exponent)[..., None], jnp.float32(1))
    scales = jnp.where(is_nan, UE8M0_NAN, exponent + EXPONENT_BIAS).astype(jnp.uint8)
    return jnp.where(is_nan[..., None], 0, codes).reshape(x.shape), scales
