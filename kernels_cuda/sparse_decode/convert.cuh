// Converts FP8 and FP4 values to bfloat16 in shared memory.

#pragma once

#include "shared.cuh"

namespace sparse_decode {

using sm90::rounded;
using sm90::two_floats;
using sm90::two_halves;

// A thread's scales of the tiles of one half of V; its 16 values of a tile are the `part`-th.
template <Format kFormat>
struct HalfScales;

// Powers of two, so that a product with one is exact in bfloat16.
struct PowersOfTwo {
  uint32_t exponents;
  __device__ __forceinline__ static uint32_t of_exponent(uint32_t exponent) {
    uint32_t one = max(exponent << 7, 0x40u);  // 2^-127 is subnormal
    return one | one << 16;
  }
  __device__ __forceinline__ uint32_t of_tile(int tile) const { return of_exponent(exponents >> 8 * tile & 255); }
  __device__ __forceinline__ static void scale_floats(float2 (&)[4], uint32_t) {}
  __device__ __forceinline__ static void scale_rounded(uint32_t (&x)[4], uint32_t scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) sm90::scale_pair(x[i], scale);
  }
};

template <>
struct HalfScales<kV4> : PowersOfTwo {
  __device__ __forceinline__ HalfScales(const Scales<kV4>& scales, int half, int)
      : PowersOfTwo{scales.exponents[half]} {}
};

template <>
struct HalfScales<kV41> : PowersOfTwo {
  __device__ __forceinline__ HalfScales(const Scales<kV41>& scales, int half, int part) {
    exponents = __byte_perm(scales.exponents[half].x, scales.exponents[half].y, part < 2 ? 0x6420 : 0x7531);
  }
};

template <>
struct HalfScales<kV41Fp4> : HalfScales<kV41> {
  using HalfScales<kV41>::HalfScales;
};

template <>
struct HalfScales<kV32> {
  // A pointer to the scales: the scales themselves would take four registers too many.
  const float2& scales;
  __device__ __forceinline__ HalfScales(const Scales<kV32>& scales, int half, int) : scales(scales.of_128[half]) {}
  __device__ __forceinline__ float of_tile(int tile) const { return tile < 2 ? scales.x : scales.y; }
  __device__ __forceinline__ static void scale_floats(float2 (&x)[4], float scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = {x[i].x * scale, x[i].y * scale};
  }
  __device__ __forceinline__ static void scale_rounded(uint32_t (&)[4], float) {}
};

// Converts eight values.
template <Format kFormat, typename Scale>
__device__ __forceinline__ void convert(uint32_t low, uint32_t high, Scale scale, uint32_t to) {
  uint32_t x[4];
  two_halves(x[0], x[1], low);
  two_halves(x[2], x[3], high);
  float2 floats[4];
#pragma unroll
  for (int i = 0; i < 4; i++) floats[i] = two_floats(x[i]);
  HalfScales<kFormat>::scale_floats(floats, scale);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = rounded(floats[i]);
  HalfScales<kFormat>::scale_rounded(x, scale);
  sm90::store(to, uint4{x[0], x[1], x[2], x[3]});
}

// A thread's four e4m3 scales of one half of an FP4 row, in the order in which `Values` takes them: those of the values
// 32 part to 32 part + 31, and the same for the values 128 behind them. The last two threads of four take the values
// from 16 on first.
struct HalfScalesFp4 {
  uint32_t pairs[4];
  __device__ __forceinline__ HalfScalesFp4(const Scales<kV41Fp4>& scales, int half, int part) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(&scales) + half * 8 + part;
    uint32_t halves[2];
    two_halves(halves[0], halves[1], __byte_perm(from[0], from[4], part < 2 ? 0x5410 : 0x4501));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 x = two_floats(halves[i]);
      pairs[i * 2] = rounded({x.x, x.x}), pairs[i * 2 + 1] = rounded({x.y, x.y});
    }
  }
};

// The e4m3 scale in the lowest byte, twice in bfloat16.
__device__ __forceinline__ uint32_t pair_of_e4m3(uint32_t code) {
  uint32_t halves, zeros;
  two_halves(halves, zeros, code & 255);
  float x = two_floats(halves).x;
  return rounded({x, x});
}

// bfloat16's bits of eight e2m1 codes. Their bytes are looked up in tables of eight: ±0, ½, 1, 1½, 2, 3, 4, 6.
__device__ __forceinline__ void widen(uint32_t codes, uint32_t (&x)[4]) {
  uint32_t magnitudes = codes & 0x77777777;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t signs = __byte_perm(codes << 4, codes, i ? 0x7362 : 0x5140) & 0x80808080;
    uint32_t high = sm90::permute(0x3f3f3f00, 0x40404040, magnitudes >> 16 * i) | signs;
    uint32_t low = sm90::permute(0xc0800000, 0xc0804000, magnitudes >> 16 * i);
    x[2 * i] = __byte_perm(low, high, 0x5140);
    x[2 * i + 1] = __byte_perm(low, high, 0x7362);
  }
}

// Converts eight e2m1 values. Products with an e4m3 scale are exact in bfloat16.
__device__ __forceinline__ void convert_fp4(uint32_t codes, uint32_t scale, uint32_t to) {
  uint32_t x[4];
  widen(codes, x);
  PowersOfTwo::scale_rounded(x, scale);
  sm90::store(to, uint4{x[0], x[1], x[2], x[3]});
}

}  // namespace sparse_decode
