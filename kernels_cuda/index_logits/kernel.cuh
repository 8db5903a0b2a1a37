// The indexer's logits on SM90: logit[row, key] = key's scale * sum over heads of relu(query · key) * weight[row, head].
//
// A thread block computes one item after the other: 256 keys against one row, or eight that read the same keys. A
// planner warp looks items up; a copier warp copies tiles of 64 keys, and the queries of a row (64 heads), into rings in
// shared memory. Two consumer warpgroups each hold two tiles of keys in registers, as the first operand of their
// products; the queries are the second, so that the sum over heads stays within four lanes. While a warpgroup sums the
// products of one tile, those of the other are under way.
//
// Rows stream past keys that stay in registers; an item says which of the two is new. The sums of a logit are always made
// in the same order, so a row's logits do not depend on the other rows of the call.

#pragma once

#include "../sm90.cuh"
#include "../tensor_map.cuh"
#include "rows.cuh"

namespace index_logits {

using namespace sm90;
using tensor_map::Tiles;

constexpr int kHeads = 64, kDim = 128, kTokenBytes = kDim + 4;
constexpr int kTile = 64;             // keys, or heads, of a copied tile
constexpr int kTiles = 4;             // tiles of keys of a block
constexpr int kMine = 2;              // those of a consumer warpgroup
constexpr int kBlock = kTiles * kTile;
constexpr int kConsumers = kTiles / kMine * 128, kThreads = kConsumers + 128;  // the last warpgroup: planner, copier, filler
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // of 168 that each thread begins with
constexpr int kMostGroups = 1024;
constexpr int kKeySlots = 2, kQuerySlots = 2, kItems = 16;
constexpr int kRows = 8;  // of an item that is not one row
constexpr int kScaleBytes = kTile * 4, kWeightBytes = kHeads * 4;

struct Call {
  CUtensorMap queries, keys;  // tiles of 64 lines of 128 bytes; head 16 t + 2 i + j is line 8 i + 2 t + j
  const float* weights;       // [rows, 64]
  const uint8_t* cache;       // the first of num_pages pages
  const int* page_table;      // [rows, width]
  const int* lengths;         // [rows]
  float* out;                 // [rows, capacity]
  int64_t page_bytes;
  int rows, width, page_size, capacity, num_pages;
  int group;      // units of kRows rows that stream past the same keys
  bool fill;      // whether to write -inf where no length reaches
};

// What consumers do next: columns from `column` on of `count` rows from `row` on.
struct alignas(16) Item {
  int2 sources[kTiles];  // the page and the first line of each tile's keys; a negative page: no keys
  int row, count, column, tiles;  // count is 0 at the end; bit i of `tiles`: tile i has keys
  int limits[kRows];              // the rows' lengths
  int keys, queries;  // the slot of new keys, or -1 where they are those of the item before; the slot of the queries
};

struct Shared {
  uint8_t keys[kKeySlots][kTiles][kTileBytes];
  uint8_t queries[kQuerySlots][kRows][kTileBytes];
  float scales[kKeySlots][kTiles][kTile];
  float weights[kQuerySlots][kRows][kHeads];
  Item items[kItems];
  Barrier planned[kItems], full[kItems], free[kItems], free_keys[kKeySlots];
  int blocks[kMostGroups];  // blocks of columns that the rows of a group reach into
};

constexpr int kSharedBytes = sizeof(Shared) + 1024;  // tiles begin at multiples of 1024 bytes

// A lane's columns of a product, 8 i + 2 t and the next, are 16 consecutive heads.
inline Tiles<4> tiles_of_queries(const void* q, int rows) {
  return {q, {2, 4, 8, rows}, {kDim, 16 * kDim, 2 * kDim, kHeads * kDim}, {2, 4, 8, 1}};
}

inline Tiles<2> tiles_of_keys(const Call& call) {
  return {call.cache, {call.page_size, call.num_pages}, {kDim, call.page_bytes}, {kTile, 1}};
}

inline __host__ __device__ int units_of(int rows) { return (rows + kRows - 1) / kRows; }

// A call's `group`, so that there are few enough of them.
inline int group_of(int rows) {
  int group = 16;
  while ((units_of(rows) + group - 1) / group > kMostGroups) group *= 2;
  return group;
}

// --- the work ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ int units_of(const Call& call, int group) {
  return min(call.group, units_of(call.rows) - group * call.group);
}

__device__ __forceinline__ int num_groups(const Call& call) {
  int rows = call.group * kRows;
  return (call.rows + rows - 1) / rows;
}

// The blocks of columns that each group's rows reach into; the warps of the thread block share the groups.
__device__ void count_blocks(const Call& call, Shared& shared) {
  int lane = threadIdx.x % 32, rows = call.group * kRows;
  for (int group = threadIdx.x / 32; group < num_groups(call); group += kThreads / 32) {
    int longest = 0;
#pragma unroll 4
    for (int i = lane; i < rows; i += 32) longest = max(longest, length_of(call, group * rows + i));
    longest = __reduce_max_sync(~0u, longest);
    if (lane == 0) shared.blocks[group] = (longest + kBlock - 1) / kBlock;
  }
}

// The planner warp. Items are counted group by group, in a group block by block, in a block unit by unit; each thread
// block has an equal share of them.
struct Planner {
  const Call& call;
  Shared& shared;
  int lane = threadIdx.x % 32;
  int planned = 0;  // items

  // `count` units of a group from the `first` on: a lane for each of a unit's rows and tiles. Its rows become an item
  // each unless all read the same keys.
  __device__ void plan(int group, int first, int count) {
    int units = units_of(call, group), row_of_unit = lane / 4, tile = lane % 4;
    for (int unit = first; unit < first + count; unit++) {
      int block = unit / units, column = block * kBlock;
      int row = (group * call.group + unit - block * units) * kRows + row_of_unit, length = length_of(call, row);
      int tile_column = column + tile * kTile, at_page = tile_column / call.page_size, page = -1;
      bool reads = tile_column < length;
      if (reads) page = call.page_table[int64_t{row} * call.width + at_page];
      if (page < 0 || page >= call.num_pages) page = -1;
      int most = page;
      for (int step = 4; step < 32; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
      bool together = __all_sync(~0u, length > column && (!reads || page == most));
      if (together) page = most;
      bool emits = length > column && (!together || row_of_unit == 0);
      unsigned tiles = __ballot_sync(~0u, page >= 0) >> lane / 4 * 4 & 0xF;
      unsigned leaders = __ballot_sync(~0u, emits && tile == 0);
      int item = together ? planned : planned + __popc(leaders & ((1u << lane / 4 * 4) - 1));
      Item& to = shared.items[item % kItems];
      if (emits || together) {
        wait(&shared.free[item % kItems], item / kItems & 1 ^ 1);
        if (emits) to.sources[tile] = {page, tile_column - at_page * call.page_size};
        if (tile == 0) to.limits[together ? row_of_unit : 0] = length;
        if (emits && tile == 0)
          to.row = row, to.count = together ? kRows : 1, to.column = column, to.tiles = static_cast<int>(tiles);
      }
      __syncwarp();
      if constexpr (kArrivalsOfWarp == 1) {
        if (emits && tile == 0) arrive(&shared.planned[item % kItems]);
      } else if (emits || together) {  // the lanes that write: all 32, or four for each item
        for (int i = 0; i < (together ? 1 : 8); i++) arrive(&shared.planned[item % kItems]);
      }
      planned += __popc(leaders);
    }
  }

  __device__ void run() {
    int groups = num_groups(call);
    int64_t total = 0;
    for (int group = lane; group < groups; group += 32) total += shared.blocks[group] * units_of(call, group);
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    int64_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x, before = 0;
    for (int group = 0; group < groups && before < end; group++) {
      int64_t items = shared.blocks[group] * units_of(call, group), through = before + items;
      if (through > begin)
        plan(group, static_cast<int>(max(begin - before, int64_t{0})),
             static_cast<int>(min(end, through) - max(begin, before)));
      before = through;
    }
    if (lane == 0) {
      int at = planned % kItems;
      wait(&shared.free[at], planned / kItems & 1 ^ 1);
      shared.items[at].count = 0;
      for (int i = 0; i < kArrivalsOfWarp; i++) arrive(&shared.planned[at]);
    }
  }
};

// One thread copies what each item needs and the items before have not brought.
__device__ void copy(const Call& call, Shared& shared) {
  int2 held[kTiles] = {{-1, 0}, {-1, 0}, {-1, 0}, {-1, 0}};
  int held_row = -1, held_count = 0, key_uses = 0, query_uses = 0;
  int last[kQuerySlots] = {};  // the last items that read the queries of each slot, the newest first
  for (int item = 0;; item++) {
    int at = item % kItems;
    wait(&shared.planned[at], item / kItems & 1);
    Item& what = shared.items[at];
    Barrier* full = &shared.full[at];
    int row = what.row, count = what.count;
    if (count == 0) {
      arrive(full);
      return;
    }
    int bytes = 0;
    int2 sources[kTiles];
    bool new_keys = false, any = false;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      sources[i] = what.sources[i];
      bool has_keys = sources[i].x >= 0;
      any |= has_keys;
      new_keys |= has_keys && (sources[i].x != held[i].x || sources[i].y != held[i].y);
    }
    // An item without keys reads the queries that are there, whose products it discards; so the first item brings some.
    bool new_queries = (any || query_uses == 0) && (row != held_row || count > held_count);
    int keys = -1;
    if (new_keys) {
      keys = key_uses % kKeySlots;
      wait(&shared.free_keys[keys], key_uses / kKeySlots & 1 ^ 1);
      key_uses++;
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        held[i] = sources[i];
        bytes += sources[i].x >= 0 ? kTileBytes + kScaleBytes : 0;
      }
    }
    if (new_queries) {
      // Items that are a ring behind are done, or this one would not have been planned; racecheck does not follow that.
      if (kArrivalsOfWarp > 1) wait(&shared.free[at], item / kItems & 1 ^ 1);
      int before = last[kQuerySlots - 1];
      if (query_uses >= kQuerySlots && item - before < kItems) wait(&shared.free[before % kItems], before / kItems & 1);
#pragma unroll
      for (int i = kQuerySlots - 1; i > 0; i--) last[i] = last[i - 1];
      query_uses++;
      held_row = row, held_count = count;
      bytes += count * (kTileBytes + kWeightBytes);
    }
    last[0] = item;
    int queries = max(query_uses - 1, 0) % kQuerySlots;
    what.keys = keys, what.queries = queries;
    expect(full, bytes);
    if (new_queries) {
      for (int i = 0; i < count; i++) copy_box(shared.queries[queries][i], call.queries, row + i, full);
      copy_bytes(shared.weights[queries], call.weights + int64_t{row} * kHeads, count * kWeightBytes, full);
    }
    if (new_keys) {
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        auto [page, line] = sources[i];
        if (page < 0) continue;
        copy_box(shared.keys[keys][i], call.keys, line, page, full);
        const uint8_t* scales = call.cache + page * call.page_bytes + call.page_size * kDim + line * 4;
        copy_bytes(shared.scales[keys][i], scales, kScaleBytes, full);
      }
    }
  }
}

template <int kScores>
__device__ __forceinline__ void start_products(float (&scores)[kScores], const uint32_t (&keys)[4][4],
                                               const void* queries) {
  uint32_t address = shared_address(queries);
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; step++) multiply(scores, keys[step], by_rows(address + step * 32), step > 0);
  commit_products();
}

// The sum of a row over half of the heads: lanes l and l ^ 2 together have all. Even lanes have that of key l / 4 of the
// warp, odd lanes that of the key 8 further.
__device__ __forceinline__ float sum_heads(const float* scores, const float4 (&weights)[4]) {
  float low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 weight = weights[i];
    const float* score = scores + i * 8;
    low = fmaf(rectified(score[0]), weight.x, low);
    high = fmaf(rectified(score[2]), weight.x, high);
    low = fmaf(rectified(score[1]), weight.y, low);
    high = fmaf(rectified(score[3]), weight.y, high);
    low = fmaf(rectified(score[4]), weight.z, low);
    high = fmaf(rectified(score[6]), weight.z, high);
    low = fmaf(rectified(score[5]), weight.w, low);
    high = fmaf(rectified(score[7]), weight.w, high);
  }
  bool odd = threadIdx.x & 1;
  float other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  return (odd ? high : low) + other;
}

// What a lane knows of the keys of its warpgroup: its rows of the tiles as operands, and of the key whose logits it
// writes the scale and the column in the block. Of four lanes, the first and third write the warp's key l / 4, the
// others the key 8 further; of two rows, the last two write the second.
struct Keys {
  uint32_t values[kMine][4][4];
  float scales[kMine];
};

// The logits of kCount rows, 1 or kRows. `column` is that of the lane's key in the first tile, `out` where its logit
// goes, or that of the second row.
template <int kCount>
__device__ __forceinline__ void compute(const Call& call, const Shared& shared, const Item& item, const Keys& keys,
                                        int first_tile, int column, float* out) {
  constexpr int kPair = kCount > 1 ? 2 : 1;  // rows of a product
  int slot = uniform(item.queries), part = threadIdx.x % 4, tiles = item.tiles >> first_tile;
  bool second = kPair == 2 && part >= 2;
  float scores[kMine][kPair * 32];
  start_products(scores[0], keys.values[0], shared.queries[slot][0]);
#pragma unroll
  for (int row = 0; row < kCount; row += kPair) {
    float4 weights[kPair][4];
#pragma unroll
    for (int i = 0; i < kPair; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        weights[i][j] = reinterpret_cast<const float4*>(shared.weights[slot][row + i])[part * 4 + j];
    int limit = item.limits[row + second];
#pragma unroll
    for (int tile = 0; tile < kMine; tile++) {
      if (tile + 1 < kMine) {
        start_products(scores[tile + 1], keys.values[tile + 1], shared.queries[slot][row]);
        wait_products<1>();
      } else if (row + kPair < kCount) {
        start_products(scores[0], keys.values[0], shared.queries[slot][row + kPair]);
        wait_products<1>();
      } else {
        wait_products<0>();
      }
      float first = sum_heads(scores[tile], weights[0]);
      float last = kPair == 2 ? sum_heads(scores[tile] + 32 * (kPair - 1), weights[kPair - 1]) : first;
      float logit = (second ? last : first) + __shfl_xor_sync(~0u, second ? first : last, 2);
      int at = column + tile * kTile;
      bool is_key = at < limit && (tiles >> tile & 1);
      if ((kPair == 2 || part < 2) && at < call.capacity)
        out[tile * kTile] = is_key ? logit * keys.scales[tile] : -INFINITY;
    }
    out += kPair * int64_t{call.capacity};
  }
}

__device__ void consume(const Call& call, Shared& shared) {
  int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, first_tile = warp / 4 * kMine;
  int key = warp % 4 * 16 + lane / 4 + (lane & 1) * 8;  // of a tile
  float* out = call.out + first_tile * kTile + key + (lane % 4 / 2) * int64_t{call.capacity};
  Keys keys = {};
  for (int step = 0;; step++) {
    int at = step % kItems;
    wait(&shared.full[at], step / kItems & 1);
    const Item& item = shared.items[at];
    int count = uniform(item.count);
    if (count == 0) return;
    if (int slot = uniform(item.keys); slot >= 0) {
      // Row `line` of a tile has its chunk c at c ^ (line % 8); two chunks are a step of the product.
      int line = warp % 4 * 16 + lane % 16;
#pragma unroll
      for (int tile = 0; tile < kMine; tile++) {
        uint32_t from = shared_address(shared.keys[slot][first_tile + tile]) + line * kDim;
#pragma unroll
        for (int i = 0; i < 4; i++)
          load_matrices(keys.values[tile][i], from + ((i * 2 + lane / 16) ^ line % 8) * 16);
        keys.scales[tile] = shared.scales[slot][first_tile + tile][key];
      }
      __syncwarp();
      arrive_warp(&shared.free_keys[slot], lane);
    }
    int column = item.column + first_tile * kTile + key;
    float* to = out + int64_t{item.row} * call.capacity + item.column;
    if (count == kRows)
      compute<kRows>(call, shared, item, keys, first_tile, column, to);
    else
      compute<1>(call, shared, item, keys, first_tile, column, to);
    __syncwarp();
    arrive_warp(&shared.free[at], lane);
  }
}

__global__ void __launch_bounds__(kThreads, 1) index_logits_kernel(const __grid_constant__ Call call) {
  Shared& shared = *reinterpret_cast<Shared*>(tiles_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kItems; i++) {
      init(&shared.planned[i], kArrivalsOfWarp);
      init(&shared.full[i], 1);
      init(&shared.free[i], kConsumers / 32 * kArrivalsOfWarp);
    }
    for (int i = 0; i < kKeySlots; i++) init(&shared.free_keys[i], kConsumers / 32 * kArrivalsOfWarp);
    fence_barriers();
  }
  count_blocks(call, shared);
  __syncthreads();
  int warp = threadIdx.x / 32;
  if (warp < kConsumers / 32) {
    grow_registers<kConsumerRegisters>();
    consume(call, shared);
    return;
  }
  shrink_registers<kProducerRegisters>();
  int role = warp - kConsumers / 32;
  if (role == 0) Planner{call, shared}.run();
  if (role == 1 && threadIdx.x % 32 == 0) copy(call, shared);
  if (role == 2 && call.fill) fill<kBlock>(call);
}

}  // namespace index_logits
