// The gradient of sparse MLA prefill on SM90: dq and dkv, from what the forward pass saved.
//
// A thread block takes one row of queries and 64 heads, and goes through the row's keys in blocks of 64. With
// p = exp(s - lse), the probabilities without the sink, and for each head `factor`, the share that the sink leaves, and
// `offset`, factor x sum(g out) - g_lse, a block of keys adds
//
//     ds = p (factor g V^T - offset) scale     dq += ds K     dK = ds^T q, and to its first 512 columns (p factor)^T g
//
// dq stays in registers; dK is summed over the heads by the products and then added to the keys' rows in global memory.
//
// One warpgroup produces: it copies a block's rows of keys. Two consume. Each scores half of the keys, and sums half of
// the columns of dq and dK. The keys' buffer is free once dq has been summed, so the next block's rows arrive during
// the products and additions of dK, which read queries and gradients.

#pragma once

#ifndef SM90_DEVICE
#include <cuda_bf16.h>

#include <cstdint>
#endif

#include "../sm90.cuh"

namespace sparse_backward {

using sm90::Barrier;

constexpr int kHeads = 64, kBlock = 64, kValues = 512;
constexpr int kThreads = 384, kConsumers = 256;
constexpr int kCopyRegisters = 40, kSumRegisters = 232;  // of a thread; a multiprocessor has 3 x 168
constexpr int kTile = sm90::kTileBytes;
constexpr float kLog2E = 1.4426950408889634f;

// The named barriers of the consumers.
constexpr int kReadBarrier = 1, kWrittenBarrier = 2;

struct Call {
  const __nv_bfloat16 *q, *kv, *grad;     // [rows, heads, dim], [num_keys, dim], [rows, heads, 512]
  const int *indices, *lengths;           // [rows, topk]; [rows], or null
  const float *lse, *factor, *offset;     // [rows, heads]; lse is natural, without the sink
  __nv_bfloat16* dq;                      // [rows, heads, dim]
  float* dkv;                             // [num_keys, dim], zeros
  float scale;                            // of the scores
  int heads, topk, num_keys, tiles;       // tiles of 64 heads
};

template <int kDim>
struct Shared {
  static constexpr int kTiles = kDim / 64;
  uint8_t queries[kTiles][kTile], grads[kValues / 64][kTile], keys[kTiles][kTile];
  uint8_t scores[kTile], weights[kTile];  // ds and p x factor: heads x keys
  int slots[2][kBlock];                   // of two blocks' keys; -1: no key
  Barrier keys_full, keys_empty;
};

template <int kDim>
constexpr int kSharedBytes = sizeof(Shared<kDim>);
static_assert(kSharedBytes<576> <= 232448);

// Where a tile's row has its 16-byte chunk.
__device__ __forceinline__ uint32_t chunk_of(uint32_t tile, int row, int chunk) {
  return tile + row * 128 + (chunk ^ row % 8) * 16;
}

__device__ __forceinline__ int span_of(const Call& call, int row) {
  return call.lengths ? min(max(call.lengths[row], 0), call.topk) : call.topk;
}

// Copies the rows of all blocks' keys. Eight neighbouring threads copy 128 bytes of a key, a row of a tile; a warp has
// 16 keys of a block, four at once.
template <int kDim>
__device__ __forceinline__ void copy_keys(const Call& call, Shared<kDim>& shared, int row, int blocks) {
  const int lane = threadIdx.x % 32, chunk = lane % 8, first = threadIdx.x / 32 * 16 + lane / 8;
  const int span = span_of(call, row);
  const int* table = call.indices + static_cast<int64_t>(row) * call.topk;
  auto slot_of = [&](int column) {
    const int slot = column < span ? table[column] : -1;
    return slot < call.num_keys ? slot : -1;
  };
  int next[4];
#pragma unroll
  for (int i = 0; i < 4; i++) next[i] = slot_of(first + i * 4);
  const uint32_t tiles = sm90::shared_address(shared.keys);
#pragma unroll 1
  for (int n = 0; n < blocks; n++) {
    sm90::wait(&shared.keys_empty, (n & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = first + i * 4, slot = next[i];
      if (chunk == 0) shared.slots[n & 1][key] = slot < 0 ? -1 : slot;
      const uint8_t* from =
          reinterpret_cast<const uint8_t*>(call.kv + static_cast<int64_t>(max(slot, 0)) * kDim) + chunk * 16;
      const uint32_t to = chunk_of(tiles, key, chunk);
#pragma unroll
      for (int tile = 0; tile < Shared<kDim>::kTiles; tile++)
        sm90::copy_async(to + tile * kTile, from + tile * 128, slot >= 0);
    }
    sm90::arrive_after_copies(&shared.keys_full);
    __syncwarp();
    sm90::arrive_warp(&shared.keys_full, lane);  // arrivals of copies release no slots
#pragma unroll
    for (int i = 0; i < 4; i++) next[i] = slot_of((n + 1) * kBlock + first + i * 4);
  }
  sm90::wait_copies();
}

// Copies 64 heads' rows of some tiles; zeros for heads that do not exist. For the consumers' threads.
template <int kTiles>
__device__ __forceinline__ void copy_heads(uint32_t to, const __nv_bfloat16* from, int heads) {
  const int thread = threadIdx.x - 128;
#pragma unroll 4
  for (int i = thread; i < kHeads * kTiles * 8; i += kConsumers) {
    const int head = i / (kTiles * 8), at = i % (kTiles * 8);
    sm90::copy_async(chunk_of(to + at / 8 * kTile, head, at % 8), from + (head < heads ? head : 0) * kTiles * 64 + at * 8,
                     head < heads);
  }
}

// Adds a warpgroup's sums of 64 keys x 16 kSixteens columns to the keys' rows, from `columns` of the first row on. A
// thread has sums of two keys, whose rows are `slot` and `slot_8`, or -1.
// Lanes trade their sums first, so that eight of them add a whole line of 128 bytes: the L2 takes few requests, and
// additions are what it is busy with. A quad of lanes has a row's 16 columns, and then two rows' quads trade.
template <int kDim, int kSixteens>
__device__ __forceinline__ void add_rows(float* columns, int slot, int slot_8, const float* sums) {
  static_assert(kSixteens % 2 == 0);
  const int lane = threadIdx.x % 32;
  const bool odd = lane & 1, high = lane & 2, lower = lane & 4;
  auto traded = [](float2 x, int with) -> float2 {
    return {__shfl_xor_sync(~0u, x.x, with), __shfl_xor_sync(~0u, x.y, with)};
  };
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int own = half ? slot_8 : slot, others = __shfl_xor_sync(~0u, own, 4);
    const int above = lower ? others : own, below = lower ? own : others;
    float* to_above = columns + static_cast<int64_t>(max(above, 0)) * kDim + lane % 8 * 4;
    float* to_below = columns + static_cast<int64_t>(max(below, 0)) * kDim + lane % 8 * 4;
#pragma unroll
    for (int sixteen = 0; sixteen < kSixteens; sixteen += 2) {
      float2 left[2], right[2];  // four neighbouring columns of this lane's row, of two sixteens
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float* sum = sums + (sixteen + i) * 8 + half * 2;
        const float2 a = {sum[0], sum[1]}, b = {sum[4], sum[5]};
        float2 got = traded(high ? a : b, 2);
        const float2 x = high ? got : a, y = high ? b : got;
        got = traded(odd ? x : y, 1);
        left[i] = odd ? got : x, right[i] = odd ? y : got;
      }
      const float2 x = traded(lower ? left[0] : left[1], 4), y = traded(lower ? right[0] : right[1], 4);
      const float4 got = {x.x, x.y, y.x, y.y};
      const float4 first = {left[0].x, left[0].y, right[0].x, right[0].y};
      const float4 last = {left[1].x, left[1].y, right[1].x, right[1].y};
      if (above >= 0) sm90::add_in_global(to_above + sixteen * 16, lower ? got : first);
      if (below >= 0) sm90::add_in_global(to_below + sixteen * 16, lower ? last : got);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void sum_keys(const Call& call, Shared<kDim>& shared, int row, int first_head, int blocks,
                                         int side) {
  constexpr int kTiles = Shared<kDim>::kTiles;
  constexpr bool kHasRope = kDim > kValues;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32 % 4), 0);
  const int heads = min(call.heads - first_head, kHeads);
  const int64_t first = static_cast<int64_t>(row) * call.heads + first_head;
  const uint32_t queries = sm90::shared_address(shared.queries), grads = sm90::shared_address(shared.grads);
  const uint32_t keys = sm90::shared_address(shared.keys);
  const uint32_t scores = sm90::shared_address(shared.scores), weights = sm90::shared_address(shared.weights);
  copy_heads<kTiles>(queries, call.q + first * kDim, heads);
  copy_heads<kValues / 64>(grads, call.grad + first * kValues, heads);

  // Of the two heads of which this thread has scores.
  const int own = warp * 16 + lane / 4;
  float lse[2], factor[2], offset[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int head = own + i * 8;
    const bool live = head < heads;
    const float natural = live ? call.lse[first + head] : INFINITY;
    lse[i] = natural == -INFINITY ? INFINITY : natural * kLog2E;
    factor[i] = live ? call.factor[first + head] : 0.f;
    offset[i] = live ? call.offset[first + head] : 0.f;
  }
  float dq[2][64] = {}, dq_rope[kHasRope ? 32 : 1] = {};
  sm90::wait_copies();
  sm90::fence_matrix_reads();
  sm90::sync_threads(kReadBarrier, kConsumers);

#pragma unroll 1
  for (int n = 0; n < blocks; n++) {
    float s[16], dp[16];
    sm90::wait(&shared.keys_full, n & 1);
    sm90::fence_matrix_reads();
    sm90::begin_products();
#pragma unroll
    for (int k = 0; k < kTiles * 4; k++) {
      const uint32_t at = k / 4 * kTile;
      sm90::multiply<false>(s, sm90::advance(sm90::by_rows(queries + at), k % 4 * 32),
                            sm90::advance(sm90::by_rows(keys + at + side * 32 * 128), k % 4 * 32), k > 0);
    }
#pragma unroll
    for (int k = 0; k < kValues / 16; k++) {
      const uint32_t at = k / 4 * kTile;
      sm90::multiply<false>(dp, sm90::advance(sm90::by_rows(grads + at), k % 4 * 32),
                            sm90::advance(sm90::by_rows(keys + at + side * 32 * 128), k % 4 * 32), k > 0);
    }
    sm90::commit_products();
    sm90::wait_products<0>();

    const int* slots = shared.slots[n & 1];
    const int slot = slots[own], slot_8 = slots[own + 8];
    uint32_t ds[8], p[8];  // pairs
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int head = i % 2, key = side * 32 + i / 2 * 8 + lane % 4 * 2;
      float weight[2], gradient[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float exact = sm90::exp2_approx(s[i * 2 + j] * (call.scale * kLog2E) - lse[head]);
        const float probability = slots[key + j] >= 0 ? exact : 0.f;
        weight[j] = probability * factor[head];
        gradient[j] = probability * (dp[i * 2 + j] * factor[head] - offset[head]) * call.scale;
      }
      ds[i] = sm90::rounded({gradient[0], gradient[1]}), p[i] = sm90::rounded({weight[0], weight[1]});
    }
    sm90::sync_threads(kReadBarrier, kConsumers);  // the block before has been summed
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = warp * 16 + lane / 8 % 2 * 8 + lane % 8, chunk = side * 4 + i * 2 + lane / 16;
      sm90::store_matrices(chunk_of(scores, head, chunk), {ds[i * 4], ds[i * 4 + 1], ds[i * 4 + 2], ds[i * 4 + 3]});
      sm90::store_matrices(chunk_of(weights, head, chunk), {p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3]});
    }
    sm90::fence_matrix_reads();
    sm90::sync_threads(kWrittenBarrier, kConsumers);

    sm90::begin_products();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        sm90::multiply_by_columns<false>(dq[half], sm90::advance(sm90::by_rows(scores), k * 32),
                                  sm90::advance(sm90::by_columns(keys + (side * 4 + half * 2) * kTile), k * 2048), true);
    if constexpr (kHasRope) {
      if (side == 0)
#pragma unroll
        for (int k = 0; k < 4; k++)
          sm90::multiply_by_columns<false>(dq_rope, sm90::advance(sm90::by_rows(scores), k * 32),
                                              sm90::advance(sm90::by_columns(keys + 8 * kTile), k * 2048), true);
    }
    sm90::commit_products();
    auto start = [&](int step, float (&sums)[32]) {  // of 64 columns
      const uint32_t at = (side * 4 + step) * kTile;
      sm90::begin_products();
#pragma unroll
      for (int k = 0; k < 4; k++)
        sm90::multiply_by_columns<true>(sums, sm90::advance(sm90::by_columns(scores), k * 2048),
                                        sm90::advance(sm90::by_columns(queries + at), k * 2048), k > 0);
#pragma unroll
      for (int k = 0; k < 4; k++)
        sm90::multiply_by_columns<true>(sums, sm90::advance(sm90::by_columns(weights), k * 2048),
                                        sm90::advance(sm90::by_columns(grads + at), k * 2048), true);
      sm90::commit_products();
    };
    // One step's sums are added while the next one's products run, if registers suffice for two.
    constexpr int kBuffers = kHasRope ? 1 : 2;
    float dk[kBuffers][32];
    start(0, dk[0]);
    sm90::wait_products<1>();
    sm90::arrive_warp(&shared.keys_empty, lane);
#pragma unroll
    for (int step = 0; step < 4; step++) {
      if (kBuffers == 2 && step < 3) {
        start(step + 1, dk[(step + 1) % kBuffers]);
        sm90::wait_products<1>();
      } else {
        sm90::wait_products<0>();
      }
      add_rows<kDim, 4>(call.dkv + side * 256 + step * 64, slot, slot_8, dk[step % kBuffers]);
      if (kBuffers == 1 && step < 3) start(step + 1, dk[0]);
    }
    if constexpr (kHasRope) {
      if (side == 1) {
        sm90::begin_products();
#pragma unroll
        for (int k = 0; k < 4; k++)
          sm90::multiply_by_columns<true>(dk[0], sm90::advance(sm90::by_columns(scores), k * 2048),
                                          sm90::advance(sm90::by_columns(queries + 8 * kTile), k * 2048), k > 0);
        sm90::commit_products();
        sm90::wait_products<0>();
        add_rows<kDim, 4>(call.dkv + kValues, slot, slot_8, dk[0]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int head = own + i * 8;
    if (head >= heads) continue;
    __nv_bfloat16* out = call.dq + (first + head) * kDim + lane % 4 * 2;
    auto store = [&](int column, float x, float y) {
      *reinterpret_cast<uint32_t*>(out + column) = sm90::rounded({x, y});
    };
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 16; j++)
        store(side * 256 + half * 128 + j * 8, dq[half][j * 4 + i * 2], dq[half][j * 4 + i * 2 + 1]);
    if constexpr (kHasRope) {
      if (side == 0)
#pragma unroll
        for (int j = 0; j < 8; j++) store(kValues + j * 8, dq_rope[j * 4 + i * 2], dq_rope[j * 4 + i * 2 + 1]);
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) sparse_backward_kernel(const __grid_constant__ Call call) {
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(sm90::aligned_memory());
  const int row = blockIdx.x / call.tiles, first_head = blockIdx.x % call.tiles * kHeads;
  const int blocks = (span_of(call, row) + kBlock - 1) / kBlock;
  if (threadIdx.x == 0) {
    sm90::init(&shared.keys_full, 128 + 4 * sm90::kArrivalsOfWarp);
    sm90::init(&shared.keys_empty, 8 * sm90::kArrivalsOfWarp);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    sm90::shrink_registers<kCopyRegisters>();
    copy_keys<kDim>(call, shared, row, blocks);
  } else {
    sm90::grow_registers<kSumRegisters>();
    sum_keys<kDim>(call, shared, row, first_head, blocks, warpgroup - 1);
  }
}

}  // namespace sparse_backward
