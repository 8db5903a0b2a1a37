// Sparse MLA decode on SM90: attention of each row's heads over the cached rows that its indices name.
//
// One thread block on each multiprocessor, four warpgroups: one brings keys, one scores them, two sum values. docs/
// kernels.md explains the plan of shared memory, the barriers and what bounds what.

#pragma once

#include <cooperative_groups.h>
#include <cuda_fp8.h>

#include "sm90.cuh"
#include "sparse_decode_join.cuh"
#include "sparse_decode_schedule.cuh"

namespace sparse_decode {

using sm90::Barrier;
using sm90::kTileBytes;

// Registers of each thread, by role; a multiprocessor has 4 x 128 for one thread of each warpgroup.
constexpr int kKeyRegisters = 104, kScoreRegisters = 88, kSumRegisters = 160;

// Named barriers: of the scoring warpgroup, of all once their work is done, and of either summing warpgroup.
constexpr int kScoreBarrier = 1, kEndBarrier = 2, kSumBarrier = 3;

enum Format { kV4, kV32 };

template <Format kFormat>
struct Layout {
  static constexpr int kFp8Tiles = kFormat == kV4 ? 7 : 8;  // of 64 values
  static constexpr int kTiles = kFp8Tiles + 1;              // and the rope part
  static constexpr int kQkDim = 64 * kTiles;
  static constexpr int kFirstTiles = 4;  // the tiles of the first half of V; the others have barriers of their own
  static constexpr int kRowBytes = kFormat == kV4 ? 576 : 656;
  static constexpr int kRopeByte = kFormat == kV4 ? 448 : 528;
};

template <Format kFormat>
struct Shared {
  // P may be written for a block while the one before is summed, where a second buffer fits.
  static constexpr int kWeights = kFormat == kV4 ? 2 : 1;

  uint8_t keys[2][Layout<kFormat>::kTiles][kTileBytes];  // bfloat16, rows are tokens
  uint8_t queries[Layout<kFormat>::kTiles][kTileBytes];  // rows are heads
  uint8_t weights[kWeights][kTileBytes];                 // P: rows are heads
  float rescale[kWeights][kHeads];                       // what the sums are multiplied by before a block is added
  float normalise[kWeights][kHeads];                     // and after a row's last one
  uint8_t valid[2][kBlock / 8];                          // a bit for each key
  int slots[4][kBlock];                                  // of the blocks to come
  // A block's keys are full in the tiles of the first half of V, then in the others.
  Barrier keys_full[2][2], keys_empty[2], weights_full[kWeights], weights_empty[kWeights];
  Planning planning;
};

// The turn of the n-th block among `kCount` buffers.
template <int kCount>
struct Turn {
  int n;
  __device__ __forceinline__ int buffer() const { return n % kCount; }
  __device__ __forceinline__ int parity() const { return n / kCount % 2; }
};

// --- keys -------------------------------------------------------------------------------------------------------

// The blocks of a piece, one after the other.
struct Blocks {
  Rows rows;
  int block;

  __device__ __forceinline__ Blocks(const Call& call, const Piece& piece)
      : rows(call, piece), block(piece.begin.block) {}
  __device__ __forceinline__ void advance(const Call& call) {
    if (++block < rows.last()) return;
    rows.advance(call);
    block = 0;
  }
};

// Begins to copy the slots of two keys of a block, 32 apart, from its index table, if this thread is to; -1 where there
// is none. Returns whether they are of the second table.
__device__ __forceinline__ bool copy_slots(const Call& call, const Blocks& blocks, int token, int* to, bool mine) {
  Lengths lengths = blocks.rows.lengths;
  bool second = blocks.block >= lengths.first_blocks();
  const Table& table = call.tables[second];
  int column = (second ? blocks.block - lengths.first_blocks() : blocks.block) * kBlock + token;
  int length = !blocks.rows.any() ? 0 : second ? lengths.second : lengths.first;
  const int* indices = table.indices + static_cast<int64_t>(blocks.rows.at.row) * table.topk + column;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int* at = to + token + i * 32;
    if (mine && column + i * 32 < length) sm90::copy_async_4(sm90::shared_address(at), indices + i * 32);
    if (mine && column + i * 32 >= length) *at = -1;
  }
  return second;
}

// Where a key's bytes are. A slot that is none of the cache's has a row of zeros: what loads it need not ask.
struct Source {
  const uint8_t* row;
  const uint8_t* scales;  // V4
};

__device__ const uint4 zero_row[41] = {};

__device__ __forceinline__ bool is_slot(const Table& table, int slot) {
  return static_cast<unsigned>(slot) < static_cast<unsigned>(table.num_slots);
}

template <Format kFormat>
__device__ __forceinline__ Source locate(const Table& table, int slot) {
  int page_size = table.page_size.divisor, page = table.page_size.quotient(slot);
  int offset = slot - page * page_size;
  const uint8_t* begin = table.data + page * table.page_bytes;
  const uint8_t* zeros = reinterpret_cast<const uint8_t*>(zero_row);
  bool there = is_slot(table, slot);
  return {there ? begin + static_cast<int64_t>(offset) * Layout<kFormat>::kRowBytes : zeros,
          there ? begin + static_cast<int64_t>(page_size) * Layout<kFormat>::kRowBytes + offset * 8 : zeros};
}

__device__ __forceinline__ float2 two_floats(uint32_t fp8_pair) {
  __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(fp8_pair), __NV_E4M3);
  return __half22float2(__half2(halves));
}

// Scales of a key, of the four tiles of either half of V. V4 has powers of two, by which the product of bfloat16 is
// exact.
template <Format kFormat>
struct Scales;

template <>
struct Scales<kV4> {
  uint32_t exponents;
  __device__ __forceinline__ void load(const Source& source, int half) {
    exponents = __ldg(reinterpret_cast<const uint32_t*>(source.scales) + half);
  }
  __device__ __forceinline__ __nv_bfloat162 of_tile(int tile) const {
    uint32_t one = max((exponents >> 8 * tile & 255) << 7, 0x40u);  // 2^-127 is subnormal
    uint32_t both = one | one << 16;
    return *reinterpret_cast<__nv_bfloat162*>(&both);
  }
  __device__ __forceinline__ static uint32_t scaled(uint32_t fp8_pair, __nv_bfloat162 scale) {
    return bits(__hmul2(__float22bfloat162_rn(two_floats(fp8_pair)), scale));
  }
};

template <>
struct Scales<kV32> {
  float2 scales;
  __device__ __forceinline__ void load(const Source& source, int half) {
    scales = __ldg(reinterpret_cast<const float2*>(source.row + 512) + half);
  }
  __device__ __forceinline__ float of_tile(int tile) const { return tile < 2 ? scales.x : scales.y; }
  __device__ __forceinline__ static uint32_t scaled(uint32_t fp8_pair, float scale) {
    float2 x = two_floats(fp8_pair);
    return bits(__float22bfloat162_rn({x.x * scale, x.y * scale}));
  }
};

template <typename Scale, typename Of>
__device__ __forceinline__ void convert(uint4 values, Scale scale, Of of, uint32_t to_low, uint32_t to_high) {
  sm90::store(to_low, {of(values.x & 0xFFFF, scale), of(values.x >> 16, scale), of(values.y & 0xFFFF, scale),
                       of(values.y >> 16, scale)});
  sm90::store(to_high, {of(values.z & 0xFFFF, scale), of(values.z >> 16, scale), of(values.w & 0xFFFF, scale),
                        of(values.w >> 16, scale)});
}

// What a thread holds of its two keys of a block in one half of V: 16 values of each tile. It is loaded at once, a
// block ahead, into registers that have just been converted.
template <Format kFormat, int kHalf>
struct Values {
  static constexpr int kFirst = kHalf * Layout<kFormat>::kFirstTiles;
  static constexpr int kCount = kHalf ? Layout<kFormat>::kFp8Tiles - kFirst : Layout<kFormat>::kFirstTiles;
  uint4 values[kCount][2];
  Scales<kFormat> scales[2];

  __device__ __forceinline__ void load(const Source (&source)[2], int part) {
#pragma unroll
    for (int i = 0; i < 2; i++) scales[i].load(source[i], kHalf);
#pragma unroll
    for (int tile = 0; tile < kCount; tile++) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        values[tile][i] = __ldg(reinterpret_cast<const uint4*>(source[i].row) + (kFirst + tile) * 4 + part);
    }
  }

  __device__ __forceinline__ void convert_to(uint32_t keys) const {
#pragma unroll
    for (int tile = 0; tile < kCount; tile++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t to = keys + (kFirst + tile) * kTileBytes + i * 32 * 128;
        convert(values[tile][i], scales[i].of_tile(tile), Scales<kFormat>::scaled, to, to ^ 16);
      }
    }
  }
};

// Four neighbouring threads share two keys of a block, 32 apart. Slots are copied to shared memory three blocks ahead,
// rows asked into the L2 two blocks ahead and loaded into registers one block ahead.
template <Format kFormat>
__device__ __forceinline__ void bring_keys(const Call& call, const Piece& piece, Shared<kFormat>& shared) {
  using L = Layout<kFormat>;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  int token = warp * 8 + lane / 4, part = lane % 4;
  uint32_t chunk = (2 * part ^ lane / 4) * 16;  // of the first 8 values, swizzled; the other 8 are in its neighbour

  Blocks ahead(call, piece);
  unsigned seconds = 0;  // bit i: the keys of block n + i are of the second table
  auto copy_ahead = [&](int block) {
    bool second = copy_slots(call, ahead, token, shared.slots[block % 4], part == 0);
    ahead.advance(call);
    return second;
  };

#pragma unroll 1
  for (int i = 0; i < 2; i++) seconds |= copy_ahead(i) << (i + 1);
  sm90::wait_copies();
  __syncwarp();
  Values<kFormat, 0> first;
  Values<kFormat, 1> second;
#pragma unroll 1
  for (int n = -1; n < piece.blocks; n++) {
    const Table& table = call.tables[seconds >> 1 & 1];
    Source next[2];
#pragma unroll
    for (int i = 0; i < 2; i++) next[i] = locate<kFormat>(table, shared.slots[(n + 1) % 4][token + i * 32]);
    first.load(next, part);
    if (n >= 0) {
      Turn<2> turn{n};
      __syncwarp();
      if (lane == 0) sm90::arrive(&shared.keys_full[turn.buffer()][0]);
      second.convert_to(sm90::shared_address(shared.keys[turn.buffer()]) + token * 128 + chunk);
      sm90::wait_copies();
      __syncwarp();
      if (lane == 0) sm90::arrive(&shared.keys_full[turn.buffer()][1]);
    }
    second.load(next, part);
    if (n + 1 == piece.blocks) break;

    Turn<2> turn{n + 1};
    uint32_t keys = sm90::shared_address(shared.keys[turn.buffer()]) + token * 128 + chunk;
    unsigned valid[2];  // bit t: the key of lane 4 t is
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int slot = shared.slots[(n + 1) % 4][warp * 8 + lane % 8 + i * 32];
      valid[i] = __ballot_sync(~0u, is_slot(table, slot)) & 255;
    }
    if (lane % 2 == 0) {  // each of 16 lanes a row of block n + 2
      int at = warp * 8 + lane / 4 + lane % 4 / 2 * 32;
      sm90::prefetch(locate<kFormat>(call.tables[seconds >> 2 & 1], shared.slots[(n + 2) % 4][at]).row, L::kRowBytes);
    }
    seconds = (seconds | copy_ahead(n + 3) << 3) >> 1;
    sm90::wait(&shared.keys_empty[turn.buffer()], turn.parity() ^ 1);
    if (lane == 0) shared.valid[turn.buffer()][warp] = valid[0], shared.valid[turn.buffer()][4 + warp] = valid[1];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t to = keys + L::kFp8Tiles * kTileBytes + i * 32 * 128;
      const uint8_t* rope = next[i].row + L::kRopeByte + part * 32;
      sm90::copy_async(to, rope, true);
      sm90::copy_async(to ^ 16, rope + 16, true);
    }
    first.convert_to(keys);
  }
}

// --- scores -----------------------------------------------------------------------------------------------------

// Begins to copy a row's queries, the heads from `head` on; zeros stand for those that the tile lacks.
template <Format kFormat>
__device__ __forceinline__ void copy_queries(const Call& call, Shared<kFormat>& shared, int row, int head) {
  constexpr int kChunks = Layout<kFormat>::kQkDim / 8;
  const __nv_bfloat16* q = call.q + (static_cast<int64_t>(row) * call.heads + head) * Layout<kFormat>::kQkDim;
  int heads = min(call.heads - head, kHeads);
  uint32_t queries = sm90::shared_address(shared.queries);
#pragma unroll 8
  for (int i = threadIdx.x % 128; i < kHeads * kChunks; i += 128) {
    int at = i / kChunks, chunk = i % kChunks;
    uint32_t to = queries + chunk / 8 * kTileBytes + at * 128 + (chunk % 8 ^ at % 8) * 16;
    bool there = at < heads;
    sm90::copy_async(to, there ? q + i * 8 : call.q, there);
  }
}

// S = Q Kᵀ of a block; the tiles of either half follow when they are full.
template <Format kFormat>
__device__ __forceinline__ void score(Shared<kFormat>& shared, Turn<2> turn, float (&scores)[32]) {
  using L = Layout<kFormat>;
  uint64_t q = sm90::by_rows(sm90::shared_address(shared.queries));
  uint64_t k = sm90::by_rows(sm90::shared_address(shared.keys[turn.buffer()]));
  sm90::wait(&shared.keys_full[turn.buffer()][0], turn.parity());
  sm90::fence_matrix_reads();
  sm90::begin_products();
#pragma unroll
  for (int i = 0; i < 4 * L::kTiles; i++) {
    if (i == 4 * L::kFirstTiles) {
      sm90::wait(&shared.keys_full[turn.buffer()][1], turn.parity());
      sm90::fence_matrix_reads();
    }
    int bytes = i / 4 * kTileBytes + i % 4 * 32;
    sm90::multiply_64(scores, sm90::advance(q, bytes), sm90::advance(k, bytes), i > 0);
  }
  sm90::commit_products();
  sm90::wait_products();
}

// The largest of a row's values and what is done with it, for the two rows of a thread; base 2.
struct Statistics {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // of this thread's columns
};

__device__ __forceinline__ float over_quad(float x, float (*both)(float, float)) {
  x = both(x, __shfl_xor_sync(~0u, x, 1));
  return both(x, __shfl_xor_sync(~0u, x, 2));
}

// Scores become weights relative to the row's largest score, or to one at most 8 (a factor of 256) below it: most
// blocks leave it as it is, and then nothing needs to be rescaled. Returns the factors. The scale is not 0, which would
// make NaN of a masked score.
__device__ __forceinline__ float2 weigh(float (&scores)[32], uint2 valid, float scale, Statistics& statistics) {
  constexpr float kSlack = 8;
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
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most[4], sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float x = scores[i / 2 * 4 + 2 * r + i % 2];
      most[i % 4] = i < 4 ? x : fmaxf(most[i % 4], x);
    }
    float largest = over_quad(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])), larger) * scale;
    float before = statistics.largest[r];
    bool moves = largest > before + kSlack;
    rescale[r] = moves ? exp2f(before - largest) : 1.0f;
    largest = moves ? largest : before;
    statistics.largest[r] = largest;
    if (largest == -INFINITY) largest = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float& x = scores[i / 2 * 4 + 2 * r + i % 2];
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(fmaf(x, scale, -largest)));
      sums[i % 4] += x;
    }
    statistics.sum[r] = statistics.sum[r] * rescale[r] + (sums[0] + sums[1] + (sums[2] + sums[3]));
  }
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

// What a row's sums are multiplied by in the end, and its lse; or, of a part, what the parts are joined by.
__device__ __forceinline__ float finish(const Call& call, const Statistics& statistics, int r, int row, int head,
                                        int tile_row, bool whole, int part) {
  float sum = over_quad(statistics.sum[r], total), largest = statistics.largest[r];
  bool there = head < call.heads && threadIdx.x % 4 == 0;
  if (!whole) {
    if (there) call.part_sums[static_cast<int64_t>(part) * kHeads + tile_row] = {largest, sum};
    return 1.0f;
  }
  float sink = call.sink && head < call.heads ? exp2f(call.sink[head] * kLog2E - largest) : 0.0f;
  if (there)
    call.lse[static_cast<int64_t>(row) * call.heads + head] =
        sum == 0 ? call.empty_lse : kLn2 * (largest + log2f(sum));
  return sum == 0 ? 0.0f : 1 / (sum + sink);
}

template <Format kFormat>
__device__ __forceinline__ void weigh_keys(const Call& call, const Piece& piece, Shared<kFormat>& shared, int tile) {
  constexpr int kWeights = Shared<kFormat>::kWeights;
  int lane = threadIdx.x % 32, tile_row = threadIdx.x / 32 % 4 * 16 + lane / 4, n = 0;
  Rows rows(call, piece);
  if (rows.any()) copy_queries<kFormat>(call, shared, rows.at.row, tile * kHeads);
  while (rows.any()) {
    Statistics statistics;
    int row = rows.at.row, part = blockIdx.x * 2 + rows.part();
    bool whole = rows.at.block == 0 && rows.last() == rows.lengths.blocks();
    sm90::wait_copies();
    sm90::fence_matrix_reads();
    sm90::sync_threads(kScoreBarrier, 128);
    for (int block = rows.at.block, last = rows.last(); block < last; block++, n++) {
      float scores[32];
      score<kFormat>(shared, {n}, scores);
      if (block + 1 == last) {
        sm90::sync_threads(kScoreBarrier, 128);  // all have read the queries
        rows.advance(call);
        if (rows.any()) copy_queries<kFormat>(call, shared, rows.at.row, tile * kHeads);
      }
      uint2 valid = *reinterpret_cast<const uint2*>(shared.valid[n % 2]);
      float2 rescale = weigh(scores, valid, call.scale_log2, statistics);
      Turn<kWeights> turn{n};
      sm90::wait(&shared.weights_empty[turn.buffer()], turn.parity() ^ 1);
      store_weights(scores, sm90::shared_address(shared.weights[turn.buffer()]));
      if (lane % 4 == 0) {
        shared.rescale[turn.buffer()][tile_row] = rescale.x;
        shared.rescale[turn.buffer()][tile_row + 8] = rescale.y;
      }
      if (block + 1 == last) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          int at = tile_row + 8 * r;
          float factor = finish(call, statistics, r, row, tile * kHeads + at, at, whole, part);
          if (lane % 4 == 0) shared.normalise[turn.buffer()][at] = factor;
        }
      }
      __syncwarp();
      if (lane == 0) sm90::arrive(&shared.weights_full[turn.buffer()]);
    }
  }
}

// --- values -----------------------------------------------------------------------------------------------------

// A warp's 16 rows of sums are put in order in its tile of the keys that were read last: whole rows go out, 512 bytes
// at a time. Chunks of 16 bytes are permuted within a row, so that neither writing nor reading meets a bank twice.

__device__ __forceinline__ void copy_rows(uint32_t from, int swizzle, uint8_t* to, int64_t row_bytes, int rows) {
  int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll 4
  for (int row = 0; row < rows; row++) {
    uint4 x = sm90::load(from + row * 512 + (lane ^ row % 8 * swizzle) * 16);
    *reinterpret_cast<uint4*>(to + row * row_bytes + lane * 16) = x;
  }
  __syncwarp();
}

__device__ __forceinline__ void store_out(const float (&sums)[2][64], const float (&factor)[2], uint32_t tile,
                                          __nv_bfloat16* out, int rows) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < 32; chunk += 2) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* pair = &sums[chunk / 16][chunk % 16 * 4 + 2 * i];
      x[i] = bits(__floats2bfloat162_rn(pair[0] * factor[i % 2], pair[1] * factor[i % 2]));
    }
    sm90::store_matrices(tile + lane % 16 * 512 + ((chunk + lane / 16) ^ lane % 8) * 16, x);
  }
  copy_rows(tile, 1, reinterpret_cast<uint8_t*>(out), kValues * sizeof(__nv_bfloat16), rows);
}

__device__ __forceinline__ void store_part(const float (&sums)[2][64], uint32_t tile, float* to, int rows) {
  int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      uint32_t at = tile + row * 512 + ((i / 2 + pair / 2) ^ row * 2) * 16 + pair % 2 * 8;
      sm90::store(at, {sums[half][i], sums[half][i + 1]});
      sm90::store(at + 8 * 512, {sums[half][i + 2], sums[half][i + 3]});
    }
    copy_rows(tile, 2, reinterpret_cast<uint8_t*>(to + half * 128), kValues * sizeof(float), rows);
  }
}

// O += P V for one half of V's columns.
template <Format kFormat>
__device__ __forceinline__ void sum_values(const Call& call, const Piece& piece, Shared<kFormat>& shared, int tile,
                                           int half) {
  constexpr int kWeights = Shared<kFormat>::kWeights;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, tile_row = warp * 16 + lane / 4, n = 0;
  float sums[2][64];  // of 128 columns each
  for (Rows rows(call, piece); rows.any(); rows.advance(call)) {
    int first = rows.at.block, last = rows.last();
    float factor[2];
    for (int block = first; block < last; block++, n++) {
      Turn<kWeights> turn{n};
      int buffer = turn.buffer();
      sm90::wait(&shared.weights_full[buffer], turn.parity());
      sm90::fence_matrix_reads();
      float rescale[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        rescale[r] = shared.rescale[buffer][tile_row + 8 * r];
        factor[r] = shared.normalise[buffer][tile_row + 8 * r];
      }
      if (block > first && __any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
        for (int i = 0; i < 128; i++) sums[i / 64][i % 64] *= rescale[i / 2 % 2];
      }
      uint64_t p = sm90::by_rows(sm90::shared_address(shared.weights[buffer]));
      uint64_t v = sm90::by_columns(sm90::shared_address(shared.keys[n % 2]) + half * 4 * kTileBytes);
      sm90::begin_products();
#pragma unroll
      for (int i = 0; i < kBlock / 16; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint64_t columns = sm90::advance(v, i * 16 * 128 + j * 2 * kTileBytes);
          sm90::multiply_128(sums[j], sm90::advance(p, i * 32), columns, block > first || i > 0);
        }
      }
      sm90::commit_products();
      sm90::wait_products();
      if (lane == 0) {
        if (block + 1 < last) sm90::arrive(&shared.keys_empty[n % 2]);
        sm90::arrive(&shared.weights_empty[buffer]);
      }
    }
    sm90::sync_threads(kSumBarrier + half, 128);  // all have read the keys
    int slot = (n - 1) % 2, head = tile * kHeads + warp * 16, heads = min(max(call.heads - head, 0), 16);
    uint32_t tile_of_keys = sm90::shared_address(shared.keys[slot][half * 4 + warp]);
    if (first == 0 && last == rows.lengths.blocks()) {
      int64_t to = (static_cast<int64_t>(rows.at.row) * call.heads + head) * kValues + half * 256;
      store_out(sums, factor, tile_of_keys, call.out + to, heads);
    } else {
      int64_t to = (static_cast<int64_t>(blockIdx.x * 2 + rows.part()) * kHeads + warp * 16) * kValues + half * 256;
      store_part(sums, tile_of_keys, call.part_values + to, heads);
    }
    if (lane == 0) sm90::arrive(&shared.keys_empty[slot]);
  }
}

// --- the kernel -------------------------------------------------------------------------------------------------

template <Format kFormat>
__device__ __forceinline__ void attend(const Call& call, Shared<kFormat>& shared) {
  int tile = blockIdx.x % call.tiles, warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      sm90::init(&shared.keys_full[i][0], 4);
      sm90::init(&shared.keys_full[i][1], 4);
      sm90::init(&shared.keys_empty[i], 8);
    }
    for (int i = 0; i < Shared<kFormat>::kWeights; i++) {
      sm90::init(&shared.weights_full[i], 4);
      sm90::init(&shared.weights_empty[i], 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const Piece piece = plan_piece(call, shared.planning, blockIdx.x / call.tiles);
  __syncthreads();
  if (piece.joins && threadIdx.x == 0) call.part_rows[blockIdx.x] = parts_of(piece);

  if (piece.blocks > 0) {  // registers change hands between warpgroups that all have work
    if (warpgroup == 0) {
      sm90::shrink_registers<kKeyRegisters>();
      bring_keys<kFormat>(call, piece, shared);
      sm90::sync_threads(kEndBarrier, kThreads);
      sm90::grow_registers<128>();
    } else if (warpgroup == 1) {
      sm90::shrink_registers<kScoreRegisters>();
      weigh_keys<kFormat>(call, piece, shared, tile);
      sm90::sync_threads(kEndBarrier, kThreads);
      sm90::grow_registers<128>();
    } else {
      sm90::grow_registers<kSumRegisters>();
      sum_values<kFormat>(call, piece, shared, tile, warpgroup - 2);
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
