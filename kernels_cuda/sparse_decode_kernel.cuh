// Sparse MLA decode on SM90: attention of each row's heads over the cached rows that its indices name.
//
// One thread block on each multiprocessor, four warpgroups: two bring keys, two attend. docs/kernels.md explains the plan
// of shared memory, the barriers and what bounds what.

#pragma once

#include <cooperative_groups.h>

#include "sparse_decode_attend.cuh"
#include "sparse_decode_join.cuh"
#include "sparse_decode_keys.cuh"
#include "sparse_decode_shared.cuh"

namespace sparse_decode {

// Registers of each thread, by role; a multiprocessor has 4 x 128 for one thread of each warpgroup.
constexpr int kKeyRegisters = 64, kAttendRegisters = 192;

// By the first threads, each some of them.
template <Format kFormat>
__device__ __forceinline__ void init_barriers(Shared<kFormat>& shared, int thread) {
  static_assert(kAhead == 4);
  if (thread < 4) {
    sm90::init(&shared.slots_full[thread], 33);  // a warp's copies, and what it wrote itself
    sm90::init(&shared.rows_full[thread], 1);
    sm90::init(&shared.scales_full[thread], 32);
    sm90::init(&shared.rows_empty[thread], 8);
    sm90::init(&shared.keys_full[thread / 2][thread % 2], 4);
    sm90::init(&shared.keys_empty[thread / 2][thread % 2], 4);
    if (thread < 2) sm90::init(&shared.weights_full[thread], 4);
    if (thread == 2) sm90::init(&shared.queries_empty, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}

template <Format kFormat>
__device__ __forceinline__ void attend(const Call& call, Shared<kFormat>& shared) {
  int tile = blockIdx.x % call.tiles, warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  init_barriers(shared, threadIdx.x);
  static_assert(sizeof(Planning) <= sizeof(shared.keys));
  Planning& planning = reinterpret_cast<Planning&>(shared.keys);
  plan_piece(call, planning, shared.plan, blockIdx.x / call.tiles);
  __syncthreads();
  const Piece piece = shared.plan.piece;
  if (piece.joins && threadIdx.x == 0) call.part_rows[blockIdx.x] = parts_of(piece);

  if (piece.blocks > 0) {  // registers change hands between warpgroups that all have work
    if (warpgroup < 2) {
      sm90::shrink_registers<kKeyRegisters>();
      bring_keys<kFormat>(call, piece, shared, tile, warpgroup);
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
  // Thread blocks without work rehearse: the code comes from memory, into the L2, before the others need it.
#pragma unroll 1
  for (int round = piece.blocks > 0; round < 2; round++) {
    if (round == 1) cooperative_groups::this_grid().sync();
    join_parts(call, &shared, round == 0);
  }
}

extern __shared__ uint8_t dynamic_shared[];

template <Format kFormat>
__device__ __forceinline__ Shared<kFormat>& shared_memory() {  // tiles begin at multiples of 1024 bytes
  return *reinterpret_cast<Shared<kFormat>*>(dynamic_shared + (-sm90::shared_address(dynamic_shared) & 1023));
}

template <Format kFormat>
constexpr int shared_bytes() {
  return sizeof(Shared<kFormat>) + 1024;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sparse_decode_v4(const __grid_constant__ Call call) {
  attend<kV4>(call, shared_memory<kV4>());
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sparse_decode_v32(const __grid_constant__ Call call) {
  attend<kV32>(call, shared_memory<kV32>());
}

}  // namespace sparse_decode
