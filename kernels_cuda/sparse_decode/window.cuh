// The window kernel, for rows of at most 128 keys of one cache: one thread block for a row and 64 of its heads, which
// brings all the keys at once. There is no schedule, no part of a row and no loop over rows. Its results equal those of
// the persistent kernel to the bit: the same products and sums, in the same order.

#pragma once

#include "attend.cuh"
#include "keys.cuh"

namespace sparse_decode {

// The formats of window layers that have the kernel: those whose rows have eight tiles of 64 columns, all in V.
template <Format kFormat>
constexpr bool kHasWindow = kFormat == kV4 || kFormat == kV41 || kFormat == kV4Bf16;

template <Format kFormat>
struct WindowShared {
  static constexpr int kTiles = 8;
  static_assert(Layout<kFormat>::kTiles == kTiles);
  uint8_t keys[kWindowBlocks][kTiles][kTileBytes];  // rows are tokens
  uint8_t queries[kTiles][kTileBytes];              // rows are heads
  uint8_t weights[kWindowBlocks][kTileBytes];       // rows are heads
  float reference[kWindowBlocks][kHeads];           // the base-2 score whose weight is 1, as of this block
  float rescale[kHeads];                            // factors of the first block's sums
  float weight_sums[kWindowBlocks][kHeads];
  Scales<kFormat> scales[kWindowBlocks * kBlock];
  uint8_t exists[kWindowBlocks][kBlock];  // of each key
};

// The work of a thread. Four neighbouring threads bring one key. The first and the third warpgroup score and weigh one
// block of keys each; then every warpgroup sums 128 columns of V.
template <Format kFormat>
struct WindowRow {
  using L = Layout<kFormat>;
  using Memory = WindowShared<kFormat>;
  static constexpr int kScoreBarrier = 1;  // of the two warpgroups that score

  const Call& call;
  Memory& shared;
  int row = blockIdx.y, first_head = blockIdx.x * kHeads, heads = call.heads - first_head;
  int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), warpgroup = warp / 4;
  int part = lane % 4, token = threadIdx.x / 4, block = warpgroup / 2, tile_row = warp % 4 * 16 + lane / 4;

  __device__ __forceinline__ WindowRow(const Call& call, Memory& shared) : call(call), shared(shared) {}

  __device__ __forceinline__ const __nv_bfloat16* queries() const {
    return call.q + (static_cast<int64_t>(row) * call.heads + first_head) * L::kQkDim;
  }

  // Starts the copies of the queries. Heads that the tile lacks become zeros.
  __device__ __forceinline__ void copy_queries() const {
    int head = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const __nv_bfloat16* at = queries() + head * L::kQkDim + chunk * 8;
    uint32_t to = sm90::shared_address(shared.queries) + head * 128 + (chunk ^ head % 8) * 16;
#pragma unroll
    for (int tile = 0; tile < Memory::kTiles; tile++)
      sm90::copy_async(to + tile * kTileBytes, at + tile * 64, head < heads);
  }

  // The swizzled place of the first of a thread's two chunks of a tile; the other one is in the neighbouring 16 bytes.
  __device__ __forceinline__ uint32_t place() const {
    return sm90::shared_address(shared.keys[block]) + token % kBlock * 128 + (2 * part ^ token % 8) * 16;
  }

  // Starts the copies of the key. FP8 values wait in the first of the two chunks that the same thread makes of them.
  __device__ __forceinline__ void bring(int slot) const {
    const Table& table = call.tables[0];
    bool exists = is_slot(table, slot);
    Source source = locate<kFormat>(table, call.places[0], slot);
    if (part == 0) shared.exists[block][token % kBlock] = exists;
    if constexpr (L::kIsBf16) {
      copy_tiles<0, Memory::kTiles>(exists ? source.row : table.data, exists);
    } else {
      if (part == 0)
        sm90::copy_async_small<Scales<kFormat>::kBytes>(sm90::shared_address(&shared.scales[token]), source.scales);
#pragma unroll
      for (int tile = 0; tile < L::kFp8Tiles; tile++)
        sm90::copy_async(place() + tile * kTileBytes, source.row + tile * 64 + part * 16, true);
      if constexpr (L::kHasRope) copy_tiles<L::kFp8Tiles, 1>(source.row + L::kRopeByte, true);
    }
  }

  template <int kFirst, int kCount>
  __device__ __forceinline__ void copy_tiles(const uint8_t* from, bool exists) const {
    uint32_t to = place() + kFirst * kTileBytes;
    from += part * 32;
#pragma unroll
    for (int tile = 0; tile < kCount; tile++) {
      sm90::copy_async(to + tile * kTileBytes, from + tile * 128, exists);
      sm90::copy_async((to ^ 16) + tile * kTileBytes, from + tile * 128 + 16, exists);
    }
  }

  // Converts half of the columns, which were copied. A loop is less code to fetch, and the warps hide its latency.
  template <int kHalf>
  __device__ __forceinline__ void convert_half() const {
    if constexpr (!L::kIsBf16) {
      constexpr int kFirst = kHalf * L::kHalfTiles, kLast = kHalf ? L::kFp8Tiles : L::kHalfTiles;
      const HalfScales<kFormat> of_half(shared.scales[token], kHalf, part);
      uint32_t to = place() + kFirst * kTileBytes;
#pragma unroll 1
      for (int tile = 0; tile < kLast - kFirst; tile++, to += kTileBytes) {
        uint4 x = sm90::load(to);
        auto scale = of_half.of_tile(tile);
        convert<kFormat>(x.x, x.y, scale, to);
        convert<kFormat>(x.z, x.w, scale, to ^ 16);
      }
    }
  }

  // Starts S = Q Kᵀ of the warpgroup's block for the columns of one half of V; the second half adds to the first.
  template <int kHalf>
  __device__ __forceinline__ void begin_scores(float (&scores)[32]) const {
    uint64_t q = sm90::by_rows(sm90::shared_address(shared.queries));
    uint64_t k = sm90::by_rows(sm90::shared_address(shared.keys[block]));
    sm90::fence_matrix_reads();
    sm90::begin_products();
#pragma unroll
    for (int i = kHalf * L::kHalfTiles * 4; i < (kHalf + 1) * L::kHalfTiles * 4; i++) {
      int bytes = i / 4 * kTileBytes + i % 4 * 32;
      sm90::multiply<false>(scores, sm90::advance(q, bytes), sm90::advance(k, bytes), i > 0);
    }
    sm90::commit_products();
  }

  // Weighs the warpgroup's block. The second block's reference follows from the first one's.
  __device__ __forceinline__ void weigh_block(float (&scores)[32], Statistics& statistics) const {
    uint2 valid = {__ballot_sync(~0u, shared.exists[block][lane]), __ballot_sync(~0u, shared.exists[block][lane + 32])};
    float scale = mask_scores(scores, valid, call.scale_log2), largest[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      largest[r] = largest_score(scores, r) * scale;
      if (block == 0 && part == 0) shared.reference[0][tile_row + 8 * r] = fmaxf(largest[r], -INFINITY);
    }
    sm90::sync_threads(kScoreBarrier, 256);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (block == 1) statistics.reference[r] = shared.reference[0][tile_row + 8 * r];
      float rescale = weigh_head(scores, r, largest[r], scale, statistics);
      if (block == 1 && part == 0) {
        shared.rescale[tile_row + 8 * r] = rescale;
        shared.reference[1][tile_row + 8 * r] = statistics.reference[r];
      }
    }
    store_weights(scores, sm90::shared_address(shared.weights[block]));
  }

  // Starts O += P V of a block for the warpgroup's columns; O = P V for the first block.
  template <int kBlockOfRow>
  __device__ __forceinline__ void begin_sums(float (&sums)[64]) const {
    uint64_t p = sm90::by_rows(sm90::shared_address(shared.weights[kBlockOfRow]));
    uint64_t v = sm90::by_columns(sm90::shared_address(shared.keys[kBlockOfRow][warpgroup * 2]));
    sm90::begin_products();
#pragma unroll
    for (int i = 0; i < kBlock / 16; i++)
      sm90::multiply_by_columns<false>(sums, sm90::advance(p, i * 32), sm90::advance(v, i * 16 * 128),
                                       kBlockOfRow > 0 || i > 0);
    sm90::commit_products();
  }

  __device__ __forceinline__ void attend() {
    const Table& table = call.tables[0];
    int slot = token < table.topk ? __ldg(table.indices + row * table.stride + token) : -1;
    int length = given_length(table, row);  // loaded beside the slot
    copy_queries();
    __syncwarp();  // so that the compiler does not let these copies wait for the slot
    bring(token < length ? slot : -1);
    float sinks[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
      sinks[r] = call.sink && tile_row + 8 * r < heads ? call.sink[first_head + tile_row + 8 * r] * kLog2E : -INFINITY;
    sm90::wait_copies();
    __syncwarp();
    convert_half<0>();
    __syncthreads();  // the first half of the keys is there, and what is copied
    bool scores = warpgroup % 2 == 0;
    float products[32];
    Statistics statistics;
    if (scores) begin_scores<0>(products);
    convert_half<1>();
    __syncthreads();  // the second half is there
    if (scores) {
      begin_scores<1>(products);
      sm90::wait_products<0>();
      weigh_block(products, statistics);
    }
    __syncthreads();  // weights are there

    float sums[1][64];
    sm90::fence_matrix_reads();
    begin_sums<0>(sums[0]);
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      rescale[r] = shared.rescale[tile_row + 8 * r];
      if (!scores) continue;
      float sum = over_quad(block == 0 ? statistics.sum[r] * rescale[r] : statistics.sum[r], total);
      if (part == 0) shared.weight_sums[block][tile_row + 8 * r] = sum;
    }
    sm90::wait_products<0>();
    rescale_sums(sums, rescale[0], rescale[1]);
    begin_sums<1>(sums[0]);
    __syncthreads();  // sums of weights are there
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = tile_row + 8 * r;
      float sum = shared.weight_sums[0][head] + shared.weight_sums[1][head];
      factors[r] = finish(call, sum, shared.reference[1][head], sinks[r], row, first_head + head, head, true, 0,
                          warpgroup == 0);
    }
    sm90::wait_products<0>();
    int64_t to = (static_cast<int64_t>(row) * call.heads + first_head + tile_row) * kValues + warpgroup * 128;
    store_out(sums, factors, call.out + to, heads - tile_row);
  }
};

}  // namespace sparse_decode
