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

// The upper halves of two floats, that of `low` in the lower bits.
__device__ __forceinline__ unsigned upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// All ones in the place of each half that is negative.
__device__ __forceinline__ unsigned negative_halves(unsigned halves) {
  unsigned negative;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(negative) : "r"(halves));
  return negative;
}

__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The thread blocks of a cluster. A thread that has arrived waits for the threads of all blocks.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_blocks() { return cooperative_groups::this_cluster().num_blocks(); }
__device__ __forceinline__ int cluster_rank() { return cooperative_groups::this_cluster().block_rank(); }
__device__ __forceinline__ void cluster_arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
__device__ __forceinline__ void cluster_wait() { cooperative_groups::this_cluster().barrier_wait(); }
template <typename T>
__device__ __forceinline__ T* of_first(T* shared) {  // where the first block has it
  return cooperative_groups::this_cluster().map_shared_rank(shared, 0);
}
#else
__device__ __forceinline__ int cluster_blocks() { return 1; }
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <typename T>
__device__ __forceinline__ T* of_first(T* shared) { return shared; }
#endif
__device__ __forceinline__ void cluster_sync() { cluster_arrive(), cluster_wait(); }

template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

}  // namespace

#endif
