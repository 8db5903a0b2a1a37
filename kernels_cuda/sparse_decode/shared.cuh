// Shared memory of the persistent SM90 sparse decode kernel, and most of that of the wide cluster kernel.

#pragma once

#include "../sm90.cuh"
#include "schedule.cuh"

namespace sparse_decode {

using sm90::Barrier;
using sm90::kTileBytes;

// Of the caches of a call. kV41: V4.1's FP8 rows; kV41Fp4: its FP4 rows in the second cache. The last two: bfloat16 rows.
enum Format { kV4, kV32, kV41, kV41Fp4, kV4Bf16, kV32Bf16 };

template <Format kFormat>
struct Layout {
  static constexpr bool kIsV41 = kFormat == kV41 || kFormat == kV41Fp4;
  static constexpr bool kIsBf16 = kFormat == kV4Bf16 || kFormat == kV32Bf16;
  // Behind the other tiles, in bfloat16. V4.1 quantises whole rows, and V4's bfloat16 rows are all alike.
  static constexpr bool kHasRope = !kIsV41 && kFormat != kV4Bf16;
  static constexpr int kFp8Tiles = kFormat == kV4 ? 7 : 8;  // of 64 values; without rope, where none are FP8
  static constexpr int kTiles = kFp8Tiles + kHasRope;       // and the rope part
  static constexpr int kQkDim = 64 * kTiles;
  static constexpr int kHalfTiles = 4;  // of the first half of V; the second half has the rope part too
  static constexpr int kParts = kIsBf16 ? 4 : 1;  // of a block's keys, whose places are free one after the other
  static constexpr int kRowBytes =
      kIsBf16 ? kQkDim * 2 : kFormat == kV4 ? 576 : kFormat == kV32 ? 656 : 512;  // V4.1's without scales
  static constexpr int kRopeByte = kIsBf16 ? 1024 : kFormat == kV4 ? 448 : 528;
};

constexpr int kWeightTile = 8;
constexpr int kAhead = 4;  // stages of slots, rows and scales
constexpr int kKnown = 8;  // stages of what is needed until a block's weights are computed

// A key's scales, as in the cache.
template <Format kFormat>
struct Scales;

template <>
struct alignas(8) Scales<kV4> {
  static constexpr int kBytes = 8;
  uint32_t exponents[2];  // of four tiles each; the last byte is unused
};

template <>
struct alignas(16) Scales<kV41> {
  static constexpr int kBytes = 16;
  uint2 exponents[2];  // of four tiles each, two of a tile
};

template <>
struct Scales<kV41Fp4> : Scales<kV41> {
  uint4 more;  // an FP4 row has 32 e4m3 scales, of 16 values each
};

template <>
struct alignas(16) Scales<kV32> {
  static constexpr int kBytes = 16;
  float2 of_128[2];  // of 128 values each
};

struct NoScales {
  static constexpr int kBytes = 0;
};

template <>
struct Scales<kV4Bf16> : NoScales {};

template <>
struct Scales<kV32Bf16> : NoScales {};

struct Barriers {
  Barrier slots_full[kAhead], rows_full[kAhead], scales_full[kAhead], rows_empty[kAhead];
  Barrier keys_full[2][2], keys_empty[2][2];  // of either half of V; where keys have parts, keys_empty is of the last
  Barrier weights_full[2], queries_empty;
};

// keys_empty of the parts before the last.
template <int kParts>
struct BarriersOfParts {
  Barrier keys_empty[kParts - 1][2][2];
};

template <>
struct BarriersOfParts<1> {};

template <Format kFormat>
struct Shared {
  using L = Layout<kFormat>;
  // A block's keys in bfloat16, whose rows are tokens. The last tile holds its weights P, whose rows are heads. In V3.2
  // the rope part is there before: it is no part of V, and it has been read when P is written.
  uint8_t keys[2][kWeightTile + 1][kTileBytes];
  uint8_t queries[L::kTiles][kTileBytes];  // rows are heads
  float rescale[2][kHeads];    // factors of the sums before a block is added
  float reference[2][kHeads];  // the base-2 score whose weight is 1, from this block on
  float weight_sums[2][2][kHeads];  // of every other row, by warpgroup
  Scales<kFormat> scales[kAhead][kBlock];
  const uint8_t* rows[kAhead][kBlock];
  int slots[kAhead][kBlock];
  int seconds[kAhead];                           // whether the block's keys are of the second table
  int row_begun[kKnown];                         // by a block, or -1
  alignas(8) uint8_t valid[kKnown][kBlock / 8];  // a bit for each key
  Barriers barriers;
  Plan plan;
  int are_fp4[kAhead];  // with kV41Fp4: whether the block's rows are
  BarriersOfParts<L::kParts> parts;  // were it [[no_unique_address]], nvcc 13.0 would misplace what WideShared adds

  __device__ __forceinline__ Barrier* keys_empty(int buffer, int half, int part) {
    if constexpr (L::kParts > 1)
      if (part < L::kParts - 1) return &parts.keys_empty[part][buffer][half];
    return &barriers.keys_empty[buffer][half];
  }
};

// The n-th block's buffer, and the parity of the times that this has been filled.
struct Turn {
  int n;
  __device__ __forceinline__ int buffer() const { return n % 2; }
  __device__ __forceinline__ int parity() const { return n / 2 % 2; }
};

}  // namespace sparse_decode
