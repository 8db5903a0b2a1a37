// The indexer's logits of FP4 keys on SM90, for decode: each row reads keys of its own.
//
// A key is 64 bytes of e2m1 numbers, two a byte, and four UE8M0 scales, one for each 32 numbers. An e2m1 number times 2^e
// is an e5m2 number for every e from -13 to 13, so keys within these scales become the operand of an FP8 product without
// rounding. A power of two for each head, which goes into its weight, brings the queries into e5m2. Where that does not
// hold a row's queries, or the keys of a warp, the warp makes these logits by bfloat16 products, which hold everything.
//
// Steps of 128 keys of all rows follow each other, and each thread block takes an equal share. A producer warp copies the
// keys of one step after the other into a ring in shared memory; warpgroups take turns with the steps. Keys are the first
// operand of a product, in registers, and a row's queries the second, so the sum over heads stays within four lanes. A
// lane has the 32 numbers of one scale of two keys: the numbers of a key are multiplied in an order in which the bytes
// that a lane loads at once are those that its operands take, and the queries are written in this order.

#pragma once

#include <cuda_fp16.h>

#include "../sm90.cuh"
#include "rows.cuh"

namespace index_logits::fp4 {

using namespace sm90;

constexpr int kDim = 128, kKeyBytes = 64, kScaleBytes = 4, kTokenBytes = kKeyBytes + kScaleBytes;
constexpr int kGroup = 32;           // numbers that share a scale
constexpr int kTile = 64;            // keys of a product, which lie in one page
constexpr int kTiles = 2;            // of a step
constexpr int kStep = kTiles * kTile;
constexpr int kStages = 16;          // steps in shared memory
constexpr int kMostRows = 256;
constexpr unsigned kLeastScale = 114, kScales = 27;  // UE8M0 of 2^-13, and the number of scales from there on
constexpr int kBias = 127, kLargestQuery = 14;       // the exponent of a head's largest query in e5m2
constexpr int kQueryExponents = 40;                  // of a head's largest query, at most, either sign
constexpr float kLeastNormal = 0x1p-126f;            // a scaled weight below it has lost bits

constexpr int kWarpgroups = 4;  // that compute
constexpr int kConsumers = kWarpgroups * 128;
constexpr int kThreads = kConsumers + 128;  // the last warpgroup: producer, filler
constexpr int kConsumerRegisters = 104, kProducerRegisters = 56;  // of 96 that each thread begins with

struct Call {
  const uint16_t* q;      // bfloat16 [rows, heads, 128]
  const float* weights;   // [rows, heads]
  const uint8_t* cache;   // the first of num_pages pages
  const int* page_table;  // [rows, width]
  const int* lengths;     // [rows]
  float* out;             // [rows, capacity]
  int64_t page_bytes;
  int rows, heads, width, page_size, capacity, num_pages;
  bool fill;  // whether to write -inf where no length reaches
};

// As in a page of 64 keys.
struct Tile {
  uint8_t values[kTile][kKeyBytes];
  uint8_t scales[kTile][kScaleBytes];
};

template <int kHeads>
struct Shared {
  uint8_t queries[kHeads][kDim];  // e5m2, 16-byte chunks permuted within a head
  Tile keys[kStages][kTiles];
  float scaled_weights[kHeads];  // half of the weights, each with the power of two that its head's queries lack
  float weights[kHeads];
  int counts[kStages][kTiles];  // keys of each tile, from its first on; -1 past the logits' capacity
  Barrier full[kStages], empty[kStages];
  int lengths[kMostRows], ends[kMostRows];  // of the rows; the steps of the rows up to each of them
  int unheld;                               // the last run whose queries e5m2 does not hold
};

template <int kHeads>
constexpr int kSharedBytes = sizeof(Shared<kHeads>) + 1024;  // queries begin at a multiple of 1024 bytes

// Where a step of the thread block lies in the ring, and which of its barriers' phases are this step's.
__device__ __forceinline__ int slot_of(unsigned step) { return step % kStages; }
__device__ __forceinline__ int parity_of(unsigned step) { return step / kStages % 2; }

// --- the work ---------------------------------------------------------------------------------------------------

// Lengths and the sums of their steps.
template <int kHeads>
__device__ void count_steps(const Call& call, Shared<kHeads>& shared) {
  for (int row = threadIdx.x; row < call.rows; row += kThreads) shared.lengths[row] = length_of(call, row);
  __syncthreads();
  int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    int before = 0;
    for (int first = 0; first < call.rows; first += 32) {
      int row = first + lane, steps = row < call.rows ? (shared.lengths[row] + kStep - 1) / kStep : 0;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        int left = __shfl_up_sync(~0u, steps, distance);
        if (lane >= distance) steps += left;
      }
      if (row < call.rows) shared.ends[row] = before + steps;
      before += __shfl_sync(~0u, steps, 31);
    }
  }
  __syncthreads();
}

// The runs of this thread block's steps, each of one row.
struct Runs {
  const int* ends;
  int rows, at, stop;                          // steps of all rows
  int row = 0, first = 0, begin = 0, end = 0;  // the run: its row, its first step there, and its steps of this block

  template <int kHeads>
  __device__ Runs(const Call& call, const Shared<kHeads>& shared) : ends(shared.ends), rows(call.rows) {
    int64_t total = ends[rows - 1];
    at = static_cast<int>(total * blockIdx.x / gridDim.x), stop = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  }

  __device__ bool next() {
    if (at >= stop) return false;
    int low = row, high = rows - 1;  // the first row that ends behind this step
    while (low < high) {
      int middle = (low + high) / 2;
      if (ends[middle] > at)
        high = middle;
      else
        low = middle + 1;
    }
    row = low, first = at - (row ? ends[row - 1] : 0);
    int through = min(ends[row], stop);
    begin = end, end += through - at, at = through;
    return true;
  }
};

// --- the producer -----------------------------------------------------------------------------------------------

struct Source {
  int page, line, count;  // the page, the key in it with which the tile begins, and the count as in `Shared`
};

__device__ __forceinline__ Source source_of(const Call& call, int row, int length, int column) {
  Source source = {0, 0, column < call.capacity ? 0 : -1};
  if (column >= length) return source;
  int at_page = column / call.page_size, page = call.page_table[int64_t{row} * call.width + at_page];
  if (page < 0 || page >= call.num_pages) return source;
  return {page, column - at_page * call.page_size, min(length - column, kTile)};
}

__device__ __forceinline__ void copy_tile(const Call& call, Tile& tile, int page, int line, Barrier* full) {
  const uint8_t* from = call.cache + page * call.page_bytes;
  if (call.page_size == kTile) {
    copy_bytes_once(&tile, from, sizeof(Tile), full);
  } else {
    copy_bytes_once(tile.values, from + line * kKeyBytes, sizeof tile.values, full);
    copy_bytes_once(tile.scales, from + call.page_size * kKeyBytes + line * kScaleBytes, sizeof tile.scales, full);
  }
}

// One warp. Its lanes look 32 tiles up, one each, and copy them, those of kAtOnce steps after each other.
template <int kHeads>
__device__ void produce(const Call& call, Shared<kHeads>& shared) {
  constexpr int kLookedUp = 32 / kTiles, kAtOnce = 4;
  int lane = threadIdx.x % 32, tile = lane % kTiles;
  for (Runs runs(call, shared); runs.next();) {
    int length = shared.lengths[runs.row], column = runs.first * kStep + lane * kTile;
    Source next = source_of(call, runs.row, length, column);
    for (int first = runs.begin; first < runs.end; first += kLookedUp) {
      Source mine = next;
      if (first + kLookedUp < runs.end) next = source_of(call, runs.row, length, column += kLookedUp * kStep);
      int bytes = mine.count > 0 ? static_cast<int>(sizeof(Tile)) : 0;
      bytes += __shfl_xor_sync(~0u, bytes, 1);
      int my_step = first + lane / kTiles, slot = slot_of(my_step);
      for (int step = first; step < min(first + kLookedUp, runs.end); step += kAtOnce) {
        int stop = min(step + kAtOnce, runs.end);
        for (int i = step; i < stop; i++) wait(&shared.empty[slot_of(i)], 1 - parity_of(i));
        bool copies = my_step >= step && my_step < stop;
        if (copies) shared.counts[slot][tile] = mine.count;
        __syncwarp();
        if (copies && tile == 0) expect(&shared.full[slot], bytes);
        if (copies && tile > 0 && kArrivalsOfWarp > 1) arrive(&shared.full[slot]);
        __syncwarp();
        if (copies && mine.count > 0)
          copy_tile(call, shared.keys[slot][tile], mine.page, mine.line, &shared.full[slot]);
        __syncwarp();
      }
    }
  }
}

// --- queries ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + kBias) << 23); }

// A row's queries in e5m2 and its weights, by all threads that compute; false where e5m2 does not hold this thread's. A
// warp has a head, a lane the numbers 4 lane and on. Number d is the column 32 (d / 8 % 4) + 16 (d / 4 % 2) + 4 (d / 32)
// + d % 4 of a product: of 16 bytes of a key, word i is that of the products' step i.
template <int kHeads>
__device__ bool write_queries(const Call& call, Shared<kHeads>& shared, int row) {
  int lane = threadIdx.x % 32;
  bool held = true;
  for (int head = threadIdx.x / 32; head < kHeads; head += kConsumers / 32) {
    uint2 numbers = make_uint2(0, 0);
    float weight = 0;
    if (head < call.heads) {
      int64_t at = int64_t{row} * call.heads + head;
      numbers = reinterpret_cast<const uint2*>(call.q + at * kDim)[lane];
      weight = call.weights[at];
    }
    float x[4] = {__int_as_float(numbers.x << 16), __int_as_float(numbers.x & 0xFFFF0000),
                  __int_as_float(numbers.y << 16), __int_as_float(numbers.y & 0xFFFF0000)};
    int largest = 0;
#pragma unroll
    for (float number : x) largest = max(largest, __float_as_int(number) >> 23 & 0xFF);
    largest = __reduce_max_sync(~0u, largest);
    bool moderate = largest == 0 || (largest >= kBias - kQueryExponents && largest <= kBias + kQueryExponents);
    int shift = kLargestQuery - (moderate && largest ? largest - kBias : 0);
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float scaled = x[i] * power_of_two(shift);
      __half half = __float2half_rn(scaled);
      uint32_t bits = __half_as_ushort(half);
      held &= __half2float(half) == scaled && (bits & 0xFF) == 0;
      bytes |= bits >> 8 << 8 * i;
    }
    held &= moderate;
    *reinterpret_cast<uint32_t*>(&shared.queries[head][(lane % 8 ^ head % 8) * 16 + lane / 8 * 4]) = bytes;
    float scaled_weight = weight * power_of_two(-shift - 1);
    held &= weight == 0 || (fabsf(scaled_weight) >= kLeastNormal && fabsf(scaled_weight) < INFINITY);
    if (lane == 0) {
      shared.weights[head] = weight;
      shared.scaled_weights[head] = scaled_weight;
    }
  }
  return held;
}

// --- keys -------------------------------------------------------------------------------------------------------

// Eight e2m1 numbers of a word as e5m2 ones. `small` has the bytes of 0, 0.5, 1 and 1.5 with the scale's exponent, `large`
// those of 2, 3, 4 and 6; a nibble without its sign selects one.
__device__ __forceinline__ void convert(uint32_t word, uint32_t small, uint32_t large, uint32_t& first,
                                        uint32_t& second) {
  uint32_t codes = word & 0x77777777, shifted = word << 4;
  first = permute(small, large, codes) | (permute(shifted, word, 0x5140) & 0x80808080);
  second = permute(small, large, codes >> 16) | (permute(shifted, word, 0x7362) & 0x80808080);
}

// This lane's part of a tile's keys as the operands of four products: of the keys line and line + 8 the numbers 32 part and
// on. Returns kScales or more where e5m2 does not hold one of their two scales, be it of a key that is not read.
__device__ __forceinline__ unsigned load_keys(uint32_t (&operands)[4][4], const Tile& tile, int line, int part) {
  unsigned furthest = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int key = line + 8 * i;
    uint4 words = *reinterpret_cast<const uint4*>(&tile.values[key][part * 16]);
    uint32_t scale = tile.scales[key][part];
    furthest = max(furthest, scale - kLeastScale);
    // Bytes of scales in range do not carry into each other.
    uint32_t small = scale * 0x04040400u + (0x0A080400u - kLeastScale * 0x04040400u);
    uint32_t large = scale * 0x04040404u + (0x12100E0Cu - kLeastScale * 0x04040404u);
    convert(words.x, small, large, operands[0][i], operands[0][i + 2]);
    convert(words.y, small, large, operands[1][i], operands[1][i + 2]);
    convert(words.z, small, large, operands[2][i], operands[2][i + 2]);
    convert(words.w, small, large, operands[3][i], operands[3][i + 2]);
  }
  return furthest;
}

template <int kScores>
__device__ __forceinline__ void multiply_keys(float (&scores)[kScores], const uint32_t (&keys)[4][4],
                                              uint64_t queries) {
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; step++) multiply_e5m2(scores, keys[step], advance(queries, step * 32), step > 0);
  commit_products();
  wait_products<0>();
}

// The sum over half of the heads: lanes l and l ^ 2 together have all. Even lanes have that of the key `line`, odd lanes
// that of line + 8.
__device__ __forceinline__ float join(float low, float high, int part) {
  bool odd = part & 1;
  float other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  return (odd ? high : low) + other;
}

// Weights are halved: x + |x| is twice relu(x), and an addition takes half the time of a maximum.
template <int kScores>
__device__ __forceinline__ float sum_heads(const float (&scores)[kScores], const float2 (&weights)[kScores / 4],
                                           int part) {
  float low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < kScores / 4; i++) {
    const float* score = scores + i * 4;
    low = fmaf(score[0] + fabsf(score[0]), weights[i].x, low);
    high = fmaf(score[2] + fabsf(score[2]), weights[i].x, high);
    low = fmaf(score[1] + fabsf(score[1]), weights[i].y, low);
    high = fmaf(score[3] + fabsf(score[3]), weights[i].y, high);
  }
  return join(low, high, part);
}

// --- what e5m2 does not hold ------------------------------------------------------------------------------------

// Four e2m1 numbers times a scale, which stands twice in `scales`, as bfloat16 numbers, which hold them.
__device__ __forceinline__ void convert_exactly(uint32_t word, uint32_t scales, uint32_t& first, uint32_t& second) {
  uint32_t codes = word & 0x7777;
  uint32_t upper = permute(0x3F3F3F00, 0x40404040, codes) | (permute(word << 4, word, 0x5140) & 0x80808080);
  uint32_t lower = permute(0xC0800000, 0xC0804000, codes);
  first = multiply_pairs(permute(lower, upper, 0x5140), scales);
  second = multiply_pairs(permute(lower, upper, 0x7362), scales);
}

__device__ __forceinline__ float relu(float x) { return x <= 0 ? 0 : x; }  // a NaN stays one

// Whether this lane has a scale of a key that is read that e5m2 does not hold.
__device__ __forceinline__ bool is_outside(const Tile& tile, int line, int part, int count) {
  bool outside = false;
#pragma unroll
  for (int key = line; key <= line + 8; key += 8)
    outside |= tile.scales[key][part] - kLeastScale >= kScales && key < count;
  return outside;
}

// As the products and `sum_heads`, for the 16 keys of a warp.
template <int kHeads>
__device__ __forceinline__ float score_exactly(const Call& call, const Shared<kHeads>& shared, const Tile& tile, int row,
                                               int line, int part) {
  float scores[kHeads / 2] = {};
  uint32_t scales[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t byte = tile.scales[line + 8 * i][part];
    scales[i] = (byte << 7 | (byte == 0 || byte == 255 ? 0x40 : 0)) * 0x10001;  // the ends are 2^-127 and NaN
  }
  int lane = threadIdx.x % 32;
  const uint16_t* queries = call.q + int64_t{row} * call.heads * kDim + part * kGroup;
#pragma unroll 1
  for (int step = 0; step < 8; step++) {  // four numbers of each lane's group at a time
    uint32_t keys[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t code = *reinterpret_cast<const uint16_t*>(&tile.values[line + 8 * i][part * 16 + step * 2]);
      convert_exactly(code, scales[i], keys[i], keys[i + 2]);
    }
#pragma unroll
    for (int i = 0; i < kHeads / 8; i++) {
      int head = i * 8 + lane / 4;
      uint2 numbers = make_uint2(0, 0);
      if (head < call.heads) numbers = *reinterpret_cast<const uint2*>(queries + head * kDim + step * 4);
      multiply_in_warp(scores + i * 4, keys, numbers.x, numbers.y);
    }
  }
  float low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < kHeads / 8; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int head = i * 8 + part * 2 + j;
      if (head >= call.heads) continue;  // a key may be infinite, and its product with 0 no number
      float weight = shared.weights[head];
      low = fmaf(relu(scores[i * 4 + j]), weight, low);
      high = fmaf(relu(scores[i * 4 + j + 2]), weight, high);
    }
  }
  return join(low, high, part);
}

// --- the consumers ----------------------------------------------------------------------------------------------

template <int kHeads>
__device__ void consume(const Call& call, Shared<kHeads>& shared) {
  int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, line = warp % 4 * 16 + lane / 4, part = lane % 4;
  int key = line + part % 2 * 8;  // whose logit this lane writes: of the first tile, or of the second
  bool second = part >= 2;
  uint64_t queries = by_rows(shared_address(shared.queries));
  int run = 0, step = warp / 4;
  for (Runs runs(call, shared); runs.next(); run++) {
    sync_threads(1, kConsumers);  // all have done with the last run's queries
    if (!write_queries(call, shared, runs.row)) shared.unheld = run;
    fence_matrix_reads();
    sync_threads(1, kConsumers);
    bool held = uniform(shared.unheld) != run;
    float2 weights[kHeads / 8];
#pragma unroll
    for (int i = 0; i < kHeads / 8; i++)
      weights[i] = *reinterpret_cast<const float2*>(&shared.scaled_weights[i * 8 + part * 2]);
    int column = (runs.first - runs.begin) * kStep + second * kTile + key;  // that of step 0
    float* out = call.out + int64_t{runs.row} * call.capacity + column;
    auto score = [&](const Tile& tile) { return score_exactly(call, shared, tile, runs.row, line, part); };
    auto end_step = [&](int step, float first, float last) {
      int slot = slot_of(step), count = shared.counts[slot][second];
      float logit = (second ? last : first) + __shfl_xor_sync(~0u, second ? first : last, 2);
      if (count >= 0) out[step * kStep] = key < count ? logit : -INFINITY;
      __syncwarp();
      arrive_warp(&shared.empty[slot], lane);
    };
    // Without a branch within the loop: all steps of the run in the first one, or in the second.
    for (; !held && step < runs.end; step += kWarpgroups) {
      const Tile(&tiles)[kTiles] = shared.keys[slot_of(step)];
      wait(&shared.full[slot_of(step)], parity_of(step));
      float first = score(tiles[0]), last = score(tiles[1]);
      end_step(step, first, last);
    }
    for (; step < runs.end; step += kWarpgroups) {
      int slot = slot_of(step);
      const Tile(&tiles)[kTiles] = shared.keys[slot];
      wait(&shared.full[slot], parity_of(step));
      uint32_t operands[4][4];  // of one tile after the other, so that registers suffice for four warpgroups
      float scores[kHeads / 2];
      unsigned furthest = load_keys(operands, tiles[0], line, part);
      multiply_keys(scores, operands, queries);
      float first = sum_heads(scores, weights, part);
      furthest = max(furthest, load_keys(operands, tiles[1], line, part));
      multiply_keys(scores, operands, queries);
      float last = sum_heads(scores, weights, part);
      if (__any_sync(~0u, furthest >= kScales)) {
        const int(&counts)[kTiles] = shared.counts[slot];
        if (__any_sync(~0u, is_outside(tiles[0], line, part, counts[0]))) first = score(tiles[0]);
        if (__any_sync(~0u, is_outside(tiles[1], line, part, counts[1]))) last = score(tiles[1]);
      }
      end_step(step, first, last);
    }
  }
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1) fp4_logits_kernel(const __grid_constant__ Call call) {
  auto& shared = *reinterpret_cast<Shared<kHeads>*>(tiles_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      init(&shared.full[i], kArrivalsOfWarp == 1 ? 1 : kTiles);
      init(&shared.empty[i], 4 * kArrivalsOfWarp);
    }
    fence_barriers();
    shared.unheld = -1;
  }
  count_steps(call, shared);
  int role = uniform(threadIdx.x / 32) - kConsumers / 32;
  if (role < 0) {
    grow_registers<kConsumerRegisters>();
    consume(call, shared);
    return;
  }
  shrink_registers<kProducerRegisters>();
  if (role == 0) produce(call, shared);
  if (role == 1 && call.fill) fill<kStep>(call);
}

}  // namespace index_logits::fp4
