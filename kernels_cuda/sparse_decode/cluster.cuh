// The cluster kernel, for few rows: the thread blocks of a cluster share a row's keys and add up their parts.
//
// Scores and output are transposed, so that heads are columns of the matrix products: 16 or 32 of them, not 64. There
// are no producers and consumers: with few rows the latency from an index to the output counts, not the throughput.

#pragma once

#include "join.cuh"
#include "keys.cuh"
#include "shared.cuh"

namespace sparse_decode {

constexpr int kMostParts = 16;  // thread blocks of a cluster

// What a thread block sends another of its sums: eight of each of a warp's lanes, as float16 times a power of two. So
// few bytes go between thread blocks, and any magnitude keeps float16's eleven bits.
struct Unit {
  uint4 values[32];
  float2 scale;  // the power of two by which they are multiplied again, and nothing
};
static_assert(sizeof(Unit) % 16 == 0);
constexpr int kUnitBytes = 32 * 16 + 8;  // that are sent

// The power of two by which values become float16, the largest of them less than 2^15, and the one that undoes it.
struct HalfScale {
  float up, down;
  __device__ __forceinline__ explicit HalfScale(int bits_of_largest) {
    int exponent = min(max(bits_of_largest >> 23, 15), 254);
    up = __int_as_float(268 - exponent << 23), down = __int_as_float(exponent - 14 << 23);
  }
};

// Places for so many units, dealt to any number of parts.
constexpr int places_of(int units) {
  int most = 0;
  for (int parts = 1; parts <= kMostParts; parts++) {
    int places = (units + parts - 1) / parts * parts;
    most = places > most ? places : most;
  }
  return most;
}

// Each of the four warpgroups has a slice of 128 columns of the keys (the last one V3.2's rope part too). It converts
// them (bfloat16 rows are copied), and computes its part of the scores and its rows of the transposed output from them
// alone.
template <Format kFormat, int kN>
struct ClusterShared {
  using L = Layout<kFormat>;
  uint8_t keys[L::kTiles][kTileBytes];     // of a block; rows are tokens
  float scores[4][kN][kBlock + 4];         // of a block, each warpgroup's part
  uint8_t queries[L::kTiles][kN * 128];    // rows are heads
  uint8_t weights[kN * 128];               // of a block; rows are heads
  float rescale[kN];                       // factors of the sums before a block is added
  float2 statistics[kMostParts][kN];       // of each part: base-2 maximum, and sum of the weights relative to it
  alignas(8) uint16_t valid[kBlock / 16];  // a bit for each key
  Barrier statistics_full, units_full;
  float factors[kMostParts][kN];  // of each part's values in the end

  // What this thread block adds up, of each part one unit beside the other. Other thread blocks write here before this
  // one has read all its scores, so nothing else may lie here.
  static constexpr int kUnits = kN / 8 * (kThreads / 32);  // of all warps
  Unit units[places_of(kUnits)];
  __device__ __forceinline__ Unit* unit(int number_here, int parts, int part) {
    return units + number_here * parts + part;
  }
  static_assert((sizeof(keys) + sizeof(scores)) % 1024 == 0 && sizeof(queries) % 1024 == 0);  // tiles begin there
};

template <typename T>
__device__ __forceinline__ T of_lane(T x, int lane) {
  return __shfl_sync(~0u, x, lane);
}

// The largest value of a warp's lanes. Their bits are compared as integers, which is one instruction; those of negative
// numbers are turned round first, and again in the result.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }
__device__ __forceinline__ float largest_of_warp(float x) {
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

// The slot of a key in a row's block, or -1.
__device__ __forceinline__ int slot_of(const Call& call, Lengths lengths, int row, int block, int key) {
  Column at(call, lengths, row, block, key);
  return at.column < at.length ? __ldg(at.index) : -1;
}

// A tile's scale, as in the cache; V4.1's two, or the four of an FP4 row.
template <Format kFormat>
__device__ __forceinline__ auto load_scale(const uint8_t* scales, int tile, bool fp4) {
  if constexpr (kFormat == kV4) {
    return static_cast<uint32_t>(__ldg(scales + tile));
  } else if constexpr (Layout<kFormat>::kIsV41) {
    if (fp4) return __ldg(reinterpret_cast<const uint32_t*>(scales) + tile);
    return static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(scales) + tile));
  } else {
    return __ldg(reinterpret_cast<const float*>(scales) + tile / 2);
  }
}

// The scale in the form that `convert` takes; V4.1's two each in one half. Those of an FP4 row stay as they are.
template <Format kFormat, typename Scale>
__device__ __forceinline__ Scale ready(Scale scale, bool fp4) {
  if constexpr (kFormat == kV4) return PowersOfTwo::of_exponent(scale);
  if constexpr (Layout<kFormat>::kIsV41) {
    if (fp4) return scale;
    return __byte_perm(PowersOfTwo::of_exponent(scale & 255), PowersOfTwo::of_exponent(scale >> 8), 0x5410);
  }
  return scale;
}

// The scale of the `part`-th 16 values of a tile.
__device__ __forceinline__ uint32_t for_part(uint32_t ready, int part) {
  return __byte_perm(ready, 0, part < 2 ? 0x1010 : 0x3232);
}

// The work of a thread in its thread block's part of a row.
template <Format kFormat, int kN>
struct PartOfRow {
  using L = Layout<kFormat>;
  using Memory = ClusterShared<kFormat, kN>;
  using Scale = decltype(load_scale<kFormat>(nullptr, 0, false));
  static constexpr int kRopeTile = L::kTiles - 1, kOwnHeads = kN / 16, kPairs = kN / 2;

  const Call& call;
  Memory& shared;
  int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), slice = warp / 4;
  int row = blockIdx.z, first_head = blockIdx.y * kN, heads = call.heads - first_head;
  int rank = blockIdx.x, parts = call.deal.parts.divisor;
  // The address of the shared memory of the part whose number is the lane's.
  uint32_t of_part = sm90::address_of(&shared, lane < parts ? lane : 0);
  Lengths lengths = lengths_of(call, row);
  int blocks = lengths.blocks(), blocks_of_part = Part(call, blocks, true, 0).last;
  Part own = Part(call, blocks, true, rank);
  int used;  // parts that have keys

  // A warp loads its slice's columns of 16 keys. Two lanes find each key's row, and each of the two loads the scale of
  // one tile. Values are loaded 16 at once, by four lanes for a key's tile.
  // Of bfloat16 rows, eight lanes copy a key's tile.
  int key = L::kIsBf16 ? lane / 8 : lane / 16 * 2 + lane / 4 % 2;
  int piece = L::kIsBf16 ? lane % 8 : lane % 4 + lane / 8 % 2 * 4, tile = slice * 2 + piece / 4;
  int token = warp % 4 * 16 + key;  // the first of four, four apart
  bool has_values = tile < L::kFp8Tiles;
  int slot = -1;       // in the block after the one that was found
  Source source = {};  // in the block that was found; null if there is no key
  bool fp4 = false;    // whether that block's rows are
  Scale scale;
  uint4 values[4];

  // Of the heads whose weights this warp computes.
  float sinks[kOwnHeads], largest[kOwnHeads], weight_sums[kOwnHeads];
  float sums[2][kPairs];  // of 64 columns each

  __device__ __forceinline__ PartOfRow(const Call& call, Memory& shared) : call(call), shared(shared) {
    used = __popc(__ballot_sync(~0u, lane < parts && lane * blocks_of_part < blocks));
  }
  __device__ __forceinline__ bool any() const { return own.first < own.last; }
  __device__ __forceinline__ bool has_keys(int part) const { return part < used; }
  __device__ __forceinline__ uint32_t offset(const void* x) const {
    return sm90::shared_address(x) - sm90::shared_address(&shared);
  }
  __device__ __forceinline__ void sync_slice() const { sm90::sync_threads(1 + slice, 128); }
  __device__ __forceinline__ int64_t out_row() const { return static_cast<int64_t>(row) * call.heads + first_head; }

  __device__ __forceinline__ void copy_queries() {
    int head = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8, tiles = slice == 3 ? L::kTiles - 6 : 2;
    const __nv_bfloat16* from = call.q + (out_row() + head) * L::kQkDim + slice * 128 + chunk * 8;
    uint32_t to = sm90::shared_address(shared.queries[slice * 2]) + head * 128 + (chunk ^ head % 8) * 16;
#pragma unroll
    for (int t = 0; t < L::kTiles - 6; t++) {
#pragma unroll
      for (int i = 0; i < kN; i += 16)
        if (t < tiles) sm90::copy_async(to + (t * kN + i) * 128, from + t * 64 + i * L::kQkDim, head + i < heads);
    }
  }

  __device__ __forceinline__ void find_slot(int block) {
    slot = block < own.last ? slot_of(call, lengths, row, block, warp % 4 * 16 + lane % 16) : -1;
  }

  // Returns a mask of the warp's keys that exist.
  __device__ __forceinline__ unsigned find_rows(int block) {
    bool second = block >= lengths.first_blocks();
    fp4 = kFormat == kV41Fp4 && second;
    const Table& table = call.tables[second];
    bool valid = is_slot(table, slot);
    source = valid ? locate<kFormat>(table, call.places[second], slot) : Source{};
    return __ballot_sync(~0u, valid);
  }

  __device__ __forceinline__ const uint8_t* row_of(int i) const {
    return reinterpret_cast<const uint8_t*>(of_lane(reinterpret_cast<uint64_t>(source.row), key + i * 4));
  }

  // Prefetches them into the L2: there are no registers for them.
  __device__ __forceinline__ void prefetch_bf16() {
    if (!source.row) return;
    sm90::prefetch(source.row + slice * 256 + lane / 16 * 128);
    if (L::kHasRope && slice == 3 && lane < 16) sm90::prefetch(source.row + L::kRopeByte);
  }

  __device__ __forceinline__ void load() {
    if constexpr (L::kIsBf16) return prefetch_bf16();
    if (kFormat == kV4 && slice == 3 && lane < 16 && source.row) sm90::prefetch(source.row + L::kRopeByte);
    scale = {};
    if (source.row) scale = load_scale<kFormat>(source.scales, slice * 2 + lane / 16, fp4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t* from = row_of(i);
      values[i] = {};
      if (fp4) {
        uint2 x = {};
        if (from) x = __ldg(reinterpret_cast<const uint2*>(from + (slice * 64 + piece * 8)));
        values[i].x = x.x, values[i].y = x.y;
        continue;
      }
      if (from && has_values) values[i] = __ldg(reinterpret_cast<const uint4*>(from + (slice * 128 + piece * 16)));
    }
  }

  __device__ __forceinline__ void copy_bf16() {
    uint32_t to = sm90::shared_address(shared.keys[slice * 2]) + token * 128 + (piece ^ token % 8) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t* row = row_of(i);
      const uint8_t* from = (row ? row : call.tables[0].data) + slice * 256 + piece * 16;
#pragma unroll
      for (int t = 0; t < 2; t++)
        sm90::copy_async((to ^ i % 2 * 64) + t * kTileBytes + i * 4 * 128, from + t * 128, row);
    }
  }

  // Converts what was loaded. When it returns, the slice of all keys is complete.
  __device__ __forceinline__ void convert_keys() {
    if constexpr (L::kIsBf16) copy_bf16();
    uint32_t keys = sm90::shared_address(shared.keys) + token * 128;
    if (L::kHasRope && slice == 3) {
      uint32_t to = keys + kRopeTile * kTileBytes + (piece ^ token % 8) * 16;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint8_t* from = row_of(i);
        const uint8_t* rope = (from ? from : call.tables[0].data) + L::kRopeByte + piece * 16;
        sm90::copy_async((to ^ i % 2 * 64) + i * 4 * 128, rope, from);
      }
    }
    if constexpr (!L::kIsBf16) convert_values(keys);
    sm90::wait_copies();
    sm90::fence_matrix_reads();
    sync_slice();
  }

  __device__ __forceinline__ void convert_values(uint32_t keys) {
    Scale own_scale = ready<kFormat>(scale, fp4);
    uint32_t to = keys + tile * kTileBytes + (2 * piece % 8 ^ token % 8) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Scale of_tile = of_lane(own_scale, key + i * 4 + piece / 4 * 16);
      uint32_t at = (to ^ i % 2 * 64) + i * 4 * 128;
      if constexpr (kFormat == kV41Fp4) {
        if (fp4) {
          uint32_t of_16 = pair_of_e4m3(of_tile >> piece % 4 * 8);
          convert_fp4(values[i].x, of_16, at), convert_fp4(values[i].y, of_16, at ^ 16);
          continue;
        }
      }
      if constexpr (L::kIsV41) of_tile = for_part(of_tile, piece % 4);
      if (has_values) convert<kFormat>(values[i].x, values[i].y, of_tile, at);
      if (has_values) convert<kFormat>(values[i].z, values[i].w, of_tile, at ^ 16);
    }
  }

  // Starts Sᵀ = K Qᵀ over the slice's columns.
  __device__ __forceinline__ void begin_scores(float (&scores)[kPairs]) {
    auto add = [&](int first_tile, int steps, bool more) {
      uint64_t k = sm90::by_rows(sm90::shared_address(shared.keys[first_tile]));
      uint64_t q = sm90::by_rows(sm90::shared_address(shared.queries[first_tile]));
#pragma unroll
      for (int i = 0; i < steps; i++)
        sm90::multiply<false>(scores, sm90::advance(k, i / 4 * kTileBytes + i % 4 * 32),
                              sm90::advance(q, i / 4 * kN * 128 + i % 4 * 32), more || i > 0);
    };
    sm90::begin_products();
    add(slice * 2, 8, false);
    if (L::kTiles > 8 && slice == 3) add(kRopeTile, 4, true);
    sm90::commit_products();
  }

  __device__ __forceinline__ void store_scores(const float (&scores)[kPairs]) {
    int at = warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kPairs; i++)
      shared.scores[slice][i / 4 * 8 + lane % 4 * 2 + i % 2][at + i / 2 % 2 * 8] = scores[i];
  }

  // Turns scores into weights relative to the head's largest score so far. A lane has two keys.
  __device__ __forceinline__ void weigh() {
    uint2 valid = *reinterpret_cast<const uint2*>(shared.valid);
    unsigned pair = (lane < 16 ? valid.x : valid.y) >> lane % 16 * 2;
    float x[kOwnHeads][2];
#pragma unroll
    for (int h = 0; h < kOwnHeads; h++) {
      float2 addends[4];
#pragma unroll
      for (int s = 0; s < 4; s++)
        addends[s] = *reinterpret_cast<const float2*>(&shared.scores[s][warp + h * 16][lane * 2]);
      x[h][0] = addends[0].x + addends[1].x + (addends[2].x + addends[3].x);
      x[h][1] = addends[0].y + addends[1].y + (addends[2].y + addends[3].y);
#pragma unroll
      for (int i = 0; i < 2; i++) x[h][i] = pair >> i & 1 ? x[h][i] * call.scale_log2 : -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < kOwnHeads; h++) {
      int head = warp + h * 16;
      float before = largest[h];
      largest[h] = fmaxf(before, largest_of_warp(fmaxf(x[h][0], x[h][1])));
      float base = largest[h] == -INFINITY ? 0 : largest[h], factor = exp2_approx(before - base);
#pragma unroll
      for (int i = 0; i < 2; i++) x[h][i] = exp2_approx(x[h][i] - base);
      weight_sums[h] = weight_sums[h] * factor + (x[h][0] + x[h][1]);
      *reinterpret_cast<uint32_t*>(shared.weights + head * 128 + (lane / 4 ^ head % 8) * 16 + lane % 4 * 4) =
          bits(__floats2bfloat162_rn(x[h][0], x[h][1]));
      if (lane == 0) shared.rescale[head] = factor;
    }
    sm90::fence_matrix_reads();
  }

  // Starts Oᵀ += Vᵀ Pᵀ for the rows of the slice; Oᵀ = Vᵀ Pᵀ for the first block.
  __device__ __forceinline__ void begin_sums(bool add) {
    if (add) {
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        float factor = shared.rescale[i / 4 * 8 + lane % 4 * 2 + i % 2];
        sums[0][i] *= factor, sums[1][i] *= factor;
      }
    }
    uint64_t p = sm90::by_rows(sm90::shared_address(shared.weights));
    sm90::begin_products();
#pragma unroll
    for (int i = 0; i < kBlock / 16; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint64_t v = sm90::by_columns(sm90::shared_address(shared.keys[slice * 2 + j]));
        sm90::multiply<true>(sums[j], sm90::advance(v, i * 16 * 128), sm90::advance(p, i * 32), add || i > 0);
      }
    }
    sm90::commit_products();
  }

  // Units are dealt to the parts in turn, those of all warps one after the other.
  __device__ __forceinline__ int units_here() const { return call.deal.parts.quotient(Memory::kUnits - 1 - rank) + 1; }

  // Sends all parts the maximum and the sum to which this part's values are relative.
  __device__ __forceinline__ void send_statistics() {
    sm90::wait_cluster();  // all barriers are initialised
    if (threadIdx.x == 0) {
      sm90::expect(&shared.statistics_full, used * kN * 8);
      sm90::expect(&shared.units_full, used * units_here() * kUnitBytes);
    }
    if (!any()) return;
#pragma unroll
    for (int h = 0; h < kOwnHeads; h++) {
      float2 own = {largest[h], over_warp(weight_sums[h], total)};
      uint32_t to = of_part + offset(&shared.statistics[rank][warp + h * 16]);
      if (lane < parts) sm90::send(to, own, of_part + offset(&shared.statistics_full));
    }
  }

  // Sends the units to the parts that add them up.
  __device__ __forceinline__ void send_values() {
#pragma unroll
    for (int u = 0; u < kN / 8; u++) {
      int number = u * (kThreads / 32) + warp, there = call.deal.parts.quotient(number);
      uint32_t to_part = of_lane(of_part, number - there * parts);
      const Unit* to = shared.unit(there, parts, rank);
      const float* x = &sums[u / kOwnHeads][u % kOwnHeads * 8];
      float top = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x[i]));
      HalfScale scale(__reduce_max_sync(~0u, __float_as_int(top)));
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] = sm90::rounded_to_halves({x[i * 2] * scale.up, x[i * 2 + 1] * scale.up});
      uint32_t barrier = to_part + offset(&shared.units_full);
      sm90::send(to_part + offset(&to->values[lane]), uint4{words[0], words[1], words[2], words[3]}, barrier);
      if (lane == 0) sm90::send(to_part + offset(&to->scale), float2{scale.down, 0}, barrier);
    }
  }

  __device__ __forceinline__ void weigh_parts() {
    sm90::wait_for_sent(&shared.statistics_full, 0);
#pragma unroll
    for (int h = 0; h < kOwnHeads; h++) {
      int head = warp + h * 16;
      float2 part = has_keys(lane) ? shared.statistics[lane][head] : float2{-INFINITY, 0};
      float most = over_warp(part.x, larger), base = most == -INFINITY ? 0 : most;
      float weight = exp2_approx(part.x - base), sum = over_warp(part.y * weight, total);
      float factor = sum == 0 ? 0.0f : __fdividef(1, sum + exp2_approx(sinks[h] - base));
      if (lane < kMostParts) shared.factors[lane][head] = weight * factor;
      if (rank == 0 && lane == 0 && head < heads)
        call.lse[out_row() + head] = sum == 0 ? call.empty_lse : kLn2 * (most + __log2f(sum));
    }
    __syncthreads();
  }

  // Adds the parts in the order of the keys, not of arrival. A lane has two heads and, 8 further, two more, in two
  // columns that are 8 apart.
  __device__ __forceinline__ void add_units() {
    sm90::wait_for_sent(&shared.units_full, 0);
    bool odd = lane / 4 % 2;
    int here = units_here();
#pragma unroll 1
    for (int i = warp; i < here; i += kThreads / 32) {
      int number = rank + i * parts, u = number / 16, of_warp = number % 16;
      int head = u % kOwnHeads * 16 + lane % 4 * 2;
      int column = of_warp / 4 * 128 + u / kOwnHeads * 64 + of_warp % 4 * 16 + lane / 8 * 2;
      const Unit* units = shared.unit(i, parts, 0);
      float2 sum[4] = {};
#pragma unroll
      for (int begin = 0; begin < kMostParts; begin += 4) {
        if (!has_keys(begin)) break;
        uint4 x[4];
        float scale[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          bool has = has_keys(begin + j);
          x[j] = has ? units[begin + j].values[lane] : uint4{0, 0, 0, 0};
          scale[j] = has ? units[begin + j].scale.x : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
          uint32_t words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
          for (int k = 0; k < 4; k++) {
            float2 factor = *reinterpret_cast<const float2*>(&shared.factors[begin + j][head + k / 2 * 8]);
            float2 two = sm90::two_floats(words[k]);
            sum[k].x += factor.x * scale[j] * two.x, sum[k].y += factor.y * scale[j] * two.y;
          }
        }
      }
      // Neighbours in columns exchange one of their two heads. Then each has two columns of one head.
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float other = __shfl_xor_sync(~0u, odd ? sum[k].x : sum[k].y, 4);
        auto out = odd ? __floats2bfloat162_rn(other, sum[k].y) : __floats2bfloat162_rn(sum[k].x, other);
        int to_head = head + k / 2 * 8 + odd, to_column = column + k % 2 * 8;
        if (to_head < heads)
          *reinterpret_cast<__nv_bfloat162*>(call.out + (out_row() + to_head) * kValues + to_column) = out;
      }
    }
  }

  __device__ __forceinline__ void attend() {
    find_slot(own.first);
    if (threadIdx.x == 0) {
      sm90::init(&shared.statistics_full, 1), sm90::init(&shared.units_full, 1);
      sm90::fence_barriers();
    }
    sm90::arrive_in_cluster();
    if (any()) copy_queries();
#pragma unroll
    for (int h = 0; h < kOwnHeads; h++) {
      int head = warp + h * 16;
      sinks[h] = call.sink && head < heads ? call.sink[first_head + head] * kLog2E : -INFINITY;
      largest[h] = -INFINITY, weight_sums[h] = 0;
    }
    unsigned valid = find_rows(own.first);
    find_slot(own.first + 1);
    load();
#pragma unroll 1
    for (int block = own.first; block < own.last; block++) {
      if (slice == 0 && lane == 0) shared.valid[warp] = static_cast<uint16_t>(valid);
      convert_keys();
      float scores[kPairs];
      begin_scores(scores);
      bool more = block + 1 < own.last;
      if (more) {
        valid = find_rows(block + 1);
        load();
        find_slot(block + 2);
      }
      sm90::wait_products<0>();
      store_scores(scores);
      __syncthreads();
      weigh();
      __syncthreads();
      begin_sums(block > own.first);
      if (!more) send_statistics();
      sm90::wait_products<0>();
      if (more) sync_slice();
    }
    if (!any()) send_statistics();
    if (any()) send_values();
    weigh_parts();
    add_units();
  }
};

}  // namespace sparse_decode
