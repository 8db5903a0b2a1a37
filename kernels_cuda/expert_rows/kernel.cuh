// Few rows times the weights of their experts, as checkpoints store them: e2m1 numbers with UE8M0 scales of 32, or e4m3
// numbers with scales of 128 columns, UE8M0 or float32. Reading the weights takes the time.
//
// A weight is the first operand of products of 16 x 16 by 16 x 8, rows of x are the second one's columns. The order in
// which products sum over k is free where both operands agree on it. So a lane has the 16 bytes of a weight's row that it
// loads at once as operands of consecutive products, and x is copied once to shared memory in the order that this needs.
// Of FP4 these bytes are one scale's 32 numbers. Numbers and scales become bfloat16 without rounding.
//
// A thread block has some tiles of 16 rows of an expert's weight. `split` warps share the k of a tile; others have other
// tiles. Each warp loads some steps ahead, of 128 bytes of a weight's row, into registers. A tile's sums meet at the end,
// always in the same order: a row's result does not depend on the other rows of the call.

#pragma once

#include "../sm90.cuh"
#include "../stored_weights.cuh"

namespace expert_rows {

using namespace sm90;
using namespace stored_weights;

constexpr int kTile = 16;        // rows of a weight in a product
constexpr int kColumns = 8;      // rows of x in a product
constexpr int kStepBytes = 128;  // of a weight's row that a warp multiplies at once
constexpr int kAhead = 2;        // steps that a warp has in flight, 2 KB each
constexpr int kPitch = 20;       // floats between columns of a warp's sums, so that lanes store to different banks
constexpr int kMostNamed = 1024;  // rows that name an expert each
constexpr int kMostTiles = 8;    // of a thread block

// Which weight a row takes: there is one; each row names its expert; or rows are sorted, so many of each expert.
// Warps of a thread block: two blocks share a multiprocessor, or there is room for one.
constexpr int kFewWarps = 8, kManyWarps = 16;

enum Which { kOne, kEach, kSorted };

struct Call {
  const uint16_t* x;       // bfloat16 [rows, k]
  const uint8_t* values;   // [experts, n, k / 2] of FP4, [experts, n, k] of FP8
  const uint8_t* scales;   // UE8M0 [experts, n >> scale_shift, k / 32] of FP4, else k / 128; or float32
  const int* which;        // [rows], the experts of rows, or [experts], the numbers of rows
  void* out;               // bfloat16 or float32 [rows, n]
  int rows, experts, n, k;
  int scale_shift;  // 2^scale_shift rows share a scale
  int tiles, split;  // tiles of a thread block; warps that share a tile, a power of two and 8 at most
  Which kind;
  bool float_scales, float_out;
};

// Bytes of shared memory for columns that are so many times 8.
__host__ __device__ constexpr int shared_bytes(int k, int tiles, int split, int wide) {
  return k * wide * kColumns * 2 + tiles * split * wide * kColumns * kPitch * 4;
}

// Of a step: how many k, and how many 16-byte operands of x each lane has.
template <bool kFp4>
constexpr int kStep = kFp4 ? 2 * kStepBytes : kStepBytes;
template <bool kFp4>
constexpr int kOperands = kStep<kFp4> / 32;

// --- which rows -------------------------------------------------------------------------------------------------

// The rows of x that a thread block multiplies, and their expert.
struct Rows {
  int expert, start, count;
};

__device__ __forceinline__ int bits_below(unsigned bits, int lane) { return __popc(bits & ((1u << lane) - 1)); }

// The expert whose number among those that have rows is `number`. All lanes of a warp call it.
__device__ __forceinline__ Rows find_sorted(const Call& call, int number, int lane) {
  constexpr int kAhead = 8;  // loads
  int before = 0;
  for (int first = 0; first < call.experts; first += 32 * kAhead) {
    int sizes[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      int expert = first + i * 32 + lane;
      sizes[i] = expert < call.experts ? __ldg(call.which + expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      bool live = sizes[i] > 0;
      unsigned all = __ballot_sync(~0u, live);
      if (number < __popc(all)) {
        int from = __ffs(__ballot_sync(~0u, live && bits_below(all, lane) == number)) - 1;
        int start = before + __reduce_add_sync(~0u, live && lane < from ? sizes[i] : 0);
        return {first + i * 32 + from, start, __shfl_sync(~0u, sizes[i], from)};
      }
      number -= __popc(all);
      before += __reduce_add_sync(~0u, live ? sizes[i] : 0);
    }
  }
  return {0, 0, 0};
}

// The rows that name the same expert as `row`, in `named`; none where another thread block has them, which is that of the
// first of them.
__device__ __forceinline__ Rows find_named(const Call& call, int row, int lane, bool writes, int* named) {
  int expert = __ldg(call.which + row), count = 0;
#pragma unroll 4
  for (int first = 0; first < call.rows; first += 32) {
    bool same = first + lane < call.rows && __ldg(call.which + first + lane) == expert;
    unsigned all = __ballot_sync(~0u, same);
    if (all && !count && first + __ffs(all) - 1 < row) return {expert, 0, 0};
    if (same && writes) named[count + bits_below(all, lane)] = first + lane;
    count += __popc(all);
  }
  return {expert, 0, count};
}

// --- numbers ----------------------------------------------------------------------------------------------------

// Eight e2m1 numbers of a word as pairs of the numbers i and i + 4, times 2^-126 and then times `factor`. Exponent and
// mantissa move into those of bfloat16, where 0.5 is a subnormal number.
__device__ __forceinline__ void convert_fp4(uint32_t (&pairs)[4], uint32_t word, uint32_t factor) {
  constexpr uint32_t kNumbers = kFp4Numbers;
  pairs[0] = multiply_pairs((word << 12 & kSigns) | (word << 6 & kNumbers), factor);
  pairs[1] = multiply_pairs((word << 8 & kSigns) | (word << 2 & kNumbers), factor);
  pairs[2] = multiply_pairs((word << 4 & kSigns) | (word >> 2 & kNumbers), factor);
  pairs[3] = multiply_pairs((word & kSigns) | (word >> 6 & kNumbers), factor);
}

// Four e4m3 numbers of a word as pairs of the numbers i and i + 2. NaN becomes 480: `find_nan` notes it.
__device__ __forceinline__ void convert_fp8(uint32_t& first, uint32_t& second, uint32_t word) {
  constexpr uint32_t kNumbers = kFp8Numbers;
  first = multiply_pairs((word << 8 & kSigns) | (word << 4 & kNumbers), k2To120);
  second = multiply_pairs((word & kSigns) | (word >> 4 & kNumbers), k2To120);
}

// Sets the highest bit of a byte where a word has a NaN.
__device__ __forceinline__ void find_nan(uint32_t& found, uint32_t word) { found |= (word & 0x7F7F7F7F) + 0x01010101; }

// --- x ----------------------------------------------------------------------------------------------------------

// Where x's numbers 8 chunk … 8 chunk + 7 of a column lie in shared memory, in units of 16 bytes: a step's operands one
// after the other, each with the columns' four lanes beside each other.
template <bool kFp4, int kWide>
__device__ __forceinline__ int place_of(int chunk, int column) {
  int step = chunk / 16, c = chunk % 16;  // half a step of FP4
  int lane = kFp4 ? c / 4 : c / 2 % 4, operand = kFp4 ? c % 4 : c / 8 * 2 + c % 2;
  return ((step * 4 + operand) * (kWide * kColumns) + column) * 4 + lane;
}

// The order within eight numbers in which the pairs of weights come.
template <bool kFp4>
__device__ __forceinline__ uint4 in_order(uint4 x) {
  constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;
  if (kFp4) return {permute(x.x, x.z, kLow), permute(x.x, x.z, kHigh), permute(x.y, x.w, kLow), permute(x.y, x.w, kHigh)};
  return {permute(x.x, x.y, kLow), permute(x.x, x.y, kHigh), permute(x.z, x.w, kLow), permute(x.z, x.w, kHigh)};
}

template <bool kFp4, int kWide, int kThreads, typename RowOf>
__device__ __forceinline__ void copy_rows(const Call& call, uint4* to, int columns, RowOf row_of) {
  constexpr int kAhead = kWide == 4 ? 2 : 8;  // loads; registers bound them
  int chunks = call.k / 8;
  for (int first = threadIdx.x; first < columns * chunks; first += kThreads * kAhead) {
    uint4 x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      int at = first + i * kThreads;
      if (at >= columns * chunks) break;
      const uint16_t* row = call.x + int64_t{row_of(at / chunks)} * call.k;
      x[i] = *reinterpret_cast<const uint4*>(row + at % chunks * 8);
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      int at = first + i * kThreads;
      if (at >= columns * chunks) break;
      to[place_of<kFp4, kWide>(at % chunks, at / chunks)] = in_order<kFp4>(x[i]);
    }
  }
}

// --- weights ----------------------------------------------------------------------------------------------------

// What a lane has of a step: of rows line and line + 8 of a tile, 16 bytes from 16 part and from 64 + 16 part on.
// The other registers of scales are FP4's second 16 bytes', or FP8's float32: a load into the register of another one, be it
// left out, would wait for that.
struct Weights {
  uint4 values[2][2];
  uint32_t scales[2][2];
};

// Loads a warp's steps one after the other: its part of k for a tile, then the next tile's. A lane whose row is behind the
// weight stays at one that it has loaded, or at the last: what comes of it is not stored.
template <bool kFp4>
struct Loader {
  static constexpr int kStepScales = kFp4 ? 8 : 1;
  const uint8_t *values[2], *scales[2];  // where this lane's bytes of the next step are
  int row, rows, step, begin, end;       // the lane's first row of the tile, and how far the next one's is; steps

  __device__ __forceinline__ Loader(const Call& call, int expert, int row, int rows, int begin, int end, int part)
      : row(row), rows(rows), step(begin), begin(begin), end(end) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int n = min(row + i * 8, call.n - 1);
      values[i] = call.values + (int64_t{expert} * call.n + n) * row_bytes(call) + begin * kStepBytes + part * 16;
      scales[i] = scales_of(call, expert, n, begin) + (kFp4 ? part : 0);
    }
  }

  static __device__ __forceinline__ int row_bytes(const Call& call) { return kFp4 ? call.k >> 1 : call.k; }
  static __device__ __forceinline__ const uint8_t* scales_of(const Call& call, int expert, int n, int step) {
    int64_t row = int64_t{expert} * call.n + n;
    if (kFp4) return call.scales + row * (call.k >> 5) + step * kStepScales;
    return call.scales + (((row >> call.scale_shift) * (call.k >> 7) + step) << (call.float_scales ? 2 : 0));
  }

  __device__ __forceinline__ void load(const Call& call, int expert, Weights& to) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      to.values[i][0] = load_once(values[i]);
      to.values[i][1] = load_once(values[i] + kStepBytes / 2);
      if (kFp4 || !call.float_scales) to.scales[i][0] = __ldg(scales[i]);
      if (kFp4) to.scales[i][1] = __ldg(scales[i] + 4);
      if (!kFp4 && call.float_scales) to.scales[i][1] = __ldg(reinterpret_cast<const uint32_t*>(scales[i]));
      values[i] += kStepBytes, scales[i] += kStepScales << (!kFp4 && call.float_scales ? 2 : 0);
    }
    if (++step < end) return;
    step = begin, row += rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      bool goes_on = row + i * 8 < call.n;
      values[i] += (goes_on ? int64_t{rows} * row_bytes(call) : 0) - (end - begin) * kStepBytes;
      if (kFp4)
        scales[i] += (goes_on ? rows * (call.k >> 5) : 0) - (end - begin) * kStepScales;
      else
        scales[i] = scales_of(call, expert, min(row + i * 8, call.n - 1), begin);
    }
  }
};

// --- products ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) { return (&x.x)[i]; }

// An operand of x, of the columns from 8 `wide` on.
template <int kWide>
__device__ __forceinline__ uint4 load_x(const uint4* x, int operand, int wide) {
  return x[(operand * kWide + wide) * 32];
}

template <int kWide>
__device__ __forceinline__ void multiply_fp4(float (&sums)[kWide][4], const uint32_t (&low)[4], const uint32_t (&high)[4],
                                             const uint4* x, int operand) {
  const uint32_t first[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
  for (int wide = 0; wide < kWide; wide++) {
    uint4 b = load_x<kWide>(x, operand, wide);
    multiply_in_warp(sums[wide], first, b.x, b.y);
    multiply_in_warp(sums[wide], second, b.z, b.w);
  }
}

template <int kWide>
__device__ __forceinline__ void multiply_step_fp4(float (&sums)[kWide][4], const Weights& weights, const uint4* x) {
  uint32_t low[4], high[4];
  auto& scales = weights.scales;
  uint32_t largest = max(max(scales[0][0], scales[0][1]), max(scales[1][0], scales[1][1]));
  if (__any_sync(~0u, largest > kLargestAlone)) {  // seldom, so it is short
    uint4 a = weights.values[0][0], b = weights.values[1][0];
    uint32_t scale_a = scales[0][0], scale_b = scales[1][0];
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      convert_fp4(low, a.x, first_factor(scale_a));
      convert_fp4(high, b.x, first_factor(scale_b));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        low[j] = multiply_pairs(low[j], second_factor(scale_a));
        high[j] = multiply_pairs(high[j], second_factor(scale_b));
      }
      multiply_fp4(sums, low, high, x, i);
      a = {a.y, a.z, a.w, 0}, b = {b.y, b.z, b.w, 0};
      if (i == 3) a = weights.values[0][1], b = weights.values[1][1], scale_a = scales[0][1], scale_b = scales[1][1];
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t factors[2] = {first_factor(scales[0][half]), first_factor(scales[1][half])};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      convert_fp4(low, word_of(weights.values[0][half], i), factors[0]);
      convert_fp4(high, word_of(weights.values[1][half], i), factors[1]);
      multiply_fp4(sums, low, high, x, half * 4 + i);
    }
  }
}

template <int kWide>
__device__ __forceinline__ void multiply_step_fp8(float (&sums)[kWide][4], uint32_t (&nan)[2], const Weights& weights,
                                                  bool float_scales, const uint4* x) {
  float parts[kWide][4] = {}, scales[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {  // of operands
    uint32_t a[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {  // of rows
      const uint4& four = weights.values[j][i / 2];
#pragma unroll
      for (int w = 0; w < 2; w++) {
        uint32_t word = word_of(four, i % 2 * 2 + w);
        convert_fp8(a[w][j], a[w][j + 2], word);
        find_nan(nan[j], word);
      }
    }
#pragma unroll
    for (int wide = 0; wide < kWide; wide++) {
      uint4 b = load_x<kWide>(x, i, wide);
      multiply_in_warp(parts[wide], a[0], b.x, b.y);
      multiply_in_warp(parts[wide], a[1], b.z, b.w);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++)
    scales[j] = float_scales ? __int_as_float(static_cast<int>(weights.scales[j][1])) : ue8m0(weights.scales[j][0]);
#pragma unroll
  for (int wide = 0; wide < kWide; wide++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[wide][i] = fmaf(parts[wide][i], scales[i / 2], sums[wide][i]);
}

// --- the kernel -------------------------------------------------------------------------------------------------

// A warp's sums of a tile, [columns][kPitch], for the other warps; `to` is this lane's first. A row of the weight with a
// NaN has no other sums.
template <bool kFp4, int kWide>
__device__ __forceinline__ void store_sums(float* to, float (&sums)[kWide][4], uint32_t (&nan)[2]) {
  if (!kFp4) {
#pragma unroll
    for (int i = 0; i < 2; i++) {  // the row's other lanes have others of its numbers
      nan[i] |= __shfl_xor_sync(~0u, nan[i], 1);
      nan[i] |= __shfl_xor_sync(~0u, nan[i], 2);
    }
  }
#pragma unroll
  for (int wide = 0; wide < kWide; wide++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      bool is_nan = !kFp4 && nan[i / 2] & 0x80808080;
      to[(wide * kColumns + i % 2) * kPitch + i / 2 * 8] = is_nan ? __int_as_float(0x7FC00000) : sums[wide][i];
      sums[wide][i] = 0;
    }
  nan[0] = nan[1] = 0;
}

// Thread block (b, y) has tiles from b * tiles on, of the weight of the y-th expert that has rows, or of row y.
template <bool kFp4, int kWide, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps == kFewWarps ? 2 : 1)
    expert_rows_kernel(const __grid_constant__ Call call) {
  constexpr int kThreads = kWarps * 32, kMost = kWide * kColumns, kWarpSums = kMost * kPitch;
  __shared__ int named[kMostNamed];
  uint4* x = reinterpret_cast<uint4*>(aligned_memory());
  float* shared_sums = reinterpret_cast<float*>(x + call.k * kMost / 8);
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  int line = lane / 4, part = lane % 4;

  Rows rows = {0, 0, call.rows};
  if (call.kind == kEach) rows = find_named(call, blockIdx.y, lane, warp == 0, named);
  if (call.kind == kSorted) rows = find_sorted(call, blockIdx.y, lane);
  if (rows.count == 0) return;
  if (call.kind == kEach) __syncthreads();
  auto row_of = [&](int i) { return call.kind == kEach ? named[i] : rows.start + i; };

  int first_tile = blockIdx.x * call.tiles, all_tiles = (call.n + kTile - 1) / kTile;
  int tiles = min(call.tiles, all_tiles - first_tile), steps = call.k / kStep<kFp4>, split = call.split;
  int share = warp % split, mine = first_tile + warp / split, others = kWarps / split;  // tiles at a time
  int begin = steps * share / split, end = steps * (share + 1) / split;
  int count = (tiles - warp / split + others - 1) / others * (end - begin);

  for (int done = 0; done < rows.count; done += kMost) {
    int columns = min(kMost, rows.count - done);
    Loader<kFp4> loader(call, rows.expert, mine * kTile + line, others * kTile, begin, end, part);
    Weights weights[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
      if (i < count) loader.load(call, rows.expert, weights[i]);
    copy_rows<kFp4, kWide, kThreads>(call, x, columns, [&](int i) { return row_of(done + i); });
    __syncthreads();

    // Lanes whose columns there are not take others: what comes of it is not stored.
    const uint4* operands = x + min(line, columns - 1) * 4 + part;
    float sums[kWide][4] = {}, *to = shared_sums + warp * kWarpSums + part * 2 * kPitch + line;
    uint32_t nan[2] = {0, 0};
    int step = begin;
    for (int first = 0; first < count; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; i++) {
        if (first + i >= count) break;
        const uint4* step_x = operands + step * (kOperands<kFp4> * kMost * 4);
        if constexpr (kFp4)
          multiply_step_fp4(sums, weights[i], step_x);
        else
          multiply_step_fp8(sums, nan, weights[i], call.float_scales, step_x);
        if (first + i + kAhead < count) loader.load(call, rows.expert, weights[i]);
        if (++step == end) {
          store_sums<kFp4>(to, sums, nan);
          step = begin, to += kWarps * kWarpSums;
        }
      }
    }
    __syncthreads();

    int tile_rows = min(tiles * kTile, call.n - first_tile * kTile);
    for (int i = threadIdx.x; i < columns * tile_rows; i += kThreads) {
      int column = i / tile_rows, row = i % tile_rows;
      const float* from = shared_sums + row / kTile * split * kWarpSums + column * kPitch + row % kTile;
      float sum = 0;
      for (int w = 0; w < split; w++)
        if (steps * w / split < steps * (w + 1) / split) sum += from[w * kWarpSums];
      int64_t at = int64_t{row_of(done + column)} * call.n + first_tile * kTile + row;
      if (call.float_out)
        static_cast<float*>(call.out)[at] = sum;
      else
        static_cast<uint16_t*>(call.out)[at] = static_cast<uint16_t>(rounded({sum, 0}));
    }
    if (done + kMost < rows.count) __syncthreads();
  }
}

}  // namespace expert_rows
