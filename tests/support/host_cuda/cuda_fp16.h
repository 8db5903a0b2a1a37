// Stands for CUDA's header: float16 numbers.

#pragma once

#include "cuda_bf16.h"

struct __half {
  _Float16 value;
};
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline uint16_t __half_as_ushort(__half x) { return bits_as<uint16_t>(x.value); }
