// What kernels know of weights as checkpoints store them: e2m1 numbers with UE8M0 scales of 32 along the input, or e4m3
// numbers with scales of 128, UE8M0 or float32. Numbers become bfloat16 without rounding.

#pragma once

#ifndef SM90_DEVICE
#include <cstdint>
#endif

namespace stored_weights {

constexpr int kFp4Group = 32, kFp8Group = 128;  // k that share a scale

// Where pairs of numbers have their signs, and exponent and mantissa at the place of bfloat16's: numbers of e2m1 are then
// 2^-126 of themselves, 0.5 a subnormal number, those of e4m3 2^-120.
constexpr uint32_t kSigns = 0x80008000, kFp4Numbers = 0x01C001C0, kFp8Numbers = 0x07F007F0, k2To120 = 0x7B807B80;

__device__ __forceinline__ uint32_t twice(uint32_t bfloat16) { return bfloat16 * 0x10001; }

// A UE8M0 scale for numbers that are 2^-126 of themselves: a factor for scales up to 2, or a first one that such a scale
// has, and a second one that is 1 then.
constexpr uint32_t kLargestAlone = 128;
__device__ __forceinline__ uint32_t factor_alone(uint32_t scale) { return scale * 0x00800080u + 126 * 0x00800080u; }
__device__ __forceinline__ uint32_t first_factor(uint32_t scale) { return factor_alone(min(scale, kLargestAlone)); }
__device__ __forceinline__ uint32_t second_factor(uint32_t scale) {
  return scale == 255 ? 0x7FC07FC0 : twice((max(scale, kLargestAlone) - 1) << 7);
}

__device__ __forceinline__ float ue8m0(uint32_t scale) {
  return __int_as_float(static_cast<int>(scale == 0 ? 0x00400000 : scale == 255 ? 0x7FC00000 : scale << 23));
}

}  // namespace stored_weights
