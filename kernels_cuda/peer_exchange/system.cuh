// What devices say to each other through each other's memory, and exact instructions of sums.

#pragma once

#include <cuda_bf16.h>

#include <cassert>
#include <cstdint>

namespace peer {

// Another device's flag: all that this thread wrote or has seen is seen by whoever sees the flag.
__device__ __forceinline__ void release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ __forceinline__ void pause() { __nanosleep(40); }

// Another device has not come. The launch ends with CUDA's error of an assertion, whose text is printed, and with it what
// the process does on this device: results would be wrong. Who waited for whom stays in the host's memory for the error
// of the next launch.
__device__ __forceinline__ void give_up(volatile int* trouble, int rank, int source, int block, uint32_t epoch) {
  trouble[1] = rank;
  trouble[2] = source;
  trouble[3] = block;
  trouble[4] = static_cast<int>(epoch);
  __threadfence_system();
  trouble[0] = 1;
  __threadfence_system();
  assert(!"context parallel decode: another device did not come to this exchange within 10 seconds");
  __trap();
}

// Not by the L1, which may hold what lay there before.
__device__ __forceinline__ uint4 load_received(const uint4* from) { return __ldcg(from); }
__device__ __forceinline__ float load_received(const float* from) { return __ldcg(from); }

// What no one reads here again soon.
__device__ __forceinline__ uint4 load_once(const uint4* from) { return __ldcg(from); }

__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

__device__ __forceinline__ float logarithm(float x) { return logf(x); }

__device__ __forceinline__ float quotient(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float as_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t as_bits(float x) { return __float_as_uint(x); }

// bfloat16 bits of two numbers, rounded to nearest, the first in the low half.
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

}  // namespace peer
