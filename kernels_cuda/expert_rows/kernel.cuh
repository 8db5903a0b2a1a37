// Few rows times the weights of their experts, as checkpoints store them: e2m1 numbers with UE8M0 scales of 32, or e4m3
// numbers with scales of 128 columns, UE8M0 or float32. Reading the weights takes the time.
//
// A weight is the first operand of products of 16 x 16 by 16 x 8, rows of x are the second one's columns. The order in
// which products sum over k is free where both operands agree on it. So a lane has the 16 bytes of a weight's row that it
// loads at once as operands of consecutive products, and x is copied once to shared memory in the order that this needs.
// Of FP4 these bytes are one scale's 32 numbers. Numbers and scales become bfloat16 without rounding.
//
// A thread block has some tiles of 16 rows of an expert's weight (plan.cuh says how many). `split` warps share the k of a
// tile; others have other tiles. Each warp loads some steps ahead, of 128 bytes of a weight's row, into registers, the first
// ones before it looks for rows and copies x: so weights come all the time. A tile's sums meet at the end, always in the
// same order: a row's result does not depend on the other rows of the call.

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
constexpr int kFewBlocks = 2;    // of few warps, on a multiprocessor
constexpr int kPitch = 20;       // floats between columns of a warp's sums, so that lanes store to different banks
constexpr int kMostNamed = 1024;  // rows that name an expert each
constexpr int kMostTiles = 16;    // of a thread block, which has at most so many steps of them
constexpr int kMostSteps = 128;

// Warps of a thread block: two blocks share a multiprocessor, or there is room for one.
constexpr int kFewWarps = 8, kManyWarps = 16;

// Which weight a row takes: there is one; each row names its expert; or rows are sorted, so many of each expert.
enum Which { kOne, kEach, kSorted };

struct Call {
  const uint16_t* x;       // bfloat16 [rows / repeat, k]: row r takes row r / repeat; or [.., 2 k], `gated`
  const uint8_t* values;   // [experts, n, k / 2] of FP4, [experts, n, k] of FP8
  const uint8_t* scales;   // UE8M0 [experts, n >> scale_shift, k / 32] of FP4, else k / 128; or float32
  const int* which;        // [rows], the experts of rows, or [experts], the numbers of rows
  void* out;               // bfloat16 or float32 [rows, n]
  int rows, experts, n, k, repeat;
  int scale_shift;  // 2^scale_shift rows share a scale
  int tiles, split;  // tiles of a thread block; warps that share a tile, a power of two
  int columns;       // rows of x that a thread block multiplies at once, 8 times the kernel's `wide` at most
  Which kind;
  bool float_scales, float_out;
  bool gated;   // x is silu of its first half times its second one, both bounded, the first from above only
  float limit;  // of them, infinite where there is none
};

// Units of 16 bytes between columns of x in shared memory: two columns' 64 bytes of an operand are in different banks.
__host__ __device__ constexpr int column_pitch(int k) { return k / 8 + 4; }

__host__ __device__ constexpr int shared_bytes(int k, int tiles, int split, int columns) {
  return columns * column_pitch(k) * 16 + tiles * split * columns * kPitch * 4;
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
__device__ __forceinline__ Rows find_named(const Call& call, int row, int expert, int lane, bool writes, int* named) {
  int count = 0;
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
// mantissa move into those of bfloat16, where 0.5 is a subnormal number. A multiplication moves sign and number at once,
// and not by the unit that is busiest.
__device__ __forceinline__ void convert_fp4(uint32_t (&pairs)[4], uint32_t word, uint32_t factor) {
  constexpr uint32_t kBoth = kSigns | kFp4Numbers, kMoves = 1 << 12 | 1 << 6;
  uint32_t high = word >> 8;
  pairs[0] = multiply_pairs((word & 0x000F000F) * kMoves & kBoth, factor);
  pairs[1] = multiply_pairs((word & 0x00F000F0) * (kMoves >> 4) & kBoth, factor);
  pairs[2] = multiply_pairs((high & 0x000F000F) * kMoves & kBoth, factor);
  pairs[3] = multiply_pairs((high & 0x00F000F0) * (kMoves >> 4) & kBoth, factor);
}

// Four e4m3 numbers of a word as pairs of the numbers i and i + 2. NaN becomes 480: `find_nan` notes it.
__device__ __forceinline__ void convert_fp8(uint32_t& first, uint32_t& second, uint32_t word) {
  constexpr uint32_t kNumbers = kFp8Numbers;
  first = multiply_pairs((word << 8 & kSigns) | (word << 4 & kNumbers), k2To120);
  second = multiply_pairs((word & kSigns) | (word >> 4 & kNumbers), k2To120);
}

// Sets the highest bit of a byte where a word has a NaN.
__device__ __forceinline__ void find_nan(uint32_t& found, uint32_t word) { found |= (word & 0x7F7F7F7F) + 0x01010101; }

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) { return (&x.x)[i]; }

// --- x ----------------------------------------------------------------------------------------------------------

// Where x's numbers 8 chunk … 8 chunk + 7 lie in their column, in units of 16 bytes: a step's operands one after the other,
// each with four lanes' beside each other.
template <bool kFp4>
__device__ __forceinline__ int place_of(int chunk) {
  int c = chunk % 16;
  int lane = kFp4 ? c / 4 : c / 2 % 4, operand = kFp4 ? c % 4 : c / 8 * 2 + c % 2;
  return chunk / 16 * 16 + operand * 4 + lane;
}

// The order within eight numbers in which the pairs of weights come.
template <bool kFp4>
__device__ __forceinline__ uint4 in_order(uint4 x) {
  constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;
  if (kFp4) return {permute(x.x, x.z, kLow), permute(x.x, x.z, kHigh), permute(x.y, x.w, kLow), permute(x.y, x.w, kHigh)};
  return {permute(x.x, x.y, kLow), permute(x.x, x.y, kHigh), permute(x.z, x.w, kLow), permute(x.z, x.w, kHigh)};
}

// A NaN stays one.
__device__ __forceinline__ float silu_times(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate, up = up > limit ? limit : up < -limit ? -limit : up;
  return __fdividef(gate, 1 + exp2_approx(gate * -1.44269504f)) * up;
}

// Of eight bfloat16 numbers each, rounded once.
__device__ __forceinline__ uint4 silu_times(uint4 gate, uint4 up, float limit) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t g = word_of(gate, i), u = word_of(up, i);
    auto first = [](uint32_t pair) { return __int_as_float(static_cast<int>(pair << 16)); };
    auto second = [](uint32_t pair) { return __int_as_float(static_cast<int>(pair & 0xFFFF0000)); };
    pairs[i] = rounded({silu_times(first(g), first(u), limit), silu_times(second(g), second(u), limit)});
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

template <bool kFp4, int kThreads, typename RowOf>
__device__ __forceinline__ void copy_gated_rows(const Call& call, uint4* to, int columns, RowOf row_of) {
  int chunks = call.k / 8;
  for (int at = threadIdx.x; at < columns * chunks; at += kThreads) {
    const uint4* row = reinterpret_cast<const uint4*>(call.x + int64_t{row_of(at / chunks)} * call.k * 2) + at % chunks;
    uint4 x = silu_times(row[0], row[chunks], call.limit);
    to[at / chunks * column_pitch(call.k) + place_of<kFp4>(at % chunks)] = in_order<kFp4>(x);
  }
}

template <bool kFp4, int kWide, int kThreads, typename RowOf>
__device__ __forceinline__ void copy_rows(const Call& call, uint4* to, int columns, RowOf row_of) {
  constexpr int kAhead = kWide == 4 ? 2 : 4;  // loads; registers bound them
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
      to[at / chunks * column_pitch(call.k) + place_of<kFp4>(at % chunks)] = in_order<kFp4>(x[i]);
    }
  }
}

// --- weights ----------------------------------------------------------------------------------------------------

// What a lane has of a step: of rows line and line + 8 of a tile, 16 bytes from 16 part and from 64 + 16 part on.
// Scales are all eight of each row's step of FP4. Of FP8 the second register is float32's: a load into the register of
// another one, be it left out, would wait for that.
struct Weights {
  uint4 values[2][2];
  uint2 scales[2];
};

// Loads a warp's steps one after the other: its part of k for a tile, then the next tile's. A lane whose row is behind the
// weight stays at one that it has loaded, or at the last: what comes of it is not stored.
template <bool kFp4>
struct Loader {
  static constexpr int kStepScales = kFp4 ? 8 : 1;
  const uint8_t *values[2], *scales[2];  // where this lane's bytes of the next step are
  int row, rows, step, begin, end;       // the lane's first row of the tile, and how far the next one's is; steps
  int part, left;                        // the lane's part of 64 bytes; tiles left

  __device__ __forceinline__ Loader(const Call& call, int expert, int row, int rows, int begin, int end, int part,
                                    int left)
      : row(row), rows(rows), step(begin), begin(begin), end(end), part(part), left(left) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int n = min(row + i * 8, call.n - 1);
      values[i] = call.values + (int64_t{expert} * call.n + n) * row_bytes(call) + begin * kStepBytes + part * 16;
      scales[i] = scales_of(call, expert, n, begin);
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
      if (kFp4)
        to.scales[i] = __ldg(reinterpret_cast<const uint2*>(scales[i]));
      else if (call.float_scales)
        to.scales[i].y = __ldg(reinterpret_cast<const uint32_t*>(scales[i]));
      else
        to.scales[i].x = __ldg(scales[i]);
      values[i] += kStepBytes, scales[i] += kStepScales << (!kFp4 && call.float_scales ? 2 : 0);
    }
    if (++step < end) return;
    step = begin, row += rows, left--;
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

// Where this lane's operands of x begin, in the column that it has of each eight.
template <int kWide>
struct Operands {
  const uint4* columns[kWide];

  __device__ __forceinline__ uint4 load(int wide, int operand) const { return columns[wide][operand * 4]; }
};

template <int kWide>
__device__ __forceinline__ void multiply_fp4(float (&sums)[kWide][4], const uint32_t (&low)[4], const uint32_t (&high)[4],
                                             const Operands<kWide>& x, int operand) {
  const uint32_t first[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
  for (int wide = 0; wide < kWide; wide++) {
    uint4 b = x.load(wide, operand);
    multiply_in_warp(sums[wide], first, b.x, b.y);
    multiply_in_warp(sums[wide], second, b.z, b.w);
  }
}

// `operand` is the step's first one.
template <int kWide>
__device__ __forceinline__ void multiply_step_fp4(float (&sums)[kWide][4], const Weights& weights, int part,
                                                  const Operands<kWide>& x, int operand) {
  uint32_t low[4], high[4];
  auto& all = weights.scales;
  uint32_t mine = 0x4440 | part;  // of four scales, that of this lane's 16 bytes
  if (__any_sync(~0u, ((all[0].x | all[0].y | all[1].x | all[1].y) & 0x80808080) != 0)) {  // seldom, so it is short
    uint4 a = weights.values[0][0], b = weights.values[1][0];
    uint32_t scale_a = permute(all[0].x, 0, mine), scale_b = permute(all[1].x, 0, mine);
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      convert_fp4(low, a.x, first_factor(scale_a));
      convert_fp4(high, b.x, first_factor(scale_b));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        low[j] = multiply_pairs(low[j], second_factor(scale_a));
        high[j] = multiply_pairs(high[j], second_factor(scale_b));
      }
      multiply_fp4(sums, low, high, x, operand + i);
      a = {a.y, a.z, a.w, 0}, b = {b.y, b.z, b.w, 0};
      if (i == 3) {
        a = weights.values[0][1], b = weights.values[1][1];
        scale_a = permute(all[0].y, 0, mine), scale_b = permute(all[1].y, 0, mine);
      }
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t factors[2];
#pragma unroll
    for (int i = 0; i < 2; i++) factors[i] = factor_alone(permute(half ? all[i].y : all[i].x, 0, mine));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      convert_fp4(low, word_of(weights.values[0][half], i), factors[0]);
      convert_fp4(high, word_of(weights.values[1][half], i), factors[1]);
      multiply_fp4(sums, low, high, x, operand + half * 4 + i);
    }
  }
}

template <int kWide>
__device__ __forceinline__ void multiply_step_fp8(float (&sums)[kWide][4], uint32_t (&nan)[2], const Weights& weights,
                                                  bool float_scales, const Operands<kWide>& x, int operand) {
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
      uint4 b = x.load(wide, operand + i);
      multiply_in_warp(parts[wide], a[0], b.x, b.y);
      multiply_in_warp(parts[wide], a[1], b.z, b.w);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++)
    scales[j] = float_scales ? __int_as_float(static_cast<int>(weights.scales[j].y)) : ue8m0(weights.scales[j].x);
#pragma unroll
  for (int wide = 0; wide < kWide; wide++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[wide][i] = fmaf(parts[wide][i], scales[i / 2], sums[wide][i]);
}

// --- the kernel -------------------------------------------------------------------------------------------------

// A warp's sums of a tile, [columns][kPitch], for the other warps; `to` is this lane's first, of column `column`. A row of
// the weight with a NaN has no other sums.
template <bool kFp4, int kWide>
__device__ __forceinline__ void store_sums(float* to, int column, int columns, float (&sums)[kWide][4],
                                           uint32_t (&nan)[2]) {
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
      if (column + wide * kColumns + i % 2 < columns)
        to[(wide * kColumns + i % 2) * kPitch + i / 2 * 8] = is_nan ? __int_as_float(0x7FC00000) : sums[wide][i];
      sums[wide][i] = 0;
    }
  nan[0] = nan[1] = 0;
}

// Thread block (b, y) has tiles from b * tiles on, of the weight of the y-th expert that has rows, or of row y.
template <bool kFp4, int kWide, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps == kFewWarps ? kFewBlocks : 1)
    expert_rows_kernel(const __grid_constant__ Call call) {
  constexpr int kThreads = kWarps * 32;
  __shared__ int named[kMostNamed];
  int most = call.columns, warp_sums = most * kPitch, pitch = column_pitch(call.k);
  uint4* x = reinterpret_cast<uint4*>(aligned_memory());
  float* shared_sums = reinterpret_cast<float*>(x + most * pitch);
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
  int line = lane / 4, part = lane % 4;

  Rows rows = {0, 0, call.rows};
  if (call.kind == kEach) rows.expert = __ldg(call.which + blockIdx.y);
  if (call.kind == kSorted) rows = find_sorted(call, blockIdx.y, lane);
  if (rows.count == 0) return;

  int first_tile = blockIdx.x * call.tiles, all_tiles = (call.n + kTile - 1) / kTile;
  int tiles = min(call.tiles, all_tiles - first_tile), steps = call.k / kStep<kFp4>, split = call.split;
  int share = warp % split, mine = first_tile + warp / split, others = kWarps / split;  // tiles at a time
  int begin = steps * share / split, end = steps * (share + 1) / split;
  int my_tiles = (tiles - warp / split + others - 1) / others, count = my_tiles * (end - begin);

  for (int done = 0; done < rows.count; done += most) {
    Loader<kFp4> loader(call, rows.expert, mine * kTile + line, others * kTile, begin, end, part, my_tiles);
    Weights weights[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
      if (i < count) loader.load(call, rows.expert, weights[i]);
    if (call.kind == kEach && done == 0) {  // the weights are on their way meanwhile
      rows = find_named(call, blockIdx.y, rows.expert, lane, warp == 0, named);
      if (rows.count == 0) return;
      __syncthreads();
    }
    auto row_of = [&](int i) { return call.kind == kEach ? named[i] : rows.start + i; };
    int columns = min(most, rows.count - done);
    auto x_row = [&](int i) { return row_of(done + i) / call.repeat; };
    if (call.gated)
      copy_gated_rows<kFp4, kThreads>(call, x, columns, x_row);
    else
      copy_rows<kFp4, kWide, kThreads>(call, x, columns, x_row);
    __syncthreads();

    // Lanes whose columns there are not take others: what comes of it is not stored.
    Operands<kWide> operands;
#pragma unroll
    for (int wide = 0; wide < kWide; wide++)
      operands.columns[wide] = x + min(wide * kColumns + line, columns - 1) * pitch + part;
    float sums[kWide][4] = {}, *to = shared_sums + warp * warp_sums + part * 2 * kPitch + line;
    uint32_t nan[2] = {0, 0};
    int step = begin;
    for (int first = 0; first < count; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; i++) {
        if (first + i >= count) break;
        if constexpr (kFp4)
          multiply_step_fp4(sums, weights[i], part, operands, step * kOperands<kFp4>);
        else
          multiply_step_fp8(sums, nan, weights[i], call.float_scales, operands, step * kOperands<kFp4>);
        if (first + i + kAhead < count) loader.load(call, rows.expert, weights[i]);
        if (++step == end) {
          store_sums<kFp4>(to, part * 2, most, sums, nan);
          step = begin, to += kWarps * warp_sums;
        }
      }
    }
    __syncthreads();

    int tile_rows = min(tiles * kTile, call.n - first_tile * kTile);
    for (int i = threadIdx.x; i < columns * tile_rows; i += kThreads) {
      int column = i / tile_rows, row = i % tile_rows;
      const float* from = shared_sums + row / kTile * split * warp_sums + column * kPitch + row % kTile;
      float sum = 0;
      for (int w = 0; w < split; w++)
        if (steps * w / split < steps * (w + 1) / split) sum += from[w * warp_sums];
      int64_t at = int64_t{row_of(done + column)} * call.n + first_tile * kTile + row;
      if (call.float_out)
        static_cast<float*>(call.out)[at] = sum;
      else
        static_cast<uint16_t*>(call.out)[at] = static_cast<uint16_t>(rounded({sum, 0}));
    }
    if (done + most < rows.count) __syncthreads();
  }
}

}  // namespace expert_rows
