// Which blocks of keys each thread block attends to.
//
// A row's keys are cut into blocks of 64 columns, those of the first table and then those of the second; the blocks of
// all rows stand in a line, and the thread blocks, in groups of one for each tile of heads, take equal pieces of it. A
// row that lies in several pieces is attended to in parts, which a second phase of the launch joins. Where whole rows
// spread as evenly, or the caller wants results that do not depend on the batch, rows are not cut.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sparse_decode {

constexpr int kBlock = 64;    // keys
constexpr int kHeads = 64;    // of a tile: the rows of a matrix product
constexpr int kValues = 512;  // of V and of the output
constexpr int kThreads = 512;

// Writing and joining the parts takes about as long as this many blocks of keys.
constexpr int kCutCost = 3;

// Division of 0 <= n < 2^31 by a number that is known before the launch: n · multiplier / 2^(31 + shift), with
// shift = ⌈log2(divisor)⌉ and multiplier = ⌈2^(31 + shift) / divisor⌉.
struct Divisor {
  uint32_t divisor, multiplier, shift;

#ifdef __CUDACC__
  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>(__umulhi(2u * static_cast<uint32_t>(n), multiplier) >> shift);
  }
#endif
};

inline Divisor divisor_of(int64_t n) {
  uint32_t shift = 0;
  while (int64_t{1} << shift < n) shift++;
  return {static_cast<uint32_t>(n), static_cast<uint32_t>(((int64_t{1} << (31 + shift)) + n - 1) / n), shift};
}

enum Cuts { kNever, kAlways, kAsLengthsSay };

// One paged cache and what the rows read of it.
struct Table {
  const uint8_t* data;  // [pages, page_bytes]
  const int* indices;   // [rows, topk]
  const int* lengths;   // [rows / rows_per_length] or null
  int64_t page_bytes;
  int num_slots, topk;
  Divisor page_size, rows_per_length;
};

struct Call {
  const __nv_bfloat16* q;  // [rows, heads, 512 or 576]
  const float* sink;       // [heads] or null
  __nv_bfloat16* out;      // [rows, heads, 512]
  float* lse;              // [rows, heads]
  // What the thread blocks leave of rows that are cut, two parts each: of the row that their piece begins in the midst
  // of, and of the row whose first part they have. Values are not yet divided by their sum; base-2 maximum and sum.
  float* part_values;  // [blocks, 2, 64, 512]
  float2* part_sums;   // [blocks, 2, 64]
  int2* part_rows;     // [blocks], -1: none
  Table tables[2];
  int rows, heads, tiles, groups;
  int cuts;
  float scale_log2;  // softmax_scale · log2(e)
  float empty_lse;
};

struct Lengths {
  int first, second;  // columns of each table

  __device__ __forceinline__ int first_blocks() const { return (first + kBlock - 1) / kBlock; }
  // A row without keys has one block, of which no key is valid.
  __device__ __forceinline__ int blocks() const {
    return max(first_blocks() + (second + kBlock - 1) / kBlock, 1);
  }
};

// As it stands in memory; whoever needs it clips it, so that loading ahead does not wait.
__device__ __forceinline__ int given_length(const Table& table, int row) {
  if (!table.lengths) return table.topk;
  return table.lengths[table.rows_per_length.quotient(row)];
}

__device__ __forceinline__ Lengths given_lengths(const Call& call, int row) {
  if (row >= call.rows) return {0, 0};
  return {given_length(call.tables[0], row), given_length(call.tables[1], row)};
}

__device__ __forceinline__ Lengths clipped(const Call& call, Lengths given) {
  return {min(max(given.first, 0), call.tables[0].topk), min(max(given.second, 0), call.tables[1].topk)};
}

__device__ __forceinline__ Lengths lengths_of(const Call& call, int row) {
  return clipped(call, given_lengths(call, row));
}

// A place in the line: before this block of the row.
struct Place {
  int row, block;
  __device__ __forceinline__ bool before(Place other) const {
    return row < other.row || (row == other.row && block < other.block);
  }
};

struct Piece {
  Place begin, end;
  int blocks;
  bool joins;  // any row of the call is cut
};

struct Planning {  // shared memory
  int warp_sums[kThreads / 32], warp_longest[kThreads / 32];
  Place cuts[2];
  int positions[2];  // of the cuts, in the line
};

// All counts of blocks are less than 2^31.
struct Sharing {
  int groups;  // that share the line
  int each, rest;  // blocks of a piece, but that the first `rest` have one more
  bool cuts;

  __device__ __forceinline__ int begin(int group) const { return group * each + min(group, rest); }
};

// `all` blocks, at most `longest` of a row.
__device__ __forceinline__ Sharing share(const Call& call, bool uniform, int all, int longest) {
  int most = (all + call.groups - 1) / call.groups;
  bool cuts = call.cuts == kAlways;
  if (call.cuts == kAsLengthsSay) {
    int whole = uniform                    ? (call.rows + call.groups - 1) / call.groups * longest
                : call.rows <= call.groups ? longest
                                           : most + longest / 2;
    cuts = whole > most + kCutCost;
  }
  // As few groups as have no more to do for it.
  int groups = cuts ? (all + most - 1) / most : call.groups;
  int each = all / groups;
  return {groups, each, all - each * groups, cuts};
}

// Where a row of so many blocks, which begins at `begin` in the line, is cut for `position`: there, or at its nearer
// end. Sets the position that it becomes.
__device__ __forceinline__ Place cut_at(int& position, int row, int begin, int blocks, bool cuts) {
  if (cuts) return {row, position - begin};
  bool up = 2 * (position - begin) >= blocks;
  position = up ? begin + blocks : begin;
  return {row + up, 0};
}

__device__ __forceinline__ Piece uniform_piece(const Call& call, int group) {
  int blocks = lengths_of(call, 0).blocks();
  Sharing sharing = share(call, true, call.rows * blocks, blocks);
  int begin = sharing.begin(group), end = sharing.begin(group + 1);
  int first = begin / blocks, last = end / blocks;
  Piece piece = {{}, {}, 0, sharing.cuts};
  piece.begin = cut_at(begin, first, first * blocks, blocks, sharing.cuts);
  piece.end = cut_at(end, last, last * blocks, blocks, sharing.cuts);
  piece.blocks = end - begin;
  if (group >= sharing.groups) piece.begin = piece.end = {}, piece.blocks = 0;
  return piece;
}

// By the lengths of all rows: each thread adds up those of a run of rows.
__device__ __noinline__ Piece piece_by_lengths(const Call& call, Planning& shared, int group) {
  int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int each = (call.rows + kThreads - 1) / kThreads;
  int first = min(thread * each, call.rows), last = min(first + each, call.rows);
  int mine = 0, longest = 0;
  for (int row = first; row < last; row++) {
    int blocks = lengths_of(call, row).blocks();
    mine += blocks;
    longest = max(longest, blocks);
  }
  int through = mine;
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  longest = __reduce_max_sync(~0u, longest);
  if (lane == 31) shared.warp_sums[warp] = through, shared.warp_longest[warp] = longest;
  __syncthreads();
  int sum = lane < kThreads / 32 ? shared.warp_sums[lane] : 0;
  longest = __reduce_max_sync(~0u, lane < kThreads / 32 ? shared.warp_longest[lane] : 0);
  int all = __reduce_add_sync(~0u, sum);
  int before = __reduce_add_sync(~0u, lane < warp ? sum : 0) + through - mine;
  Sharing sharing = share(call, false, all, longest);
  if (!sharing.cuts && call.rows <= call.groups) {  // whole rows, as many groups: one each
    int blocks = group < call.rows ? lengths_of(call, group).blocks() : 0;
    return {{group, 0}, {group + (blocks > 0), 0}, blocks, false};
  }
  // Whoever has the row that is cut says where.
  for (int side = 0; side < 2; side++) {
    int position = sharing.begin(min(group + side, sharing.groups));
    Place place = {call.rows, 0};
    bool here = position == all ? thread == 0 : position >= before && position < before + mine;
    if (!here) continue;
    if (position < all) {
      int begin = before, row = first, blocks = lengths_of(call, row).blocks();
      while (position >= begin + blocks) {
        begin += blocks;
        blocks = lengths_of(call, ++row).blocks();
      }
      place = cut_at(position, row, begin, blocks, sharing.cuts);
    }
    shared.cuts[side] = place;
    shared.positions[side] = position;
  }
  __syncthreads();
  return {shared.cuts[0], shared.cuts[1], shared.positions[1] - shared.positions[0], sharing.cuts};
}

// The piece of a group; all threads call it.
__device__ __forceinline__ Piece plan_piece(const Call& call, Planning& shared, int group) {
  bool uniform = !call.tables[0].lengths && !call.tables[1].lengths;
  return uniform ? uniform_piece(call, group) : piece_by_lengths(call, shared, group);
}

// The parts of this piece that are not whole rows: of the row it begins in the midst of, and of one that it begins.
__device__ __forceinline__ int2 parts_of(const Piece& piece) {
  bool any = piece.blocks > 0;
  bool begun = piece.end.row > piece.begin.row || piece.begin.block == 0;
  return {any && piece.begin.block > 0 ? piece.begin.row : -1,
          any && piece.end.block > 0 && begun ? piece.end.row : -1};
}

// What is left of a piece, row by row.
struct Rows {
  Place at, end;
  Lengths lengths, next;  // of this row, and as given of the one after

  __device__ __forceinline__ Rows(const Call& call, const Piece& piece)
      : at(piece.begin), end(piece.end), lengths(lengths_of(call, at.row)), next(given_lengths(call, at.row + 1)) {}
  __device__ __forceinline__ bool any() const { return at.before(end); }
  // The block of this row before which the piece ends.
  __device__ __forceinline__ int last() const { return at.row == end.row ? end.block : lengths.blocks(); }
  // Which of the thread block's parts this is, if it is not whole.
  __device__ __forceinline__ int part() const { return at.block == 0; }
  __device__ __forceinline__ void advance(const Call& call) {
    at = {at.row + 1, 0};
    lengths = clipped(call, next);
    next = given_lengths(call, at.row + 1);
  }
};

}  // namespace sparse_decode
