// Joins the parts of split rows, once all thread blocks have written theirs.

#pragma once

#include "../sm90.cuh"
#include "cuts.cuh"

namespace sparse_decode {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

using sm90::exp2_approx;

__device__ __forceinline__ uint32_t bits(__nv_bfloat162 x) { return *reinterpret_cast<uint32_t*>(&x); }

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float total(float a, float b) { return a + b; }

__device__ __forceinline__ float over_warp(float x, float (*both)(float, float)) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = both(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// A warp joins one quarter of a head's values, or all four. It adds the parts in the order of the keys, not of arrival.
template <int kQuarters>
__device__ __forceinline__ void join(const Call& call, CutRow cut, int tile_row, int quarter, bool rehearsal) {
  constexpr int kAtOnce = 16 / kQuarters;  // parts whose values are loaded together
  int lane = threadIdx.x % 32, head = cut.first % call.tiles * kHeads + tile_row;
  auto slot = [&](int part) {
    return static_cast<int64_t>((cut.first + part * call.tiles) * 2 + (part == 0)) * kHeads + tile_row;
  };
  auto sums_of = [&](int part) {
    return part < cut.parts ? __ldcg(&call.part_sums[slot(part)]) : float2{-INFINITY, 0};
  };
  float4 values[kAtOnce][kQuarters], joined[kQuarters] = {};
  auto load_values = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const float* from = call.part_values + slot(begin + i) * kValues + quarter * 128 + lane * 4;
#pragma unroll
      for (int j = 0; j < kQuarters; j++) {
        const float4* at = reinterpret_cast<const float4*>(from + j * 128);
        values[i][j] = begin + i < cut.parts ? __ldcg(at) : float4{0, 0, 0, 0};
      }
    }
  };
  load_values(0);
  float2 sums = sums_of(lane);
  float sink = call.sink ? call.sink[head] * kLog2E : -INFINITY;
  float largest = sums.x;
  for (int part = lane + 32; part < cut.parts; part += 32) largest = fmaxf(largest, sums_of(part).x);
  largest = over_warp(largest, larger);
  float base = largest == -INFINITY ? 0 : largest, sum = 0, weight = 0;
  for (int begin = 0; begin < cut.parts; begin += kAtOnce) {
    if (begin % 32 == 0) {
      if (begin) sums = sums_of(begin + lane);
      weight = exp2f(sums.x - base);
      sum += sums.y * weight;
    }
    if (begin) load_values(begin);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      float w = __shfl_sync(~0u, weight, (begin + i) % 32);
#pragma unroll
      for (int j = 0; j < kQuarters; j++) {
        joined[j].x += w * values[i][j].x, joined[j].y += w * values[i][j].y;
        joined[j].z += w * values[i][j].z, joined[j].w += w * values[i][j].w;
      }
    }
  }
  sum = over_warp(sum, total);
  if (rehearsal) return;
  float factor = sum == 0 ? 0.0f : 1 / (sum + exp2f(sink - largest));
  int64_t at = static_cast<int64_t>(cut.row) * call.heads + head;
  if (quarter == 0 && lane == 0) call.lse[at] = sum == 0 ? call.empty_lse : kLn2 * (largest + log2f(sum));
#pragma unroll
  for (int j = 0; j < kQuarters; j++) {
    uint2 out = {bits(__floats2bfloat162_rn(joined[j].x * factor, joined[j].y * factor)),
                 bits(__floats2bfloat162_rn(joined[j].z * factor, joined[j].w * factor))};
    *reinterpret_cast<uint2*>(call.out + at * kValues + (quarter + j) * 128 + lane * 4) = out;
  }
}

// A rehearsal loads the code into the L2: it reads whatever the scratch memory holds and writes nothing.
template <int kQuarters>
__device__ __forceinline__ void join_all(const Call& call, const CutRow* list, int tasks, bool rehearsal) {
  constexpr int kOfHead = 4 / kQuarters;  // tasks
  int heads = min(call.heads, kHeads), warps = gridDim.x * (kThreads / 32);
  // Neighbouring tasks go to different thread blocks, so that few rows keep all of them busy.
#pragma unroll 1
  for (int task = threadIdx.x / 32 * gridDim.x + blockIdx.x; task < tasks; task += warps) {
    CutRow cut = rehearsal ? CutRow{0, static_cast<int>(blockIdx.x), 1} : list[task / (kOfHead * heads)];
    int tile_row = task / kOfHead % heads;
    if (cut.first % call.tiles * kHeads + tile_row >= call.heads || (cut.parts == 1 && !rehearsal)) continue;
    join<kQuarters>(call, cut, tile_row, task % kOfHead * kQuarters, rehearsal);
  }
}

__device__ __forceinline__ void join_parts(const Call& call, bool equally, void* scratch, bool rehearsal) {
  int blocks = gridDim.x, heads = min(call.heads, kHeads);
  int2* part_rows = static_cast<int2*>(scratch);
  CutRow* list = reinterpret_cast<CutRow*>(part_rows + blocks);
  int* count = reinterpret_cast<int*>(list + blocks);
  int cut_rows = equally ? list_equal_parts(call, list) : list_cut_rows(call, part_rows, list, count);
  // Few tasks are spread over many warps; a warp with many tasks keeps many loads in flight.
  int quarters = rehearsal ? blocks : cut_rows * heads * 4;
  if (quarters <= blocks * (kThreads / 32)) {
    join_all<1>(call, list, quarters, rehearsal);
  } else {
    join_all<4>(call, list, quarters / 4, rehearsal);
  }
}

}  // namespace sparse_decode
