"""Device functions between float32 and what caches hold: e4m3, e2m1, UE8M0 and bfloat16 numbers, in exact arithmetic.

HARDWARE_CASTS says whether numbers are converted by the GPU's own instructions, which know e4m3 from SM89 on, or in
integer arithmetic: for SM80, and for Triton's interpreter, which truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_MANTISSA_MASK = tl.constexpr(0x007FFFFF)
_MANTISSA_OF_1_75 = tl.constexpr(0x00600000)
F32_INF = tl.constexpr(0x7F800000)
_F32_NAN = tl.constexpr(0x7FC00000)
_BF16_NAN = tl.constexpr(0x7FC0)
_F32_TWO_POW_MINUS_127 = tl.constexpr(0x00400000)  # a UE8M0 byte of 0, subnormal
_F32_MAX_QUANTISED = tl.constexpr(0x7F700000)  # 240 * 2^120, the largest magnitude that is quantised
_TWO_POW_120 = tl.constexpr(2.0**120)
_TWO_POW_14 = tl.constexpr(16384.0)  # its last place is 2^-9, that of e4m3's subnormal numbers
_TWO_POW_14_BITS = tl.constexpr(0x46800000)
_E4M3_MIN_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2^-6
_ONE_SIXTH = tl.constexpr(0.1666666716337204)  # of float32; 6 is the largest e2m1 number
_E4M3_NAN = tl.constexpr(0x7F)

# How the scales of a layout are stored, as a kernel's constant: SCALES.
FLOAT32_SCALES, UE8M0_SCALES, E4M3_SCALES, TENSOR_SCALE = (tl.constexpr(i) for i in range(4))
SCALE_KINDS = {"float32": 0, "ue8m0": 1, "e4m3": 2, "tensor": 3}


@triton.jit
def e4m3_to_float32(byte, HARDWARE_CASTS: tl.constexpr):
    if HARDWARE_CASTS:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    byte = byte.to(tl.int32)
    magnitude = byte & 0x7F
    # Moved into a float32's exponent and mantissa the number is 2^-120 of itself, subnormal numbers included.
    value = (magnitude << 20).to(tl.float32, bitcast=True) * _TWO_POW_120
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(magnitude == 0x7F, _F32_NAN, bits) | ((byte & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def float32_to_e4m3(value, HARDWARE_CASTS: tl.constexpr):
    """The e4m3 byte of float32 numbers of magnitude at most 448 or NaN, to nearest even."""
    if HARDWARE_CASTS:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE_MASK
    # 960 = (127 - 7) << 3 is the difference of the exponents' biases.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # The addition rounds to multiples of 2^-9.
    shifted = magnitude.to(tl.float32, bitcast=True) + _TWO_POW_14
    subnormal = shifted.to(tl.int32, bitcast=True) - _TWO_POW_14_BITS
    byte = tl.where(magnitude < _E4M3_MIN_NORMAL_BITS, subnormal, normal)
    byte = tl.where(magnitude > F32_INF, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def bfloat16_bits(bits):
    """float32 bits rounded to the nearest bfloat16, ties to even: int32 in [0, 65535]."""
    high = (bits >> 16) & 0xFFFF
    low = bits & 0xFFFF
    round_up = (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1))
    is_nan = (bits & MAGNITUDE_MASK) > F32_INF
    return tl.where(is_nan, high | 0x40, high + round_up.to(tl.int32))


@triton.jit
def _clipped(bits):
    """The bits of the magnitudes, at most the largest that is quantised; a NaN stays one."""
    magnitude = bits & MAGNITUDE_MASK
    clipped = (magnitude > _F32_MAX_QUANTISED) & (magnitude <= F32_INF)
    return tl.where(clipped, _F32_MAX_QUANTISED, magnitude)


@triton.jit
def quantise_groups(bits, MIN_SCALE_EXPONENT: tl.constexpr):
    """(what is stored as e4m3, float32; exponents of the scales, int32) of float32 bits, a group a row."""
    magnitude = _clipped(bits)
    # ceil(log2(amax / 448)) with 448 = 1.75 * 2^8, on bits: exact.
    amax = tl.max(magnitude, axis=1)
    above = ((amax & _MANTISSA_MASK) > _MANTISSA_OF_1_75).to(tl.int32)
    exponent = tl.maximum((amax >> 23) - (127 + 8) + above, MIN_SCALE_EXPONENT)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return (magnitude | (bits & ~MAGNITUDE_MASK)).to(tl.float32, bitcast=True) * inverse[:, None], exponent


@triton.jit
def quantise_by_tensor(bits, scale):
    """The float32 values to store as e4m3: the quotients of float32 bits by a scale, within ±448."""
    quotient = tl.div_rn(_clipped(bits).to(tl.float32, bitcast=True), scale)
    quotient = tl.where(quotient > 448.0, 448.0, quotient).to(tl.int32, bitcast=True)
    return (quotient | (bits & ~MAGNITUDE_MASK)).to(tl.float32, bitcast=True)


@triton.jit
def quantise_e2m1(bits, MIN_SCALE_EXPONENT: tl.constexpr, HARDWARE_CASTS: tl.constexpr):
    """(bytes of two e2m1 codes each, e4m3 bytes of the scales), uint8, of the float32 bits of bfloat16 values, a group
    a row. A group with a NaN has a NaN for its scale."""
    magnitude = bits & MAGNITUDE_MASK
    amax = tl.max(magnitude, axis=1)
    least: tl.constexpr = 2.0**MIN_SCALE_EXPONENT
    scale = tl.minimum(amax, F32_INF).to(tl.float32, bitcast=True) * _ONE_SIXTH
    scales = float32_to_e4m3(tl.minimum(tl.maximum(scale, least), 448.0), HARDWARE_CASTS)
    unit = e4m3_to_float32(scales, HARDWARE_CASTS)[:, None]
    value = magnitude.to(tl.float32, bitcast=True)
    # Halfway between neighbouring numbers; a tie goes to the even code. The products are exact.
    code = (value > unit * 0.25).to(tl.int32) + (value >= unit * 0.75).to(tl.int32)
    code += (value > unit * 1.25).to(tl.int32) + (value >= unit * 1.75).to(tl.int32)
    code += (value > unit * 2.5).to(tl.int32) + (value >= unit * 3.5).to(tl.int32)
    code += (value > unit * 5.0).to(tl.int32)
    is_nan = amax > F32_INF
    code = tl.where(is_nan[:, None], 0, code | ((bits >> 28) & 8))
    even, odd = tl.split(tl.reshape(code, (bits.shape[0], bits.shape[1] // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8), tl.where(is_nan, _E4M3_NAN, scales).to(tl.uint8)


@triton.jit
def e2m1_to_float32(packed, HARDWARE_CASTS: tl.constexpr):
    """The numbers of bytes that hold two each, the even one in the low nibble: twice as many along a row."""
    code = tl.interleave(packed & 0xF, packed >> 4)
    # Moved into the exponent and mantissa of e4m3 the number is 2^-6 of itself, 0.5 included.
    return e4m3_to_float32((((code & 7) << 2) | ((code & 8) << 4)).to(tl.uint8), HARDWARE_CASTS) * 64.0


@triton.jit
def _two_e2m1(words, NIBBLE: tl.constexpr):
    """A nibble of each half of uint32 words, moved into a float16's sign, exponent and mantissa: [rows, words, 2]."""
    shifted = words >> (4 * NIBBLE)
    two = ((shifted & 0x00070007) << 9) | ((shifted & 0x00080008) << 12)
    return tl.join(two, two >> 16)


@triton.jit
def e2m1_words_to_float16(words):
    """2^-14 of the numbers that uint32 words hold eight each, as float16: eight times as many along a row.

    `e2m1_to_float32` on whole words. 0.5 becomes a subnormal number; a product with 2^14 in float32 is exact.
    """
    even = tl.join(_two_e2m1(words, 0), _two_e2m1(words, 2))
    odd = tl.join(_two_e2m1(words, 1), _two_e2m1(words, 3))
    bits = tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1] * 8))
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def e2m1_times_ue8m0(code, scale):
    """code * 2^(scale − 127) as bfloat16, of int32 codes and scale bytes, in integers.

    Exact where the number is normal: smaller ones, and those of scale 0, become 0. Scales above 252 (2^125) are NaN.
    """
    magnitude = code & 7
    # Exponent and mantissa move into those of bfloat16, to whose exponent the scale is added. 0.5 is a power of two.
    bits = ((scale - 1) << 7) + ((magnitude - (magnitude == 1).to(tl.int32)) << 6)
    bits = tl.where((magnitude == 0) | (scale == 0), 0, bits) | ((code & 8) << 12)
    bits |= tl.where(scale > 252, _BF16_NAN, 0)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1_pairs_times_ue8m0(packed, scale):
    """The bfloat16 numbers of the low and of the high nibbles of bytes, each times 2^(scale − 127), by the GPU's own
    instructions, SM80 and later: three a number. A thread must hold pairs of neighbouring bytes of one scale.

    Args:
      packed: uint8.
      scale: int32, 0 to 255, of the same shape; 255 is NaN.
    """
    bits = tl.where(scale == 0, 0x0040, tl.where(scale == 255, _BF16_NAN, scale << 7))
    # Exponent and mantissa of a nibble stand in those of bfloat16, so the number is 2^-126 of itself, 0.5 too.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 first, second, bits, zero, large;
        mov.b32 zero, 0x80008000;
        mov.b32 large, 0x7E807E80;
        prmt.b32 first, $4, 0, 0x1100;
        prmt.b32 second, $4, 0, 0x3322;
        shl.b32 $0, first, 4;
        shr.b32 bits, first, 2;
        and.b32 bits, bits, 0x01C001C0;
        lop3.b32 $0, $0, 0x80008000, bits, 0xEA;
        shr.b32 bits, first, 6;
        and.b32 bits, bits, 0x01C001C0;
        lop3.b32 $2, first, 0x80008000, bits, 0xEA;
        shl.b32 $1, second, 4;
        shr.b32 bits, second, 2;
        and.b32 bits, bits, 0x01C001C0;
        lop3.b32 $1, $1, 0x80008000, bits, 0xEA;
        shr.b32 bits, second, 6;
        and.b32 bits, bits, 0x01C001C0;
        lop3.b32 $3, second, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, $0, large, zero;
        fma.rn.bf16x2 $1, $1, large, zero;
        fma.rn.bf16x2 $2, $2, large, zero;
        fma.rn.bf16x2 $3, $3, large, zero;
        fma.rn.bf16x2 $0, $0, $5, zero;
        fma.rn.bf16x2 $1, $1, $7, zero;
        fma.rn.bf16x2 $2, $2, $5, zero;
        fma.rn.bf16x2 $3, $3, $7, zero;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [packed, bits | (bits << 16)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def ue8m0_to_float32(byte):
    """2^(byte − 127) of int32 bytes; 255 is NaN."""
    bits = tl.where(byte == 0, _F32_TWO_POW_MINUS_127, byte << 23)
    return tl.where(byte == 255, _F32_NAN, bits).to(tl.float32, bitcast=True)
