// The two consumer warpgroups. Each scores every other block of keys and sums half of V's columns over all blocks.

#pragma once

#include "join.cuh"
#include "shared.cuh"

namespace sparse_decode {

// Named barriers: one of the consumers, one of all threads once their work is done. 3 and 4 are those of the warps of one
// consumer.
constexpr int kSumBarrier = 1, kEndBarrier = 2, kScoreBarrier = 3;

// --- scores -----------------------------------------------------------------------------------------------------

// Starts S = Q Kᵀ of a block for the columns of one half of V; the second half adds to the first.
template <Format kFormat, int kHalf>
__device__ __forceinline__ void begin_scores(Shared<kFormat>& shared, Turn turn, float (&scores)[32]) {
  using L = Layout<kFormat>;
  constexpr int kFirst = kHalf * L::kHalfTiles, kLast = kHalf ? L::kTiles : L::kHalfTiles;
  uint64_t q = sm90::by_rows(sm90::shared_address(shared.queries));
  uint64_t k = sm90::by_rows(sm90::shared_address(shared.keys[turn.buffer()]));
  sm90::wait(&shared.barriers.keys_full[turn.buffer()][kHalf], turn.parity());
  sm90::fence_matrix_reads();
  sm90::begin_products();
#pragma unroll
  for (int i = 4 * kFirst; i < 4 * kLast; i++) {
    int bytes = i / 4 * kTileBytes + i % 4 * 32;
    sm90::multiply<false>(scores, sm90::advance(q, bytes), sm90::advance(k, bytes), i > 0);
  }
  sm90::commit_products();
}

// For each of a thread's two heads: the reference, which is the base-2 score whose weight is 1, and the sum of the
// weights in this thread's columns of the blocks that its warpgroup scored.
struct Statistics {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
};

__device__ __forceinline__ float over_quad(float x, float (*both)(float, float)) {
  x = both(x, __shfl_xor_sync(~0u, x, 1));
  return both(x, __shfl_xor_sync(~0u, x, 2));
}

// Updates them by the block that the other consumer scored, once its weights are there.
template <Format kFormat>
__device__ __forceinline__ void follow(const Shared<kFormat>& shared, int buffer, Statistics& statistics) {
  int tile_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    statistics.sum[r] *= shared.rescale[buffer][tile_row + 8 * r];
    statistics.reference[r] = shared.reference[buffer][tile_row + 8 * r];
  }
}

// Masks the scores of keys that do not exist. Returns the scale's magnitude: scores take its sign. The scale is not 0,
// which would make a NaN of a masked score.
__device__ __forceinline__ float mask_scores(float (&scores)[32], uint2 valid, float scale) {
  if (scale < 0) {
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] = -scores[i];
    scale = -scale;
  }
  if ((valid.x & valid.y) != ~0u) {
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      unsigned mask = i < 16 ? valid.x : valid.y;
      if (!(mask >> (i / 4 * 8 % 32 + column + i % 2) & 1)) scores[i] = -INFINITY;
    }
  }
  return scale;
}

// The largest score of one of a thread's two heads.
__device__ __forceinline__ float largest_score(const float (&scores)[32], int r) {
  float most[4];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float x = scores[i / 2 * 4 + 2 * r + i % 2];
    most[i % 4] = i < 4 ? x : fmaxf(most[i % 4], x);
  }
  return over_quad(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])), larger);
}

// Turns the scores of one of a thread's two heads into weights relative to the reference: the head's largest score so
// far, or a score at most 8 (a factor of 256) below it. Most blocks leave the reference as it is, and then nothing is
// rescaled. Returns the factor by which sums are rescaled. `largest` is that of the block, times the scale.
__device__ __forceinline__ float weigh_head(float (&scores)[32], int r, float largest, float scale,
                                            Statistics& statistics) {
  constexpr float kSlack = 8;
  float before = statistics.reference[r], sums[4] = {0, 0, 0, 0};
  bool moves = largest > before + kSlack;
  float rescale = moves ? exp2f(before - largest) : 1.0f;
  largest = moves ? largest : before;
  statistics.reference[r] = largest;
  if (largest == -INFINITY) largest = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float& x = scores[i / 2 * 4 + 2 * r + i % 2];
    x = exp2_approx(fmaf(x, scale, -largest));
    sums[i % 4] += x;
  }
  statistics.sum[r] = statistics.sum[r] * rescale + (sums[0] + sums[1] + (sums[2] + sums[3]));
  return rescale;
}

// The same for a block's scores. Returns the factors of both heads.
__device__ __forceinline__ float2 weigh(float (&scores)[32], uint2 valid, float scale, Statistics& statistics) {
  scale = mask_scores(scores, valid, scale);
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; r++)
    rescale[r] = weigh_head(scores, r, largest_score(scores, r) * scale, scale, statistics);
  return {rescale[0], rescale[1]};
}

__device__ __forceinline__ void store_weights(const float (&weights)[32], uint32_t to) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  int row = warp * 16 + lane % 16;
#pragma unroll
  for (int chunk = 0; chunk < 8; chunk += 2) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* pair = &weights[4 * chunk + 2 * i];
      x[i] = bits(__floats2bfloat162_rn(pair[0], pair[1]));
    }
    sm90::store_matrices(to + row * 128 + ((chunk + lane / 16) ^ lane % 8) * 16, x);
  }
}

// --- sums -------------------------------------------------------------------------------------------------------

template <int kCount>
__device__ __forceinline__ void rescale_sums(float (&sums)[kCount][64], float first, float second) {
  if (!__any_sync(~0u, first != 1 || second != 1)) return;
#pragma unroll
  for (int i = 0; i < kCount * 64; i++) sums[i / 64][i % 64] *= i / 2 % 2 ? second : first;
}

// Starts O += P V of a block for one half of V's columns, once its weights are there; O = P V where `add` is false.
template <bool kWide, Format kFormat>
__device__ __forceinline__ void begin_sums(Shared<kFormat>& shared, Turn turn, int half, bool add,
                                           float (&sums)[2][64]) {
  int tile_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, buffer = turn.buffer();
  sm90::wait(&shared.barriers.weights_full[buffer], turn.parity());
  sm90::fence_matrix_reads();
  if (add) rescale_sums(sums, shared.rescale[buffer][tile_row], shared.rescale[buffer][tile_row + 8]);
  uint64_t p = sm90::by_rows(sm90::shared_address(shared.keys[buffer][kWeightTile]));
  uint32_t values = sm90::shared_address(shared.keys[buffer][half * Layout<kFormat>::kHalfTiles]);
  if constexpr (kWide) values = sm90::without_rank(values);
  uint64_t v = sm90::by_columns(values);
  sm90::begin_products();
#pragma unroll
  for (int i = 0; i < kBlock / 16; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint64_t columns = sm90::advance(v, i * 16 * 128 + j * 2 * kTileBytes);
      sm90::multiply_by_columns<false>(sums[j], sm90::advance(p, i * 32), columns, add || i > 0);
    }
    if ((i + 1) % (kBlock / 16 / Layout<kFormat>::kParts) == 0) sm90::commit_products();
  }
}

// Releases a block's keys, part by part; the first part's sums are done. Behind the sums kBehind groups of products were
// started.
template <Format kFormat, int kBehind = 0, int kPart = 0>
__device__ __forceinline__ void release_keys(Shared<kFormat>& shared, Turn turn, int side) {
  constexpr int kLater = Layout<kFormat>::kParts - 1 - kPart;
  __syncwarp();
  sm90::arrive_warp(shared.keys_empty(turn.buffer(), side, kPart), threadIdx.x % 32);
  if constexpr (kLater > 0) {
    sm90::wait_products<kLater - 1 + kBehind>();
    release_keys<kFormat, kBehind, kPart + 1>(shared, turn, side);
  }
}

// The factor by which the sums of one of a thread's two heads are multiplied in the end; the sink is in base 2. The
// warpgroup with `writes` stores the lse of a whole row, or the maximum and sum by which the parts of a row are joined.
__device__ __forceinline__ float finish(const Call& call, float sum, float reference, float sink, int row, int head,
                                        int tile_row, bool whole, int part, bool writes) {
  writes = writes && head < call.heads && threadIdx.x % 4 == 0;
  if (!whole) {
    if (writes) call.part_sums[static_cast<int64_t>(part) * kHeads + tile_row] = {reference, sum};
    return 1.0f;
  }
  if (writes)
    call.lse[static_cast<int64_t>(row) * call.heads + head] =
        sum == 0 ? call.empty_lse : kLn2 * (reference + log2f(sum));
  return sum == 0 ? 0.0f : 1 / (sum + exp2f(sink - reference));
}

// Four lanes each hold one word of four chunks of 16 bytes. Afterwards each lane holds one chunk: lane 4 i + c chunk c.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&x)[4]) {
  int lane = threadIdx.x;
  bool odd = lane & 1, high = lane & 2;
  uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
  uint32_t y[4] = {odd ? a : x[0], odd ? x[1] : a, odd ? b : x[2], odd ? x[3] : b};
  uint32_t c = __shfl_xor_sync(~0u, high ? y[0] : y[2], 2), d = __shfl_xor_sync(~0u, high ? y[1] : y[3], 2);
  return high ? uint4{c, d, y[2], y[3]} : uint4{y[0], y[1], c, d};
}

// Of 128 columns or twice as many. A thread's first head is at `out`, its second at `out + 8 * kValues`.
template <int kCount>
__device__ __forceinline__ void store_out(const float (&sums)[kCount][64], const float (&factors)[2],
                                          __nv_bfloat16* out, int heads) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int chunk = 0; chunk < kCount * 16; chunk += 4) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = &sums[chunk / 16][(chunk % 16 + i) * 4 + 2 * r];
        x[i] = bits(__floats2bfloat162_rn(pair[0] * factors[r], pair[1] * factors[r]));
      }
      uint4 whole = transpose_quad(x);
      uint4* to = reinterpret_cast<uint4*>(out + r * 8 * kValues) + chunk + threadIdx.x % 4;
      if (r * 8 < heads) *to = whole;
    }
  }
}

// The same for float32, where the factors are 1. Two neighbouring lanes exchange half of two chunks of 8 columns.
__device__ __forceinline__ void store_part(const float (&sums)[2][64], const float (&factors)[2], float* to,
                                           int heads) {
  int lane = threadIdx.x;
  bool odd = lane & 1;
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int chunk = 0; chunk < 32; chunk += 2) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = sums[chunk / 16][(chunk % 16 + i / 2) * 4 + 2 * r + i % 2] * factors[r];
      float a = __shfl_xor_sync(~0u, odd ? x[0] : x[2], 1), b = __shfl_xor_sync(~0u, odd ? x[1] : x[3], 1);
      float4 half = odd ? float4{a, b, x[2], x[3]} : float4{x[0], x[1], a, b};
      float4* at = reinterpret_cast<float4*>(to + r * 8 * kValues) + (chunk + odd) * 2 + lane % 4 / 2;
      if (r * 8 < heads) *at = half;
    }
  }
}

// --- the consumer -----------------------------------------------------------------------------------------------

template <Format kFormat>
struct WideShared;
template <Format kFormat>
__device__ __forceinline__ void send_part(const Call& call, WideShared<kFormat>& shared, int side,
                                          const float (&sums)[2][64], const Statistics& statistics);

// `side` selects the half of V's columns that this consumer sums, and the blocks that it scores: those with n % 2 ==
// side. With kWide the piece is one part of a row, which is sent to the thread blocks of the cluster (wide.cuh).
template <Format kFormat, bool kWide = false>
__device__ __forceinline__ void attend_rows(const Call& call, const Piece& piece, Shared<kFormat>& shared, int tile,
                                            int side) {
  constexpr int kParts = Layout<kFormat>::kParts;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, tile_row = warp * 16 + lane / 4;
  int head = tile * kHeads + tile_row, n = 0, number = 0;  // n and number count blocks and rows
  float sinks[2];
#pragma unroll
  for (int r = 0; r < 2; r++)
    sinks[r] = call.sink && head + 8 * r < call.heads ? call.sink[head + 8 * r] * kLog2E : -INFINITY;
  float sums[2][64];  // each of 128 columns
  for (Rows rows(call, piece); rows.any(); rows.advance(call), number++) {
    int first = rows.at.block, last = rows.last();
    Statistics statistics;
    for (int block = first; block < last; block++, n++) {
      Turn turn{n};
      int buffer = turn.buffer();
      if (buffer != side) {  // the other consumer scores it
        if (first + 1 == last) sm90::arrive_warp(&shared.barriers.queries_empty, lane);
        if (block + 1 < last) continue;  // it is summed beside the scores of the next
        begin_sums<kWide>(shared, turn, side, block > first, sums);
        follow(shared, buffer, statistics);
        sm90::wait_products<kParts - 1>();
        release_keys(shared, turn, side);
        continue;
      }
      float scores[32];
      begin_scores<kFormat, 0>(shared, turn, scores);
      if (block > first) {
        begin_sums<kWide>(shared, {n - 1}, side, block > first + 1, sums);
        follow(shared, buffer ^ 1, statistics);
      } else {
        sm90::commit_products();
      }
      begin_scores<kFormat, 1>(shared, turn, scores);
      sm90::wait_products<kParts>();
      if (block > first) release_keys<kFormat, 1>(shared, {n - 1}, side);
      sm90::wait_products<0>();
      // V3.2's weights replace the rope part, which the products of all four warps read.
      if constexpr (Layout<kFormat>::kTiles > kWeightTile) sm90::sync_threads(kScoreBarrier + side, 128);
      if (block + 2 >= last) sm90::arrive_warp(&shared.barriers.queries_empty, lane);
      uint2 valid = *reinterpret_cast<const uint2*>(shared.valid[n % kKnown]);
      float2 rescale = weigh(scores, valid, call.scale_log2, statistics);
      store_weights(scores, sm90::shared_address(shared.keys[buffer][kWeightTile]));
      if (lane % 4 == 0) {
        shared.rescale[buffer][tile_row] = rescale.x;
        shared.rescale[buffer][tile_row + 8] = rescale.y;
#pragma unroll
        for (int r = 0; r < 2; r++) shared.reference[buffer][tile_row + 8 * r] = statistics.reference[r];
      }
      __syncwarp();
      sm90::arrive_warp(&shared.barriers.weights_full[buffer], lane);
      begin_sums<kWide>(shared, turn, side, block > first, sums);
      sm90::wait_products<kParts - 1>();
      release_keys(shared, turn, side);
    }

    if constexpr (kWide) {
      send_part(call, static_cast<WideShared<kFormat>&>(shared), side, sums, statistics);
      return;
    }
    // Both have summed all blocks. Each has the sums of weights of the blocks that it scored.
    float factors[2];
    bool whole = first == 0 && last == rows.lengths.blocks();
    int row = rows.at.row, part = blockIdx.x * 2 + rows.part();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      statistics.sum[r] = over_quad(statistics.sum[r], total);
      if (lane % 4 == 0) shared.weight_sums[number % 2][side][tile_row + 8 * r] = statistics.sum[r];
    }
    sm90::sync_threads(kSumBarrier, 256);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = statistics.sum[r] + shared.weight_sums[number % 2][side ^ 1][tile_row + 8 * r];
      factors[r] = finish(call, sum, statistics.reference[r], sinks[r], row, head + 8 * r, tile_row + 8 * r, whole,
                          part, side == 0);
    }
    int heads = call.heads - head;
    if (whole) {
      int64_t to = (static_cast<int64_t>(row) * call.heads + head) * kValues + side * 256;
      store_out(sums, factors, call.out + to, heads);
    } else {
      int64_t to = (static_cast<int64_t>(part) * kHeads + tile_row) * kValues + side * 256;
      store_part(sums, factors, call.part_values + to, heads);
    }
  }
}

}  // namespace sparse_decode
