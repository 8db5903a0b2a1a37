// Sparse MLA decode on SM90: attention of each row's heads over the cached rows that its indices name.
//
// The persistent kernel runs one thread block on each multiprocessor, with two producer and two consumer warpgroups.
// The cluster kernel serves few rows: a cluster of thread blocks shares each row. In the wide cluster kernel it does so
// too, and each thread block has the warpgroups of the persistent one. The window kernel serves short rows, each by one
// thread block. kernels-decode.md explains shared memory, the barriers and the limits.

#pragma once

#include <cooperative_groups.h>

#include "attend.cuh"
#include "cluster.cuh"
#include "join.cuh"
#include "keys.cuh"
#include "launch.cuh"
#include "rows_bf16.cuh"
#include "shared.cuh"
#include "wide.cuh"
#include "window.cuh"

namespace sparse_decode {

// Registers of a thread in each role. A multiprocessor has 4 x 128 for one thread of each of the four warpgroups.
constexpr int kKeyRegisters = 64, kAttendRegisters = 192;

// Stands before the first read of what launches ahead have written, and lets a launch behind begin: its thread blocks
// come to multiprocessors that are free, and wait there.
__device__ __forceinline__ void begin_launch() {
  sm90::wait_for_launch_ahead();
  sm90::let_next_launch_begin();
}

// Each warp initialises its part of the barriers; one thread would take 2,000 clocks for all.
template <Format kFormat>
__device__ __forceinline__ void init_barriers(Shared<kFormat>& shared, int warp) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kAhead == 4 && kWarps == 16);
  static_assert(sizeof(Shared<kFormat>::barriers) == (kWarps + 11) * sizeof(Barrier));
  Barrier* mine = reinterpret_cast<Barrier*>(&shared.barriers) + warp;
  // Arrivals: slots_full a warp's copies and the warp; rows_full a warp; scales_full a warp's copies; rows_empty the
  // eight producer warps; keys_full four of them, or, of bfloat16 rows, the copies of their threads, and of the second
  // half the warp that stores the masks.
  constexpr int kOnce = sm90::kArrivalsOfWarp;
  sm90::init(mine, warp < 4 ? 32 + kOnce : warp < 8 ? kOnce : warp < 12 ? 32 : 8 * kOnce);
  int full = Layout<kFormat>::kIsBf16 ? 128 + warp % 2 * kOnce : 4 * kOnce;
  if (warp < 11) sm90::init(mine + kWarps, warp < 4 ? full : (warp < 10 ? 4 : 8) * kOnce);
  if constexpr (constexpr int kMore = Layout<kFormat>::kParts - 1; kMore > 0)
    if (warp < kMore * 4) sm90::init(&shared.parts.keys_empty[0][0][0] + warp, 4 * kOnce);
}

template <Format kFormat>
__device__ __forceinline__ void bring(const Call& call, const Piece& piece, Shared<kFormat>& shared, int tile,
                                      int half) {
  if constexpr (Layout<kFormat>::kIsBf16) {
    bring_bf16_keys<kFormat>(call, piece, shared, tile, half);
  } else {
    bring_keys<kFormat>(call, piece, shared, tile, half);
  }
}

template <Format kFormat, bool kByLengths>
__device__ __forceinline__ void attend(const Call& call, Shared<kFormat>& shared) {
  int tile = blockIdx.x % call.tiles, warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  if (unsigned thread = fresh(threadIdx.x); thread % 32 == 0) init_barriers(shared, thread / 32);
  begin_launch();
  static_assert(sizeof(Planning) <= sizeof(shared.keys));
  Planning& planning = reinterpret_cast<Planning&>(shared.keys);
  plan_piece<kByLengths>(call, planning, shared.plan, blockIdx.x / call.tiles);
  __syncthreads();
  const Piece piece = shared.plan.piece;
  if (piece.joins && threadIdx.x == 0) call.part_rows[blockIdx.x] = parts_of(piece);

  if (piece.blocks > 0) {  // registers move between warpgroups only where all have work
    if (warpgroup < 2) {
      sm90::shrink_registers<kKeyRegisters>();
      bring<kFormat>(call, piece, shared, tile, warpgroup);
      sm90::sync_threads(kEndBarrier, kThreads);
      sm90::grow_registers<128>();
    } else {
      sm90::grow_registers<kAttendRegisters>();
      attend_rows<kFormat>(call, piece, shared, tile, warpgroup - 2);
      sm90::sync_threads(kEndBarrier, kThreads);
      sm90::shrink_registers<128>();
    }
  }
  if (!piece.joins) return;
  // Thread blocks without work rehearse the join, so that its code is in the L2 before the others need it.
#pragma unroll 1
  for (int round = piece.blocks > 0; round < 2; round++) {
    if (round == 1) cooperative_groups::this_grid().sync();
    join_parts(call, piece.equally, &shared, round == 0);
  }
}

template <Format kFormat>
__device__ __forceinline__ void attend_wide(const Call& call, WideShared<kFormat>& shared) {
  int tile = blockIdx.y, row = blockIdx.z, warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  if (unsigned thread = fresh(threadIdx.x); thread % 32 == 0) init_barriers<kFormat>(shared, thread / 32);
  begin_launch();
  int blocks = lengths_of(call, row).blocks();
  if (threadIdx.x == 0) {
    sm90::init(&shared.statistics_full, 1), sm90::init(&shared.values_full, 1);
    sm90::fence_barriers();
    expect_parts(call, shared, blocks);
  }
  __syncthreads();  // all barriers are initialised
  Part part(call, blocks, true, blockIdx.x);
  bool any = part.first < part.last;
  const Piece piece = {row, part.first, part.last < blocks ? part.last : kToItsEnd, kToItsEnd, any ? 0 : -1,
                       0,   nullptr,    part.last - part.first,                     false,     false};
  if (warpgroup < 2) {
    sm90::shrink_registers<kKeyRegisters>();
    if (any) bring<kFormat>(call, piece, shared, tile, warpgroup);
    sm90::wait_copies();
    __syncwarp();
    sm90::release_in_cluster();
    sm90::wait_cluster();
  } else {
    sm90::grow_registers<kAttendRegisters>();
    if (any) {
      attend_rows<kFormat, true>(call, piece, shared, tile, warpgroup - 2);
    } else {
      sm90::release_in_cluster();
      sm90::wait_cluster();
    }
    add_parts(call, shared, tile);
  }
}

extern __shared__ uint8_t dynamic_shared[];

template <typename Layout>
__device__ __forceinline__ Layout& shared_memory() {  // tiles begin at multiples of 1024 bytes
  return *reinterpret_cast<Layout*>(dynamic_shared + (-sm90::shared_address(dynamic_shared) & 1023));
}

template <typename Layout>
constexpr int shared_bytes() {
  static_assert(sizeof(Layout) + 1024 <= 232448);
  return sizeof(Layout) + 1024;
}

// Of a format that has it.
template <Format kFormat>
__device__ __forceinline__ void attend_window(const Call& call) {
  if constexpr (kHasWindow<kFormat>) WindowRow<kFormat>(call, shared_memory<WindowShared<kFormat>>()).attend();
}

template <Format kFormat>
constexpr int window_bytes() {
  if constexpr (kHasWindow<kFormat>) return shared_bytes<WindowShared<kFormat>>();
  return 0;
}

// The kernels of a format, in a file of their own: nvcc compiles the files side by side.
#define SPARSE_DECODE_KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 1)
#define SPARSE_DECODE_KERNELS(name, kFormat)                                                      \
  SPARSE_DECODE_KERNEL name(const __grid_constant__ Call call) {                                  \
    attend<kFormat, false>(call, shared_memory<Shared<kFormat>>());                               \
  }                                                                                               \
  SPARSE_DECODE_KERNEL name##_by_lengths(const __grid_constant__ Call call) {                     \
    attend<kFormat, true>(call, shared_memory<Shared<kFormat>>());                                \
  }                                                                                               \
  SPARSE_DECODE_KERNEL name##_few_16(const __grid_constant__ Call call) {                         \
    begin_launch();                                                                               \
    PartOfRow<kFormat, 16>(call, shared_memory<ClusterShared<kFormat, 16>>()).attend();           \
  }                                                                                               \
  SPARSE_DECODE_KERNEL name##_few_32(const __grid_constant__ Call call) {                         \
    begin_launch();                                                                               \
    PartOfRow<kFormat, 32>(call, shared_memory<ClusterShared<kFormat, 32>>()).attend();           \
  }                                                                                               \
  SPARSE_DECODE_KERNEL name##_wide(const __grid_constant__ Call call) {                           \
    attend_wide<kFormat>(call, shared_memory<WideShared<kFormat>>());                             \
  }                                                                                               \
  SPARSE_DECODE_KERNEL name##_window(const __grid_constant__ Call call) {                         \
    begin_launch();                                                                               \
    attend_window<kFormat>(call);                                                                 \
  }                                                                                               \
  template <>                                                                                     \
  Kernels kernels_of<kFormat>() {                                                                 \
    constexpr int kBytes = shared_bytes<Shared<kFormat>>();                                       \
    return {{name, kBytes},                                                                       \
            {name##_by_lengths, kBytes},                                                          \
            {name##_few_16, shared_bytes<ClusterShared<kFormat, 16>>()},                          \
            {name##_few_32, shared_bytes<ClusterShared<kFormat, 32>>()},                          \
            {name##_wide, shared_bytes<WideShared<kFormat>>()},                                   \
            {name##_window, window_bytes<kFormat>()}};                                            \
  }

}  // namespace sparse_decode
