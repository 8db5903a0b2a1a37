// What the top-k kernels say in PTX and what only a device has. A test on the host has its own in its place.

#ifndef TOPK_DEVICE
#define TOPK_DEVICE

#include <cooperative_groups.h>
#include <cuda_bf16.h>

namespace {

// Two floats as halves, rounded to 0, `low` in the lower bits.
__device__ __forceinline__ unsigned halves_of(float low, float high) {
  unsigned halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return halves;
}

// All ones in the place of each half that is negative.
__device__ __forceinline__ unsigned negative_halves(unsigned halves) {
  unsigned negative;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(negative) : "r"(halves));
  return negative;
}

__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

}  // namespace

#endif
