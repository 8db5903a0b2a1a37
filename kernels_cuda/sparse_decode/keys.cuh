// The two producer warpgroups. Each loads one half of V's columns of the keys into registers, converts the FP8 values
// to bfloat16, and writes them to shared memory.

#pragma once

#include "convert.cuh"
#include "shared.cuh"

namespace sparse_decode {

// Hides a number from the compiler, so that it does not compute what depends on it early and keep that in registers.
__device__ __forceinline__ unsigned fresh(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Walks through the blocks of a piece, one after the other.
struct Blocks {
  Rows rows;
  int block;

  __device__ __forceinline__ Blocks(const Call& call, const Piece& piece)
      : rows(call, piece), block(rows.at.block) {}
  __device__ __forceinline__ void advance(const Call& call) {
    if (++block < rows.last()) return;
    rows.advance(call);
    block = 0;
  }
};

// --- where keys are ---------------------------------------------------------------------------------------------
// Two producer warps find the rows of each block's keys for all the others. One copies slots to shared memory, kAhead
// blocks ahead; the other turns them into addresses, one block later. Behind the piece's last block they find blocks
// without keys.

// The place of a key's index in its table.
struct Column {
  bool second;  // whether it is the second table
  int column;
  const int* index;
  int length;

  __device__ __forceinline__ Column(const Call& call, Lengths lengths, int row, int block, int key)
      : second(block >= lengths.first_blocks()),
        column((second ? block - lengths.first_blocks() : block) * kBlock + key),
        index(call.tables[second].indices + row * call.tables[second].stride + column),
        length(second ? lengths.second : lengths.first) {}
};

// Starts the copy of the slots of a lane's two keys of a block from the index table; writes -1 where there is none.
// Returns whether they are of the second table.
__device__ __forceinline__ bool copy_slots_of(const Call& call, const Blocks& blocks, int lane, int* to) {
  Column from(call, blocks.rows.lengths, blocks.rows.at.row, blocks.block, lane);
  int length = blocks.rows.any() ? from.length : 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int* at = to + lane + i * 32;
    if (from.column + i * 32 < length) sm90::copy_async_small<4>(sm90::shared_address(at), from.index + i * 32);
    if (from.column + i * 32 >= length) *at = -1;
  }
  return from.second;
}

__device__ const uint4 zero_row[41] = {};

__device__ __forceinline__ bool is_slot(const Table& table, int slot) {
  return static_cast<unsigned>(slot) < static_cast<unsigned>(table.num_slots);
}

// Where a key's bytes are. A slot outside the cache gets a row of zeros, so that loads need no condition.
struct Source {
  const uint8_t *row, *scales;
};

template <Format kFormat>
__device__ __forceinline__ Source locate(const Table& table, const Places& places, int slot) {
  constexpr int kRowBytes = Layout<kFormat>::kRowBytes;
  const uint8_t* zeros = reinterpret_cast<const uint8_t*>(zero_row);
  if (!is_slot(table, slot)) return {zeros, zeros};
  int page_size = table.page_size.divisor, page = table.page_size.quotient(slot);
  int offset = slot - page * page_size;
  const uint8_t* begin = table.data + page * table.page_bytes;
  if constexpr (Layout<kFormat>::kIsV41) {
    return {begin + static_cast<int64_t>(offset) * places.row_stride,
            begin + places.scales + static_cast<int64_t>(offset) * places.scale_stride};
  }
  const uint8_t* row = begin + static_cast<int64_t>(offset) * kRowBytes;
  return {row, kFormat == kV4 ? begin + static_cast<int64_t>(page_size) * kRowBytes + offset * 8 : row + 512};
}

template <Format kFormat>
__device__ __forceinline__ void copy_slots(const Call& call, Shared<kFormat>& shared, Blocks& ahead, int block) {
  int lane = fresh(threadIdx.x % 32), place = block % kAhead;
  bool second = copy_slots_of(call, ahead, lane, shared.slots[place]);
  if (lane == 0) {
    shared.seconds[place] = second;
    shared.row_begun[block % kKnown] = block == 0 || ahead.block == 0 ? ahead.rows.at.row : -1;
  }
  ahead.advance(call);
  __syncwarp();
  sm90::arrive_warp(&shared.barriers.slots_full[place], lane);
  sm90::arrive_after_copies(&shared.barriers.slots_full[place]);
}

template <Format kFormat>
__device__ __forceinline__ void find_rows(const Call& call, Shared<kFormat>& shared, int block) {
  int lane = fresh(threadIdx.x % 32), place = block % kAhead;
  sm90::wait(&shared.barriers.slots_full[place], block / kAhead & 1);
  int second = shared.seconds[place];
  const Table& table = call.tables[second];
  const Places& places = call.places[second];
  sm90::wait(&shared.barriers.rows_empty[place], (block / kAhead & 1) ^ 1);
  unsigned valid[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int key = lane + i * 32, slot = shared.slots[place][key];
    valid[i] = __ballot_sync(~0u, is_slot(table, slot));
    Source source = locate<kFormat>(table, places, slot);
    shared.rows[place][key] = source.row;
    if constexpr (!Layout<kFormat>::kIsBf16) {
      uint32_t to = sm90::shared_address(&shared.scales[place][key]);
      sm90::copy_async_small<Scales<kFormat>::kBytes>(to, source.scales);
      if (kFormat == kV41Fp4 && second) sm90::copy_async_small<16>(to + 16, source.scales + 16);
    }
  }
  if (kFormat == kV41Fp4 && lane == 0) shared.are_fp4[place] = second;
  if (lane == 0) *reinterpret_cast<uint2*>(shared.valid[block % kKnown]) = {valid[0], valid[1]};
  __syncwarp();
  sm90::arrive_warp(&shared.barriers.rows_full[place], lane);
  if (!Layout<kFormat>::kIsBf16) sm90::arrive_after_copies(&shared.barriers.scales_full[place]);
}

// --- conversion -------------------------------------------------------------------------------------------------

// A thread's values of its two keys of a block in one half of V: 16 values of each tile.
template <Format kFormat>
struct Values {
  using L = Layout<kFormat>;
  uint4 values[L::kHalfTiles][2];

  // V4's second half has one tile fewer.
  __device__ __forceinline__ static bool has(int tile, int half) {
    return L::kFp8Tiles == 2 * L::kHalfTiles || tile < L::kHalfTiles - 1 || half == 0;
  }

  // Of an FP4 row, 32 values take the place of 16.
  __device__ __forceinline__ void load(const uint8_t* row, int i, int half, int part, bool fp4) {
    const uint8_t* from = row + (half * (fp4 ? 128 : L::kHalfTiles * 64) + part * 16);
#pragma unroll
    for (int tile = 0; tile < L::kHalfTiles; tile++)
      if (has(tile, half) && !(fp4 && tile >= 2)) values[tile][i] = __ldg(reinterpret_cast<const uint4*>(from + tile * 64));
  }

  // `to` is in the first of the half's tiles.
  __device__ __forceinline__ void convert_to(uint32_t keys, const HalfScales<kFormat> (&scales)[2], int half) const {
    uint32_t other_keys = keys ^ 16;
#pragma unroll
    for (int tile = 0; tile < L::kHalfTiles; tile++) {
      if (!has(tile, half)) break;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int offset = tile * kTileBytes + i * 32 * 128;
        const uint4& x = values[tile][i];
        auto scale = scales[i].of_tile(tile);
        convert<kFormat>(x.x, x.y, scale, keys + offset);
        convert<kFormat>(x.z, x.w, scale, other_keys + offset);
      }
    }
  }
};

// Converts the values that a thread has of FP4 rows. They are half of a tile, twice; `keys` is in the first of the
// half's tiles, at the row's begin. Threads of two tiles take their halves in another order, so that no two of them
// store to the same banks.
__device__ __forceinline__ void convert_fp4_to(uint32_t keys, const uint4 (&values)[4][2],
                                               const HalfScalesFp4 (&scales)[2], int part, int token) {
  bool swaps = part >= 2;
  keys += part / 2 * kTileBytes + (part % 2 * 4 ^ swaps * 2 ^ token % 8) * 16;
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4& x = values[j][i];
      uint32_t to = keys + j * 2 * kTileBytes + i * 32 * 128;
      convert_fp4(swaps ? x.z : x.x, scales[i].pairs[j * 2], to);
      convert_fp4(swaps ? x.w : x.y, scales[i].pairs[j * 2], to ^ 16);
      convert_fp4(swaps ? x.x : x.z, scales[i].pairs[j * 2 + 1], to ^ 32);
      convert_fp4(swaps ? x.y : x.w, scales[i].pairs[j * 2 + 1], to ^ 48);
    }
  }
}

// --- the producer -----------------------------------------------------------------------------------------------

// Starts the copy of a half's columns of a row's queries, from head `head` on. Heads that the tile lacks become zeros.
template <Format kFormat>
__device__ __forceinline__ void copy_queries(const Call& call, Shared<kFormat>& shared, int row, int head, int half) {
  using L = Layout<kFormat>;
  int first = half * L::kHalfTiles, tiles = half ? L::kTiles - L::kHalfTiles : L::kHalfTiles;
  unsigned thread = fresh(threadIdx.x % 128), at = thread / 8, chunk = thread % 8;
  int heads = call.heads - head - static_cast<int>(at);
  const __nv_bfloat16* from =
      call.q + (static_cast<int64_t>(row) * call.heads + head + at) * L::kQkDim + first * 64 + chunk * 8;
  uint32_t to = sm90::shared_address(shared.queries[first]) + at * 128 + (chunk ^ at % 8) * 16;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++, to += kTileBytes, from += 64) {
#pragma unroll
    for (int i = 0; i < kHeads; i += 16) sm90::copy_async(to + i * 128, from + i * L::kQkDim, i < heads);
  }
}

constexpr int kSlotWarp = 4, kRowWarp = 5;  // in the producer of the second half
constexpr int kPrefetched = 128;            // bytes that one instruction prefetches

// Produces half of V's columns of the keys. Four neighbouring threads share two keys of a block, 32 apart. Rows are
// prefetched into the L2 two blocks ahead and loaded one block ahead, into the registers that were just converted.
template <Format kFormat>
__device__ __forceinline__ void bring_keys(const Call& call, const Piece& piece, Shared<kFormat>& shared, int tile,
                                           int half) {
  using L = Layout<kFormat>;
  int lane = threadIdx.x % 32, part = lane % 4, token = threadIdx.x / 4 % 32;
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  Blocks ahead(call, piece);
  if (warp == kSlotWarp) {
#pragma unroll 1
    for (int i = 0; i < kAhead; i++) copy_slots(call, shared, ahead, i);
  }
  if (warp == kRowWarp) find_rows(call, shared, 0);
  Values<kFormat> values;
  auto are_fp4 = [&](int place) { return kFormat == kV41Fp4 && shared.are_fp4[place]; };
  auto load = [&](int block) {
    int place = block % kAhead;
    sm90::wait(&shared.barriers.rows_full[place], block / kAhead & 1);
    bool fp4 = are_fp4(place);
#pragma unroll
    for (int i = 0; i < 2; i++) values.load(shared.rows[place][token + i * 32], i, half, part, fp4);
  };
  auto prefetch = [&](int block) {
    int place = block % kAhead, begin = half * L::kHalfTiles * 64, end = half ? L::kRowBytes : L::kHalfTiles * 64;
    sm90::wait(&shared.barriers.rows_full[place], block / kAhead & 1);
    if (are_fp4(place)) begin /= 2, end /= 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint8_t* row = shared.rows[place][token + i * 32];
#pragma unroll
      for (int byte = 0; byte < L::kRowBytes - L::kHalfTiles * 64; byte += kPrefetched * 4)
        if (begin + byte + part * kPrefetched < end) sm90::prefetch(row + begin + byte + part * kPrefetched);
      // V4.1's rows begin at any 16 bytes, so the last ones may be in 128 bytes more.
      if (L::kIsV41 && half == 1 && part == 3) sm90::prefetch(row + end - 1);
    }
  };
  load(0);
  int number = 0;  // how many rows were begun
#pragma unroll 1
  for (int n = 0; n < piece.blocks; n++) {
    Turn turn{n};
    int place = n % kAhead;
    if (int row = shared.row_begun[n % kKnown]; row >= 0) {
      sm90::wait(&shared.barriers.queries_empty, (number++ & 1) ^ 1);
      copy_queries(call, shared, row, tile * kHeads, half);
    }
    if (warp == kSlotWarp) copy_slots(call, shared, ahead, n + kAhead);
    if (warp == kRowWarp) {
#pragma unroll 1
      for (int block = n ? n + kAhead - 1 : 1; block < n + kAhead; block++) find_rows(call, shared, block);
    }
    sm90::wait(&shared.barriers.keys_empty[turn.buffer()][half], turn.parity() ^ 1);
    // The swizzled place of this thread's first 8 values of a tile; the other 8 are in the neighbouring 16 bytes.
    uint32_t chunk = (2 * part ^ lane / 4) * 16;
    uint32_t keys = sm90::shared_address(shared.keys[turn.buffer()]) + token * 128 + chunk;
    if (L::kHasRope && half == 1) {
      // The rope part's place may still hold weights, which the sums of the other half read too.
      if (L::kFp8Tiles == kWeightTile) sm90::wait(&shared.barriers.keys_empty[turn.buffer()][0], turn.parity() ^ 1);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t to = keys + L::kFp8Tiles * kTileBytes + i * 32 * 128;
        const uint8_t* rope = shared.rows[place][token + i * 32] + L::kRopeByte + part * 32;
        sm90::copy_async(to, rope, true);
        sm90::copy_async(to ^ 16, rope + 16, true);
      }
    }
    sm90::wait(&shared.barriers.scales_full[place], n / kAhead & 1);
    auto* of_keys = &shared.scales[place][token];
    if (are_fp4(place)) {
      if constexpr (kFormat == kV41Fp4) {
        const HalfScalesFp4 scales[2] = {{of_keys[0], half, part}, {of_keys[32], half, part}};
        convert_fp4_to(keys - chunk + half * L::kHalfTiles * kTileBytes, values.values, scales, part, token);
      }
    } else {
      const HalfScales<kFormat> scales[2] = {{of_keys[0], half, part}, {of_keys[32], half, part}};
      values.convert_to(keys + half * L::kHalfTiles * kTileBytes, scales, half);
    }
    sm90::wait_copies();
    __syncwarp();
    sm90::arrive_warp(&shared.barriers.keys_full[turn.buffer()][half], lane);
    sm90::arrive_warp(&shared.barriers.rows_empty[place], lane);
    if (n + 2 < piece.blocks) prefetch(n + 2);
    load(n + 1);  // rows of zeros after the last
  }
}

}  // namespace sparse_decode
