// The producers of bfloat16 rows, in which nothing is converted: they start the copies of a block's rows, straight to
// their places in shared memory, as soon as its buffer is empty, and do not wait for them.

#pragma once

#include "keys.cuh"

namespace sparse_decode {

constexpr int kHalfBytes = kValues;  // of a row's 512 values of V; V3.2's rope part follows the second half
constexpr int kLines = 8;            // of kPrefetched bytes, in a row's values of V

// Where a thread copies to and from. Eight neighbouring threads copy 128 bytes of a key, a row of a tile; a warp has 16
// keys of a block, four at once.
template <Format kFormat>
struct RowCopies {
  using L = Layout<kFormat>;
  const uint8_t* from[4];  // this thread's first 16 bytes of four keys, four apart
  bool exists[4];          // the others become zeros
  uint32_t to;             // of the first key, in the half's first tile

  __device__ __forceinline__ RowCopies(Shared<kFormat>& shared, int place, int buffer, int half) {
    unsigned lane = threadIdx.x % 32, chunk = lane % 8, key = threadIdx.x / 32 % 4 * 16 + lane / 8;
    to = sm90::shared_address(shared.keys[buffer][half * L::kHalfTiles]) + key * 128 + (chunk ^ key % 8) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t* row = shared.rows[place][key + i * 4];
      exists[i] = row != reinterpret_cast<const uint8_t*>(zero_row);
      from[i] = row + half * kHalfBytes + chunk * 16;
    }
  }

  // Starts the copies of one of the half's tiles; the fifth is V3.2's rope part.
  __device__ __forceinline__ void start(int tile) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
      sm90::copy_async((to ^ i % 2 * 64) + tile * kTileBytes + i * 4 * 128, from[i] + tile * 128, exists[i]);
  }
};

// Prefetches 32 of a block's rows into the L2, each whole, and, where a row of queries begins with the block, that too.
template <Format kFormat>
__device__ __forceinline__ void prefetch_block(const Call& call, Shared<kFormat>& shared, int tile, int half,
                                               int block) {
  using L = Layout<kFormat>;
  int line = threadIdx.x % kLines, token = half * 32 + threadIdx.x % 128 / kLines, place = block % kAhead;
  sm90::wait(&shared.barriers.rows_full[place], block / kAhead & 1);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint8_t* row = shared.rows[place][token + i * 16];
    if (row == reinterpret_cast<const uint8_t*>(zero_row)) continue;
    sm90::prefetch(row + line * kPrefetched);
    if (L::kHasRope && line == 0) sm90::prefetch(row + L::kRopeByte);
  }
  int row = shared.row_begun[block % kKnown];
  if (row < 0) return;
  int first = tile * kHeads, bytes = min(call.heads - first, kHeads) * L::kQkDim * 2;
  auto* queries = reinterpret_cast<const uint8_t*>(
      call.q + (static_cast<int64_t>(row) * call.heads + first) * L::kQkDim);
#pragma unroll 1
  for (int at = threadIdx.x % 256 * kPrefetched; at < bytes; at += 256 * kPrefetched) sm90::prefetch(queries + at);
}

// Brings half of V's columns of the keys, as `bring_keys` does, in the same steps of finding rows.
template <Format kFormat>
__device__ __forceinline__ void bring_bf16_keys(const Call& call, const Piece& piece, Shared<kFormat>& shared,
                                                int tile, int half) {
  using L = Layout<kFormat>;
  static_assert(L::kParts == 4 && kBlock / L::kParts == 16);  // each of a producer's warps has a part
  static_assert(kPrefetched * kLines == 2 * kHalfBytes && L::kHalfTiles * 128 == kHalfBytes);
  int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  Blocks ahead(call, piece);
  if (warp == kSlotWarp) {
#pragma unroll 1
    for (int i = 0; i < kAhead; i++) copy_slots(call, shared, ahead, i);
  }
  if (warp == kRowWarp) find_rows(call, shared, 0);
  int number = 0;  // how many rows were begun
#pragma unroll 1
  for (int n = 0; n < piece.blocks; n++) {
    Turn turn{n};
    int place = n % kAhead;
    sm90::wait(&shared.barriers.rows_full[place], n / kAhead & 1);
    // Before this block's copies, for which the slots' barrier would wait too.
    if (warp == kSlotWarp) copy_slots(call, shared, ahead, n + kAhead);
    RowCopies<kFormat> copies(shared, place, turn.buffer(), half);
    sm90::wait(shared.keys_empty(turn.buffer(), half, warp % 4), turn.parity() ^ 1);
#pragma unroll
    for (int i = 0; i < L::kHalfTiles; i++) copies.start(i);
    if (L::kHasRope && half == 1) {
      // The rope part's place may still hold weights, which the sums of both halves read to their end.
      for (int i = 0; i < 2; i++) sm90::wait(&shared.barriers.keys_empty[turn.buffer()][i], turn.parity() ^ 1);
      copies.start(L::kHalfTiles);
    }
    if (int row = shared.row_begun[n % kKnown]; row >= 0) {
      sm90::wait(&shared.barriers.queries_empty, (number++ & 1) ^ 1);
      copy_queries(call, shared, row, tile * kHeads, half);
    }
    sm90::arrive_after_copies(&shared.barriers.keys_full[turn.buffer()][half]);
    __syncwarp();
    // Arrivals of copies release nothing else, so the warp that has stored the block's mask arrives too.
    if (warp == kRowWarp) sm90::arrive_warp(&shared.barriers.keys_full[turn.buffer()][1], lane);
    sm90::arrive_warp(&shared.barriers.rows_empty[place], lane);
    // The first two blocks are copied at once, and what is found and prefetched for later ones comes after them.
    if (warp == kRowWarp) {
      int last = n ? n + kAhead - 1 : 1;
#pragma unroll 1
      for (int block = n == 1 ? 2 : last; block <= last; block++) find_rows(call, shared, block);
    }
    if (n && n + 1 < piece.blocks) prefetch_block(call, shared, tile, half, n + 1);
  }
}

}  // namespace sparse_decode
