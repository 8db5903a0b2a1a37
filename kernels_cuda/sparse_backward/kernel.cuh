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
// One warpgroup copies a block's rows of keys. The other two, the consumers, have 2.5 of the five products each: one
// scores the block, the other sums its dK and adds it to dkv, and each sums half of the columns of dq. So a block's dK
// is added while the next block is scored. dK needs no keys: once dq has been summed the keys' buffer is free, and the
// next block's rows arrive meanwhile.

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
constexpr int kCopyRegisters = 24, kConsumerRegisters = 240;  // of a thread: 24 + 2 x 240 of 3 x 168
constexpr int kTile = sm90::kTileBytes;
constexpr float kLog2E = 1.4426950408889634f;

constexpr int kReadBarrier = 1;  // a named barrier: the consumers have read queries and gradients

struct Call {
  const __nv_bfloat16 *q, *kv, *grad;     // [rows, heads, dim], [num_keys, dim], [rows, heads, 512]
  const int *indices, *lengths;           // [rows, topk]; [rows], or null
  const float *lse, *factor, *offset;     // [rows, heads]; lse is natural, without the sink
  __nv_bfloat16* dq;                      // [rows, heads, dim]
  float* dkv;                             // [num_keys, dim], zeros; columns in the order of add_rows
  float scale;                            // of the scores
  int heads, topk, num_keys, tiles;       // tiles of 64 heads
};

template <int kDim>
struct Shared {
  static constexpr int kTiles = kDim / 64;
  static constexpr int kScored = kDim > kValues ? 1 : 2;  // blocks whose ds and p are held at once
  uint8_t queries[kTiles][kTile], grads[kValues / 64][kTile], keys[kTiles][kTile];
  uint8_t scores[kScored][kTile], weights[kScored][kTile];  // ds and p x factor of a block: heads x keys
  int slots[2][kBlock];                                     // of two blocks' keys; -1: no key
  Barrier keys_full, keys_empty, scores_full[kScored], scores_empty[kScored];
};

template <int kDim>
constexpr int kSharedBytes = sizeof(Shared<kDim>);
static_assert(kSharedBytes<512> <= 232448 && kSharedBytes<576> <= 232448);

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

// Adds a warpgroup's sums of 64 keys x 64 columns to the keys' rows, from `columns` of the first row on. A thread has sums
// of two keys, whose rows are `slot` and `slot_8`, or -1. Of each 16 columns it has two twice, 8 apart: these four are
// neighbours in dkv, so dkv's columns are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
//
// First, lanes of two keys trade sums, so that eight lanes have 32 columns of one key, and add a whole line of 128
// bytes. This makes fewer requests to the L2, which the additions keep busy. All trades of sums come before the
// additions, because they would have to wait behind them.
template <int kDim>
__device__ __forceinline__ void add_rows(float* columns, int slot, int slot_8, float (&sums)[32]) {
  const bool lower = threadIdx.x & 4;
#pragma unroll
  for (int line = 0; line < 2; line++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float &first = sums[line * 16 + i], &second = sums[line * 16 + i + 8];
      const float got = __shfl_xor_sync(~0u, lower ? first : second, 4);
      (lower ? first : second) = got;
    }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int own = half ? slot_8 : slot, others = __shfl_xor_sync(~0u, own, 4);
    const int rows[2] = {lower ? others : own, lower ? own : others};
#pragma unroll
    for (int key = 0; key < 2; key++) {
      float* to = columns + static_cast<int64_t>(max(rows[key], 0)) * kDim + threadIdx.x % 8 * 4;
#pragma unroll
      for (int line = 0; line < 2; line++) {
        const float* sum = sums + line * 16 + key * 8 + half * 2;
        if (rows[key] >= 0) sm90::add_in_global(to + line * 32, {sum[0], sum[1], sum[4], sum[5]});
      }
    }
  }
}

// Products of 64 heads' rows with 64 keys' rows, of 64 kTiles columns.
template <int kTiles>
__device__ __forceinline__ void multiply_rows(float (&scores)[32], uint32_t heads, uint32_t keys) {
#pragma unroll
  for (int k = 0; k < kTiles * 4; k++)
    sm90::multiply<false>(scores, sm90::advance(sm90::by_rows(heads + k / 4 * kTile), k % 4 * 32),
                          sm90::advance(sm90::by_rows(keys + k / 4 * kTile), k % 4 * 32), k > 0);
}

// sums += a b, or = where `add` is false. The product sums over the 64 rows of b and the columns of a, or the rows of a
// where `kByColumns`.
template <bool kByColumns, int kSums>
__device__ __forceinline__ void sum_columns(float (&sums)[kSums], uint32_t a, uint32_t b, bool add) {
#pragma unroll
  for (int k = 0; k < 4; k++)
    sm90::multiply_by_columns<kByColumns>(
        sums, kByColumns ? sm90::advance(sm90::by_columns(a), k * 2048) : sm90::advance(sm90::by_rows(a), k * 32),
        sm90::advance(sm90::by_columns(b), k * 2048), add || k > 0);
}

// A block's dq of the 256 columns that begin at `keys`.
__device__ __forceinline__ void sum_queries(float (&dq)[2][64], uint32_t scores, uint32_t keys) {
#pragma unroll
  for (int half = 0; half < 2; half++) sum_columns<false>(dq[half], scores, keys + half * 2 * kTile, true);
}

// Stores a warpgroup's sums, of 64 heads x 8 kEights columns, from `columns` of the first head on.
template <int kDim, int kEights>
__device__ __forceinline__ void store_queries(__nv_bfloat16* columns, int heads, const float* dq) {
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int head = own + i * 8;
    if (head >= heads) continue;
    uint32_t* out = reinterpret_cast<uint32_t*>(columns + head * kDim + lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < kEights; j++) out[j * 4] = sm90::rounded({dq[j * 4 + i * 2], dq[j * 4 + i * 2 + 1]});
  }
}

// Scores all blocks' keys, and sums the first half of dq.
template <int kDim>
__device__ __forceinline__ void score_keys(const Call& call, Shared<kDim>& shared, int64_t first, int heads, int blocks) {
  constexpr int kScored = Shared<kDim>::kScored;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32 % 4), 0);
  const uint32_t queries = sm90::shared_address(shared.queries), grads = sm90::shared_address(shared.grads);
  const uint32_t keys = sm90::shared_address(shared.keys);

  // Of the two heads of which this thread has scores.
  float lse[2], factor[2], offset[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int head = warp * 16 + lane / 4 + i * 8;
    const bool live = head < heads;
    const float natural = live ? call.lse[first + head] : INFINITY;
    lse[i] = natural == -INFINITY ? INFINITY : natural * kLog2E;
    factor[i] = live ? call.factor[first + head] : 0.f;
    offset[i] = live ? call.offset[first + head] : 0.f;
  }
  float dq[2][64] = {};

#pragma unroll 1
  for (int n = 0; n < blocks; n++) {
    const int at = n % kScored, phase = n / kScored & 1;
    const uint32_t scores = sm90::shared_address(shared.scores[at]), weights = sm90::shared_address(shared.weights[at]);
    float s[32], dp[32];
    sm90::wait(&shared.keys_full, n & 1);
    sm90::fence_matrix_reads();
    sm90::begin_products();
    multiply_rows<kDim / 64>(s, queries, keys);
    multiply_rows<kValues / 64>(dp, grads, keys);
    sm90::commit_products();
    sm90::wait_products<0>();

    const int* slots = shared.slots[n & 1];
    uint32_t ds[16], p[16];  // pairs
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int head = i % 2, key = i / 2 * 8 + lane % 4 * 2;
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
    sm90::wait(&shared.scores_empty[at], phase ^ 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = warp * 16 + lane / 8 % 2 * 8 + lane % 8, chunk = i * 2 + lane / 16;
      sm90::store_matrices(chunk_of(scores, head, chunk), {ds[i * 4], ds[i * 4 + 1], ds[i * 4 + 2], ds[i * 4 + 3]});
      sm90::store_matrices(chunk_of(weights, head, chunk), {p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3]});
    }
    sm90::fence_matrix_reads();
    __syncwarp();
    sm90::arrive_warp(&shared.scores_full[at], lane);
    sm90::wait(&shared.scores_full[at], phase);
    sm90::begin_products();
    sum_queries(dq, scores, keys);
    sm90::commit_products();
    sm90::wait_products<0>();
    sm90::arrive_warp(&shared.keys_empty, lane);
  }
  store_queries<kDim, 32>(call.dq + first * kDim, heads, dq[0]);
}

// Sums all blocks' dK and adds it, and sums the second half of dq.
template <int kDim>
__device__ __forceinline__ void sum_keys(const Call& call, Shared<kDim>& shared, int64_t first, int heads, int blocks) {
  constexpr bool kHasRope = kDim > kValues;
  constexpr int kScored = Shared<kDim>::kScored, kSteps = Shared<kDim>::kTiles, kBuffers = kHasRope ? 1 : 2;
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const uint32_t queries = sm90::shared_address(shared.queries), grads = sm90::shared_address(shared.grads);
  const uint32_t keys = sm90::shared_address(shared.keys);
  float dq[2][64] = {}, dq_rope[kHasRope ? 32 : 1] = {};

#pragma unroll 1
  for (int n = 0; n < blocks; n++) {
    const int at = n % kScored;
    const uint32_t scores = sm90::shared_address(shared.scores[at]), weights = sm90::shared_address(shared.weights[at]);
    auto start = [&](int step, float (&sums)[32]) {  // of 64 columns
      sm90::begin_products();
      sum_columns<true>(sums, scores, queries + step * kTile, false);
      if (step < kValues / 64) sum_columns<true>(sums, weights, grads + step * kTile, true);
      sm90::commit_products();
    };
    sm90::wait(&shared.scores_full[at], n / kScored & 1);
    sm90::fence_matrix_reads();
    const int slot = shared.slots[n & 1][own], slot_8 = shared.slots[n & 1][own + 8];
    sm90::begin_products();
    sum_queries(dq, scores, keys + kValues / 128 * kTile);
    if constexpr (kHasRope) sum_columns<false>(dq_rope, scores, keys + kValues / 64 * kTile, true);
    sm90::commit_products();
    // One step's sums are added while the next one's products run, if registers suffice for two.
    float dk[kBuffers][32];
    start(0, dk[0]);
    sm90::wait_products<1>();
    sm90::arrive_warp(&shared.keys_empty, lane);
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const bool last = step == kSteps - 1;
      if (kBuffers == 2 && !last) {
        start(step + 1, dk[(step + 1) % kBuffers]);
        sm90::wait_products<1>();
      } else {
        sm90::wait_products<0>();
      }
      if (last) sm90::arrive_warp(&shared.scores_empty[at], lane);
      add_rows<kDim>(call.dkv + step * 64, slot, slot_8, dk[step % kBuffers]);
      if (kBuffers == 1 && !last) start(step + 1, dk[0]);
    }
  }
  store_queries<kDim, 32>(call.dq + first * kDim + kValues / 2, heads, dq[0]);
  if constexpr (kHasRope) store_queries<kDim, 8>(call.dq + first * kDim + kValues, heads, dq_rope);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) sparse_backward_kernel(const __grid_constant__ Call call) {
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(sm90::aligned_memory());
  const int row = blockIdx.x / call.tiles, first_head = blockIdx.x % call.tiles * kHeads;
  const int blocks = (span_of(call, row) + kBlock - 1) / kBlock;
  if (threadIdx.x == 0) {
    sm90::init(&shared.keys_full, 128 + 4 * sm90::kArrivalsOfWarp);
    sm90::init(&shared.keys_empty, 8 * sm90::kArrivalsOfWarp);
    for (int i = 0; i < Shared<kDim>::kScored; i++) {
      sm90::init(&shared.scores_full[i], 4 * sm90::kArrivalsOfWarp);
      sm90::init(&shared.scores_empty[i], 4 * sm90::kArrivalsOfWarp);
    }
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    sm90::shrink_registers<kCopyRegisters>();
    copy_keys<kDim>(call, shared, row, blocks);
    return;
  }
  sm90::grow_registers<kConsumerRegisters>();
  const int heads = min(call.heads - first_head, kHeads);
  const int64_t first = static_cast<int64_t>(row) * call.heads + first_head;
  copy_heads<kDim / 64>(sm90::shared_address(shared.queries), call.q + first * kDim, heads);
  copy_heads<kValues / 64>(sm90::shared_address(shared.grads), call.grad + first * kValues, heads);
  sm90::wait_copies();
  sm90::fence_matrix_reads();
  sm90::sync_threads(kReadBarrier, kConsumers);
  if (warpgroup == 1)
    score_keys<kDim>(call, shared, first, heads, blocks);
  else
    sum_keys<kDim>(call, shared, first, heads, blocks);
}

}  // namespace sparse_backward
