// Rows sorted by expert times their experts' weights, as checkpoints store them (stored_weights.cuh), on SM90: many rows of
// an expert, so that tensor cores and the copies of weights both have to be kept busy.
//
// A weight is the first operand of a warpgroup's products and comes from registers, rows of x are the second one's columns
// and come from shared memory. So the sums of a tile are [rows of the weight, rows of x], and few rows of x make narrow
// products. A thread block computes one tile after the other. Two producer warps copy into rings of shared memory: one the
// bytes of weights, 128 of each row in a step, with their scales of FP4, the other x, 64 columns at a time. Consumer
// warpgroups share the weight's rows: four of FP4, two of FP8. What the next products need becomes bfloat16 while those before are
// under way, so there are two sets of converted operands.
//
// What binds, in cycles, for 64 rows of a weight, 16 of k and N columns (counted in the machine code, not measured):
// * Tensor cores take N / 2.
// * A warp has 8 numbers for each lane and converts them, with all that is around it, by 30 instructions of FP4 and 35 of
//   FP8. Warpgroups share the schedulers: so tensor cores can be busy from 64 columns on, and 512 bytes of FP4 take 30
//   cycles, 4.1 TB/s on an H200 at 1.75 GHz. Two warps of a scheduler reached half of that (measured): one waits for loads,
//   barriers or products while the other one does too.
// * Shared memory gives 128 bytes a cycle: x takes N / 4 for the products, and N / 16 to come there; the weight about
//   8. So it is busy for 0.8 of the tensor cores' time.
// * A tile of 256 x 96 reads 328 bytes for each k from the L2: at 500 TFLOP/s 3.3 TB/s.
//
// Scales of FP4 multiply the numbers, which is exact; those of FP8 multiply the sums over 128 columns. A tile's sums are
// made in the same order, however many rows it has: a row's result does not depend on the other rows of the call.

#pragma once

#include "../sm90.cuh"
#include "../stored_weights.cuh"
#include "../tensor_map.cuh"

namespace expert_tiles {

using namespace sm90;
using namespace stored_weights;
using tensor_map::kLine, tensor_map::Tiles;

constexpr int kOut = 256;      // rows of a weight of a tile
constexpr int kXStep = 64;     // k of a tile of x
constexpr int kProducts = kXStep / 16;
constexpr int kGrain = 16;     // columns of a product, and rows of a copied box of x, are a multiple
constexpr int kStepScales = 2 * kLine / kFp4Group;  // of a row of FP4 in a step
constexpr int kTogether = 8;   // tiles of columns that read the same tile of a weight one beside the other
constexpr int kMostExperts = 1024;
constexpr int kProducerRegisters = 24;
constexpr int kStepBytes = kOut * kLine, kSteps = 3;  // of the ring of weights

struct Call {
  CUtensorMap weights, x;  // tiles of 128 bytes of `out` rows, or of kGrain
  const uint8_t* scales;   // UE8M0 [experts, n, k / 32] of FP4, else [experts, n >> scale_shift, k / 128], or float32
  const int* sizes;        // [experts], rows of each, or null: there is one, and all are its
  void* out;               // bfloat16 or float32 [rows, n]
  int rows, experts, n, k;
  int scale_shift;  // 2^scale_shift rows share a scale
  bool float_scales, float_out;
};

// A kernel's numbers.
template <bool kFp4_>
struct Shape {
  static constexpr bool kFp4 = kFp4_;
  static constexpr int kStep = kFp4 ? 2 * kLine : kLine;  // k of a step
  static constexpr int kSlotsOfStep = kStep / kXStep;
  // Of FP4 more warps hide more of each other's latency; sums of FP8 need twice the registers.
  static constexpr int kWarpgroups = kFp4 ? 4 : 2;         // that consume
  static constexpr int kTall = kOut / 64 / kWarpgroups;    // tiles of 64 rows of a weight that one has
  static constexpr int kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 128;
  static constexpr int kMost = kWarpgroups == 4 ? 96 : 128;  // rows of x of a tile, for which registers have sums
  static constexpr int kSlotBytes = kMost * kLine, kSlots = kMost == 96 ? 9 : 7;  // of the ring of x
  static constexpr int kRegisters = kWarpgroups == 2 ? 240 : 112;  // of consumers, of 168 or 96 that each begins with
};

template <typename Shape>
struct Shared {
  uint8_t weights[kSteps][kStepBytes];
  uint8_t x[Shape::kSlots][Shape::kSlotBytes];
  uint8_t scales[kSteps][Shape::kFp4 ? kOut * kStepScales : 16];  // of FP4
  Barrier full_weights[kSteps], free_weights[kSteps], full_x[Shape::kSlots], free_x[Shape::kSlots];
  int first[kMostExperts + 1], begin[kMostExperts + 1];  // each expert's first tile, and its first row of x
};

template <typename Shape>
constexpr int kSharedBytes = sizeof(Shared<Shape>) + 1024;  // tiles begin at multiples of 1024 bytes

// 128 bytes of `tile` rows of a matrix.
inline Tiles<2> tiles_of(const void* data, int64_t rows, int64_t row_bytes, int tile) {
  return {data, {rows, row_bytes / kLine}, {row_bytes, kLine}, {tile, 1}};
}

// A call's maps, each made by `map_of`.
template <typename Shape, typename Map>
void set_maps(Call& call, const void* x, const void* values, Map map_of) {
  int64_t row_bytes = Shape::kFp4 ? call.k / 2 : call.k;
  call.weights = map_of(tiles_of(values, int64_t{call.experts} * call.n, row_bytes, kOut));
  call.x = map_of(tiles_of(x, call.rows, int64_t{call.k} * 2, kGrain));
}

__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__host__ __device__ constexpr int divided_up(int x, int by) { return (x + by - 1) / by; }

// A place in a ring: the next tile's, and the parity of the phase in which it is filled.
template <int kCount>
struct Place {
  int at = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++at == kCount) at = 0, phase ^= 1;
  }
};

// --- the work ---------------------------------------------------------------------------------------------------

// Fills `first` and `begin`; one warp calls it.
template <typename Shape>
__device__ void count_tiles(const Call& call, Shared<Shape>& shared) {
  int lane = threadIdx.x % 32, outs = divided_up(call.n, kOut), tiles = 0, rows = 0;
#pragma unroll 4
  for (int from = 0; from < call.experts; from += 32) {
    int expert = from + lane, size = 0;
    if (expert < call.experts) size = call.sizes ? max(__ldg(call.sizes + expert), 0) : call.rows;
    int count = divided_up(size, Shape::kMost) * outs, sum = count, end = size;
    for (int step = 1; step < 32; step *= 2) {
      int before = __shfl_up_sync(~0u, sum, step), rows_before = __shfl_up_sync(~0u, end, step);
      if (lane >= step) sum += before, end += rows_before;
    }
    if (expert < call.experts) shared.first[expert] = tiles + sum - count, shared.begin[expert] = rows + end - size;
    tiles += __shfl_sync(~0u, sum, 31), rows += __shfl_sync(~0u, end, 31);
  }
  if (lane == 0) shared.first[call.experts] = tiles, shared.begin[call.experts] = rows;
}

// Rows `out` and on of an expert's weight, and `count` rows of x from `row` on.
struct Tile {
  int expert, out, row, count;

  // As many columns as the tile's products have.
  __device__ __forceinline__ int columns() const { return divided_up(count, kGrain) * kGrain; }
};

// Tiles are counted expert by expert. An expert's rows of x are parts of about one size; those of up to kTogether parts
// read the same tile of the weight one after the other, so that the L2 has it, and both fit into it.
template <typename Shape>
__device__ __forceinline__ Tile find_tile(const Call& call, const Shared<Shape>& shared, int index) {
  int low = 0, high = call.experts;  // the last expert whose first tile is not behind: it has rows
  while (high - low > 1) {
    int middle = (low + high) / 2;
    (shared.first[middle] <= index ? low : high) = middle;
  }
  int begin = shared.begin[low], size = shared.begin[low + 1] - begin, rest = index - shared.first[low];
  int parts = divided_up(size, Shape::kMost), part_rows = divided_up(divided_up(size, parts), kGrain) * kGrain;
  int whole = kTogether * divided_up(call.n, kOut), group = rest / whole;
  rest -= group * whole;
  int together = min(kTogether, parts - group * kTogether), out = rest / together;
  int row = (group * kTogether + rest - out * together) * part_rows;
  return {low, out * kOut, begin + row, max(min(part_rows, size - row), 0)};
}

template <typename Shape, typename Do>
__device__ __forceinline__ void for_each_tile(const Call& call, const Shared<Shape>& shared, Do what) {
  int tiles = shared.first[call.experts];
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    Tile tile = find_tile(call, shared, index);
    if (tile.count) what(tile);
  }
}

// One warp copies the weights of all tiles: its first lane their numbers, all of FP4's scales, eight bytes of a row.
template <typename Shape>
constexpr int kCopies = Shape::kFp4 ? 33 : 1;  // arrivals
template <typename Shape>
__device__ void copy_weights(const Call& call, Shared<Shape>& shared) {
  Place<kSteps> place;
  int lane = threadIdx.x % 32, groups = call.k / kFp4Group;
  for_each_tile(call, shared, [&](const Tile& tile) {
    const uint8_t* scales = call.scales + int64_t{tile.expert} * call.n * groups;
    for (int step = 0; step < call.k / Shape::kStep; step++, place.advance()) {
      Barrier* full = &shared.full_weights[place.at];
      wait(&shared.free_weights[place.at], place.phase ^ 1);
      if (lane == 0) {
        expect(full, kStepBytes);
        copy_box(shared.weights[place.at], call.weights, tile.expert * call.n + tile.out, step, full);
      }
      if constexpr (Shape::kFp4) {
        uint32_t to = shared_address(shared.scales[place.at]);
        for (int row = lane; row < kOut; row += 32) {  // what comes of a row behind the weight is not stored
          int n = min(tile.out + row, call.n - 1);
          copy_async_small<kStepScales>(to + row * kStepScales, scales + int64_t{n} * groups + step * kStepScales);
        }
        arrive_after_copies(full);
      }
    }
  });
}

// One thread copies x.
template <typename Shape>
__device__ void copy_x(const Call& call, Shared<Shape>& shared) {
  Place<Shape::kSlots> place;
  for_each_tile(call, shared, [&](const Tile& tile) {
    int columns = tile.columns();
    for (int step = 0; step < call.k / kXStep; step++, place.advance()) {
      Barrier* full = &shared.full_x[place.at];
      wait(&shared.free_x[place.at], place.phase ^ 1);
      expect(full, columns * kLine);
      for (int i = 0; i < columns; i += kGrain)
        copy_box(shared.x[place.at] + i * kLine, call.x, tile.row + i, step, full);
    }
  });
}

// --- numbers ----------------------------------------------------------------------------------------------------

// Two e2m1 numbers of a word, its fifth and first one, or of `odd` ones its sixth and second, times 2^-126 and then times
// `factor`. The product puts copies of both where their signs, and where the rest, have their places.
template <bool kOdd>
__device__ __forceinline__ uint32_t convert_fp4(uint32_t word, uint32_t factor) {
  uint32_t two = word & (kOdd ? 0x00F000F0u : 0x000F000Fu);
  return multiply_pairs(two * (kOdd ? 0x104u : 0x1040u) & (kSigns | kFp4Numbers), factor);
}

// A lane's two e4m3 numbers of eight, each first as both bytes of its half. NaN becomes 480, the largest; `largest` shows it.
__device__ __forceinline__ uint32_t convert_fp8(uint32_t low, uint32_t high, uint32_t selector, uint32_t& largest) {
  uint32_t doubled = permute(low, high, selector), numbers = doubled * 16 & kFp8Numbers;
  largest = larger_pairs(largest, numbers);
  return multiply_pairs((doubled & kSigns) | numbers, k2To120);
}
__device__ __forceinline__ uint32_t selector_of_fp8(int part) { return 0x1100 + 0x2222 * part; }

__device__ __forceinline__ bool has_nan(uint32_t largest) {
  return (largest & 0xFFFF) == (kFp8Numbers & 0xFFFF) || largest >> 16 == kFp8Numbers >> 16;
}

// --- products ---------------------------------------------------------------------------------------------------

// The rows of a weight that a lane has of a tile: rows 64 m + 8 i further than the first one, i = 0 and 1.
template <int kTall>
struct Lane {
  int row, part;  // the first row; which of the four lanes that share a row

  __device__ __forceinline__ Lane() {
    int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    row = warp / 4 * (64 * kTall) + warp % 4 * 16 + lane / 4, part = lane % 4;
  }

  // A chunk of 16 bytes of both rows of a copied tile.
  __device__ __forceinline__ void load(uint4 (&to)[2], const uint8_t* tile, int m, int chunk) const {
#pragma unroll
    for (int i = 0; i < 2; i++)
      to[i] = *reinterpret_cast<const uint4*>(tile + (row + m * 64 + i * 8) * kLine + ((chunk ^ row % 8) * 16));
  }
};

// A lane's scales of FP8: one of each row for a step.
struct Scales {
  static constexpr int kTall = Shape<false>::kTall;
  const uint8_t* base;  // of the expert
  int at[kTall][2];
  float numbers[kTall][2];

  __device__ __forceinline__ Scales(const Call& call, const Tile& tile, int row) {
    int groups = call.k / kFp8Group, width = call.float_scales ? 4 : 1;
    base = call.scales + int64_t{tile.expert} * (call.n >> call.scale_shift) * groups * width;
#pragma unroll
    for (int m = 0; m < kTall; m++)
#pragma unroll
      for (int i = 0; i < 2; i++)  // a row behind the weight has another one's: what comes of it is not stored
        at[m][i] = (min(tile.out + row + m * 64 + i * 8, call.n - 1) >> call.scale_shift) * groups;
  }

  __device__ __forceinline__ void load(const Call& call, int step) {
#pragma unroll
    for (int m = 0; m < kTall; m++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        numbers[m][i] = call.float_scales ? __ldg(reinterpret_cast<const float*>(base) + at[m][i] + step)
                                          : ue8m0(__ldg(base + at[m][i] + step));
  }
};

// One of FP4 for each of a lane's rows.
template <int kTall>
using OfRows = uint32_t[kTall][2];

// A lane's scales of FP4 for a step: of each row two, in the lowest bytes. Whether a lane of the warp has one above 1: then
// numbers may need two factors.
template <int kTall>
__device__ __forceinline__ bool load_scales(OfRows<kTall>& to, const uint8_t* scales, int row, int part) {
  uint32_t all = 0;
#pragma unroll
  for (int m = 0; m < kTall; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint8_t* from = scales + (row + m * 64 + i * 8) * kStepScales + part * 2;
      all |= to[m][i] = *reinterpret_cast<const uint16_t*>(from);
    }
  return __any_sync(~0u, all & 0x8080);
}

// What some products multiply: of FP4 all of a warpgroup's tiles, of FP8 one of them.
template <int kHeld>
using Operands = uint32_t[kHeld][4];

// A row of the weight with a NaN has no other sums.
template <int kTall, int kSums>
__device__ __forceinline__ void spread_nan(float (&sums)[kTall][kSums], const uint32_t (&largest)[kTall][2]) {
#pragma unroll
  for (int m = 0; m < kTall; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {  // the row's other lanes have others of its numbers
      uint32_t all = larger_pairs(largest[m][i], __shfl_xor_sync(~0u, largest[m][i], 1));
      all = larger_pairs(all, __shfl_xor_sync(~0u, all, 2));
      if (!has_nan(all)) continue;
#pragma unroll
      for (int j = i * 2; j < kSums; j += 4) sums[m][j] = sums[m][j + 1] = __int_as_float(0x7FC00000);
    }
}

template <int kTall, int kSums>
__device__ __forceinline__ void store_sums(const Call& call, const Tile& tile, const Lane<kTall>& lane,
                                           const float (&sums)[kTall][kSums]) {
  int row = tile.out + lane.row;
  if (call.float_out) {
    int column = lane.part * 2;
    float* to = static_cast<float*>(call.out) + int64_t{tile.row + column} * call.n + row;
#pragma unroll
    for (int j = 0; j < kSums; j += 4, column += 8, to += int64_t{8} * call.n)
#pragma unroll
      for (int m = 0; m < kTall; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (row + m * 64 + i / 2 * 8 < call.n && column + i % 2 < tile.count)
            to[m * 64 + i / 2 * 8 + (i % 2 ? call.n : 0)] = sums[m][j + i];
    return;
  }
  // Lanes of neighbouring rows exchange: one has both rows of both columns, the other one those 8 further. So eight lanes
  // together store 32 bytes.
  bool odd = threadIdx.x / 4 & 1;
  int column = lane.part * 2;
  row += odd ? 7 : 0;
  uint16_t* to = static_cast<uint16_t*>(call.out) + int64_t{tile.row + column} * call.n + row;
#pragma unroll
  for (int j = 0; j < kSums; j += 4, column += 8, to += int64_t{8} * call.n)
#pragma unroll
    for (int m = 0; m < kTall; m++) {
      uint32_t first = rounded({sums[m][j], sums[m][j + 1]}), second = rounded({sums[m][j + 2], sums[m][j + 3]});
      uint32_t mine = odd ? second : first, other = __shfl_xor_sync(~0u, odd ? first : second, 4);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t pair = permute(mine, other, (odd ? 0x1054 : 0x5410) + i * 0x2222);
        if (row + m * 64 < call.n && column + i < tile.count)
          *reinterpret_cast<uint32_t*>(to + m * 64 + (i ? call.n : 0)) = pair;
      }
    }
}

// The operands of a product of FP4, of 16 of k: a half of one word of each row. A large scale, which is seldom, has a second
// factor.
template <int kTall>
__device__ __forceinline__ void convert(Operands<kTall>& to, const uint4 (&stored)[kTall][2], int product,
                                        const OfRows<kTall>& factors, const OfRows<kTall>& scales, int byte,
                                        bool large) {
#pragma unroll
  for (int m = 0; m < kTall; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4& x = stored[m][i];
      uint32_t words[] = {x.x, x.y, x.z, x.w}, word = words[product / 2] >> (product % 2 * 8);
      to[m][i] = convert_fp4<false>(word, factors[m][i]);
      to[m][2 + i] = convert_fp4<true>(word, factors[m][i]);
    }
  if (!large) return;
#pragma unroll
  for (int m = 0; m < kTall; m++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      to[m][i] = multiply_pairs(to[m][i], second_factor(permute(scales[m][i % 2], 0, 0x4440 + byte)));
}

// A tile's sums of FP4. A lane has 16 bytes of a row at a time, which no other lane has, for eight products of 16 of k: so
// rows of x have their columns in another order (jax_sparse_mla/serving/quantised_cuda.py, `in_lanes`). The next 16 bytes
// come while these are multiplied. Products follow each other with two sets of operands: one is converted while the
// products of the other one are under way. Where more start together, ptxas says that registers are short, and lets none
// overlap.
template <int kTall, int kSums>
__device__ __forceinline__ void sum_products(const Call& call, Shared<Shape<true>>& shared, const Lane<kTall>& lane,
                                             Place<kSteps>& weights_at, Place<Shape<true>::kSlots>& x_at,
                                             float (&sums)[kTall][kSums]) {
  Operands<kTall> operands[2];
  uint4 stored[2][kTall][2];  // of this half of a step and of the next one
  OfRows<kTall> scales, factors;
  int steps = call.k / Shape<true>::kStep, thread = threadIdx.x % 32;
  int used = -1;  // the slot of x that products under way may still read

  auto load = [&](int half) {
#pragma unroll
    for (int m = 0; m < kTall; m++) lane.load(stored[half][m], shared.weights[weights_at.at], m, lane.part * 2 + half);
  };
  wait(&shared.full_weights[weights_at.at], weights_at.phase);
  load(0);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    bool large = load_scales<kTall>(scales, shared.scales[weights_at.at], lane.row, lane.part);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int m = 0; m < kTall; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) factors[m][i] = first_factor(permute(scales[m][i], 0, 0x4440 + half));
      uint64_t x = 0;
#pragma unroll
      for (int i = 0; i < 2 * kProducts; i++) {
        auto& converted = operands[i % 2];
        convert<kTall>(converted, stored[half], i, factors, scales, half, large);
        if (i % kProducts == 0) {
          x = by_rows(shared_address(shared.x[x_at.at]));
          wait(&shared.full_x[x_at.at], x_at.phase);
        }
        begin_products();
#pragma unroll
        for (int m = 0; m < kTall; m++) multiply_bfloat16(sums[m], converted[m], advance(x, i % kProducts * 32), true);
        commit_products();
        wait_products<1>();
        if (i % kProducts == 0) {
          if (used >= 0) arrive_warp(&shared.free_x[used], thread);
          used = x_at.at, x_at.advance();
        }
        if (i == kProducts && half == 0) load(1);
        if (i == kProducts && half == 1) {  // registers have all of this step
          __syncwarp();
          arrive_warp(&shared.free_weights[weights_at.at], thread);
          weights_at.advance();
          if (step + 1 < steps) {
            wait(&shared.full_weights[weights_at.at], weights_at.phase);
            load(0);
          }
        }
      }
    }
  }
  wait_products<0>();
  arrive_warp(&shared.free_x[used], thread);
}

// Those of FP8, one tile of 64 rows after the other in a step.
template <int kTall, int kSums>
__device__ __forceinline__ void sum_products(const Call& call, Shared<Shape<false>>& shared, const Tile& tile,
                                             const Lane<kTall>& lane, Place<kSteps>& weights_at,
                                             Place<Shape<false>::kSlots>& x_at, float (&sums)[kTall][kSums]) {
  constexpr int kSlotsOfStep = Shape<false>::kSlotsOfStep;
  uint32_t largest[kTall][2] = {}, selector = selector_of_fp8(lane.part);
  Operands<1> operands[2];
  int steps = call.k / Shape<false>::kStep, thread = threadIdx.x % 32;
  Scales scales(call, tile, lane.row), next(call, tile, lane.row);
  next.load(call, 0);
  for (int step = 0; step < steps; step++) {
    scales = next;
    if (step + 1 < steps) next.load(call, step + 1);
    Place<Shape<false>::kSlots> first_x = x_at;
    wait(&shared.full_weights[weights_at.at], weights_at.phase);
    const uint8_t* weights = shared.weights[weights_at.at];
#pragma unroll
    for (int pass = 0; pass < kTall; pass++) {
      float parts[kSums];
      uint4 stored[2][2];
      lane.load(stored[0], weights, pass, 0);
      x_at = first_x;
#pragma unroll
      for (int slot = 0; slot < kSlotsOfStep; slot++, x_at.advance()) {
        uint32_t x = shared_address(shared.x[x_at.at]);
#pragma unroll
        for (int i = 0; i < kProducts; i++) {
          int product = slot * kProducts + i;
          auto& converted = operands[i % 2];
          if (product + 1 < kSlotsOfStep * kProducts) lane.load(stored[1 - i % 2], weights, pass, product + 1);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const uint4& bytes = stored[i % 2][j];
            converted[0][j] = convert_fp8(bytes.x, bytes.y, selector, largest[pass][j]);
            converted[0][2 + j] = convert_fp8(bytes.z, bytes.w, selector, largest[pass][j]);
          }
          if (i == 0 && pass == 0) wait(&shared.full_x[x_at.at], x_at.phase);
          begin_products();
          multiply_bfloat16(parts, converted[0], by_rows(x + i * 32), product > 0);
          commit_products();
          wait_products<1>();
        }
      }
      wait_products<0>();
#pragma unroll
      for (int j = 0; j < kSums; j++) sums[pass][j] = fmaf(parts[j], scales.numbers[pass][j / 2 % 2], sums[pass][j]);
    }
    __syncwarp();
    arrive_warp(&shared.free_weights[weights_at.at], thread);
    weights_at.advance();
    for (int slot = 0; slot < kSlotsOfStep; slot++, first_x.advance()) arrive_warp(&shared.free_x[first_x.at], thread);
  }
  spread_nan(sums, largest);
}

template <typename Shape, int kColumns>
__device__ __forceinline__ void multiply_tile(const Call& call, Shared<Shape>& shared, const Tile& tile,
                                              const Lane<Shape::kTall>& lane, Place<kSteps>& weights_at,
                                              Place<Shape::kSlots>& x_at) {
  float sums[Shape::kTall][kColumns / 2] = {};
  if constexpr (Shape::kFp4)
    sum_products(call, shared, lane, weights_at, x_at, sums);
  else
    sum_products(call, shared, tile, lane, weights_at, x_at, sums);
  store_sums(call, tile, lane, sums);
}

// As many columns as the tile has.
template <typename Shape, int kColumns>
__device__ __forceinline__ void multiply_columns(const Call& call, Shared<Shape>& shared, const Tile& tile,
                                                 const Lane<Shape::kTall>& lane, Place<kSteps>& weights_at,
                                                 Place<Shape::kSlots>& x_at) {
  if constexpr (kColumns < Shape::kMost)
    if (tile.columns() > kColumns)
      return multiply_columns<Shape, kColumns + kGrain>(call, shared, tile, lane, weights_at, x_at);
  multiply_tile<Shape, kColumns>(call, shared, tile, lane, weights_at, x_at);
}

template <typename Shape>
__device__ void consume(const Call& call, Shared<Shape>& shared) {
  Lane<Shape::kTall> lane;
  Place<kSteps> weights_at;
  Place<Shape::kSlots> x_at;
  for_each_tile(call, shared, [&](const Tile& tile) {
    multiply_columns<Shape, kGrain>(call, shared, tile, lane, weights_at, x_at);
  });
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) expert_tiles_kernel(const __grid_constant__ Call call) {
  Shared<Shape>& shared = *reinterpret_cast<Shared<Shape>*>(tiles_memory());
  if (threadIdx.x == 0) {
    constexpr int kReaders = Shape::kConsumers / 32 * kArrivalsOfWarp;
    for (int i = 0; i < kSteps; i++) init(&shared.full_weights[i], kCopies<Shape>), init(&shared.free_weights[i], kReaders);
    for (int i = 0; i < Shape::kSlots; i++) init(&shared.full_x[i], 1), init(&shared.free_x[i], kReaders);
    fence_barriers();
  }
  if (threadIdx.x / 32 == 1) count_tiles(call, shared);
  __syncthreads();
  int warp = threadIdx.x / 32;
  if (warp < Shape::kConsumers / 32) {
    grow_registers<Shape::kRegisters>();
    consume(call, shared);
    return;
  }
  shrink_registers<kProducerRegisters>();
  if (warp == Shape::kConsumers / 32) copy_weights(call, shared);
  if (warp == Shape::kConsumers / 32 + 1 && threadIdx.x % 32 == 0) copy_x(call, shared);
}

}  // namespace expert_tiles
