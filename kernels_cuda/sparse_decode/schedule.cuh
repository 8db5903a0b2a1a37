// Which blocks of keys each thread block attends to.
//
// A row's keys come in blocks of 64 columns: first those of the first table, then those of the second. The thread
// blocks form groups, each with one thread block for each tile of heads. The groups share the rows in the way that
// ends soonest:
//
// Whole rows are dealt in rounds, the longest first: in the first round from the first group to the last, in the next
// from the last to the first, and so on. The rows that do not fill a round are dealt like the others, or each is split
// into equal parts for several groups. Or the blocks of all rows form one line, which is split into equal pieces.
//
// A split row leaves parts, which a second phase of the launch joins. A caller who wants results that do not depend on
// the batch gets whole rows.

#pragma once

#include <cuda_bf16.h>

#include <climits>
#include <cstdint>

namespace sparse_decode {

constexpr int kBlock = 64;    // keys
constexpr int kHeads = 64;    // of a tile: the rows of a matrix product
constexpr int kValues = 512;  // of V and of the output
constexpr int kThreads = 512;
constexpr int kWindowBlocks = 2;  // of keys, the most that a row of the window kernel has

// Times, in units of a block of keys: of a row, or a part of one, in addition to its blocks; and, where rows are split,
// of the join, once and for so many parts.
constexpr int kRowCost = 1;
constexpr int kJoinCost = 3;
constexpr int kPartsJoined = 44;  // in one unit of time

constexpr int kMostRounds = 32;  // of rows of different lengths
constexpr int kMostGroups = 160;
constexpr int kMostRows = kMostGroups * (kMostRounds + 1);
constexpr int kSizes = 32;  // classes of row sizes, one for each lane
constexpr int kToItsEnd = INT_MAX;

// Divides 0 <= n < 2^31 by a number that is known before the launch: n · multiplier / 2^(31 + shift), with
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

// kAsLengthsSay where lengths are given. kInClusters: each row is shared by a cluster, as in the cluster kernel.
// kInWindow: each is a thread block's, and so short that the window kernel serves it.
enum Cuts { kNever, kAlways, kAsLengthsSay, kInClusters, kInWindow };

// The part of the schedule that is known before the launch: rounds of one row for each group, and the rows that are
// left.
struct Deal {
  int rounds, rest;
  Divisor groups;
  Divisor parts;              // of a row of the rest, if it is split; in the cluster kernels, of every row
  int parts_cost, line_cost;  // units that are lost if the rest is split, or the line
  int most_blocks;            // of a row
  int size_shift;             // log2 of the blocks by which two classes of row sizes differ
};

inline Deal deal_of(int rows, int groups, int tiles, int most_blocks) {
  int rest = rows % groups, parts = rest ? groups / rest : 1, shift = 0;
  while ((most_blocks - 1) >> shift >= kSizes) shift++;
  auto cost = [&](int parts_written) { return kRowCost + kJoinCost + parts_written * tiles / kPartsJoined; };
  int of_rest = rest * (parts < most_blocks ? parts : most_blocks), in_line = (rows < groups ? rows : groups) + groups;
  return {rows / groups, rest, divisor_of(groups), divisor_of(parts), cost(of_rest), cost(in_line), most_blocks, shift};
}

// One paged cache, and the slots that the rows read.
struct Table {
  const uint8_t* data;  // [pages, page_bytes]
  const int* indices;   // [rows, topk], rows `stride` apart
  const int* lengths;   // [rows / rows_per_length] or null
  int64_t page_bytes, stride;
  int num_slots, topk;
  Divisor page_size, rows_per_length;
};

// Where the rows of a page are, and their scales, in bytes from its begin.
struct Places {
  int64_t scales;  // of its first row
  int row_stride, scale_stride;
};

struct Call {
  const __nv_bfloat16* q;  // [rows, heads, 512 or 576]
  const float* sink;       // [heads] or null
  __nv_bfloat16* out;      // [rows, heads, 512]
  float* lse;              // [rows, heads]
  // Parts of split rows, two for each thread block: of the row in whose middle its piece begins, and of the row whose
  // first part it has. Values are not yet divided by their sum. part_sums holds the base-2 maximum and the sum.
  float* part_values;  // [blocks, 2, 64, 512]
  float2* part_sums;   // [blocks, 2, 64]
  int2* part_rows;     // [blocks], -1: none
  Table tables[2];
  int rows, heads, tiles, groups;
  int cuts;
  Deal deal;
  float scale_log2;  // softmax_scale · log2(e)
  float empty_lse;
  Places places[2];  // of the tables, for V4.1, whose rows come in two orders of bytes
};

struct Lengths {
  int first, second;  // columns of each table

  __device__ __forceinline__ int first_blocks() const { return (first + kBlock - 1) / kBlock; }
  // A row without keys has one block, of which no key is valid.
  __device__ __forceinline__ int blocks() const {
    return max(first_blocks() + (second + kBlock - 1) / kBlock, 1);
  }
};

inline int most_blocks(const Call& call) {
  int blocks = 0;
  for (const Table& table : call.tables) blocks += (table.topk + kBlock - 1) / kBlock;
  return blocks ? blocks : 1;
}

// The length as it is in memory. It is clipped where it is used, so that a load ahead does not wait.
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

// Runs of blocks, one run for each row: the first row up to block `until`, then whole rows, the last row up to `end`.
struct Piece {
  int row, block;    // the piece begins before these
  int until, end;    // a block, or kToItsEnd
  int left;          // rows after the first; -1: none at all
  int second;        // the first of the rows after the first, which follow each other,
  const int* dealt;  // unless they are listed here
  int blocks;        // of all runs
  bool joins;        // whether any row of the call is split
  bool equally;      // whether those are the first rows, each in equal parts as `Part` says
};

// Stays in shared memory for the whole launch.
struct Plan {
  Piece piece;
  int dealt[kMostRounds];  // rows, in whole rounds
};

static_assert(kThreads >= kMostGroups);

struct Planning {  // in shared memory, free again once the piece is planned
  static constexpr int kWarps = kThreads / 32;
  int blocks[kMostRows];  // of each row
  int warp_units[kWarps], warp_longest[kWarps];
  int sizes[kWarps][kSizes];   // how many rows of each size the warp's threads have
  int places[kWarps][kSizes];  // place of the next of these rows in the order of sizes
  int loads[kMostGroups];      // blocks dealt in whole rounds
  int rest[kMostGroups];       // the rows that fill no round; without rounds, all rows in their order
  struct {
    int row, block;  // before these
    int before;      // blocks of the line
  } cuts[2];
};

// --- rounds -----------------------------------------------------------------------------------------------------

// The group that has the i-th row of a round; or, for a group, which row of the round it has.
__device__ __forceinline__ int turn(const Call& call, int round, int i) {
  return round % 2 ? call.groups - 1 - i : i;
}

// The blocks in the i-th part of a split row.
struct Part {
  int first, last;
  __device__ __forceinline__ Part(const Call& call, int blocks, bool cut, int i) {
    const Divisor& parts = call.deal.parts;
    int each = cut ? parts.quotient(blocks + parts.divisor - 1) : blocks;
    first = min(i * each, blocks), last = min(first + each, blocks);
  }
};

// A piece of a part of a row, unless it is empty, and then of whole rows: those dealt, or `whole` and the ones after
// it.
__device__ __forceinline__ Piece piece_of_rounds(const Call& call, int row, int blocks, Part part, int whole,
                                                 const int* dealt, int whole_blocks, bool cuts) {
  bool begins = part.first < part.last;
  Piece piece;
  piece.row = begins ? row : dealt ? *dealt : whole;
  piece.block = begins ? part.first : 0;
  piece.until = begins && part.last < blocks ? part.last : kToItsEnd;
  piece.end = kToItsEnd;
  piece.left = call.deal.rounds - !begins;
  piece.second = whole + !begins;
  piece.dealt = dealt ? dealt + !begins : nullptr;
  piece.blocks = part.last - part.first + whole_blocks;
  piece.joins = cuts;
  piece.equally = cuts && (call.deal.rounds == 0 || !dealt);
  return piece;
}

// --- the line ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ Piece piece_between(int row, int block, int end_row, int end_block, int blocks, bool cuts) {
  int end = end_block ? end_block : kToItsEnd, left = end_row - row - (end_block == 0);
  return {row, block, left ? kToItsEnd : end, end, left, row + 1, nullptr, blocks, cuts, false};
}

// --- rows of one length -----------------------------------------------------------------------------------------

__device__ __forceinline__ Piece uniform_line(const Call& call, int blocks, int group) {
  int units = blocks + kRowCost, each = call.deal.groups.quotient(call.rows * units + call.groups - 1);
  int rows[2], at[2];
  for (int side = 0; side < 2; side++) {
    int position = min((group + side) * each, call.rows * units);
    rows[side] = position / units, at[side] = position - rows[side] * units;
    if (at[side] >= blocks) rows[side]++, at[side] = 0;
  }
  return piece_between(rows[0], at[0], rows[1], at[1], (rows[1] - rows[0]) * blocks + at[1] - at[0], true);
}

__device__ __forceinline__ Piece uniform_piece(const Call& call, int group) {
  int blocks = call.deal.most_blocks, parts = call.cuts == kAlways ? call.deal.parts.divisor : 1;
  if (call.cuts == kAlways && parts == 1) return uniform_line(call, blocks, group);
  int row = parts == 1 ? group : call.deal.parts.quotient(group), rounds = call.deal.rounds;
  Part part(call, row < call.deal.rest ? blocks : 0, parts > 1, group - row * parts);
  return piece_of_rounds(call, row, blocks, part, call.deal.rest + group * rounds, nullptr, rounds * blocks, parts > 1);
}

// --- rows of different lengths ----------------------------------------------------------------------------------
// A launch begins with this code, whose instructions come from memory, so loops are not unrolled.

// Totals over all rows, and over the run of rows that the thread counts.
struct Survey {
  int all, longest;  // units; blocks
  int first, last;   // own rows
  int before, mine;  // units of the rows before its own, and of its own
};

// The class of a row's size; 0 is the longest.
__device__ __forceinline__ int size_of(const Call& call, int blocks) {
  return kSizes - 1 - ((blocks - 1) >> call.deal.size_shift);
}

__device__ __forceinline__ int scan_warp(int x) {
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(~0u, x, step);
    if (threadIdx.x % 32 >= step) x += other;
  }
  return x;
}

__device__ __forceinline__ Survey survey_rows(const Call& call, Planning& shared, bool deals) {
  int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int each = (call.rows + kThreads - 1) / kThreads;
  Survey survey = {};
  survey.first = min(thread * each, call.rows), survey.last = min(survey.first + each, call.rows);
  shared.sizes[warp][lane] = 0;
  __syncwarp();
#pragma unroll 1
  for (int row = survey.first; row < survey.last; row++) {
    int blocks = lengths_of(call, row).blocks();
    survey.mine += blocks + kRowCost;
    survey.longest = max(survey.longest, blocks);
    if (deals) {
      shared.blocks[row] = blocks;
      atomicAdd(&shared.sizes[warp][size_of(call, blocks)], 1);
    }
  }
  int through = scan_warp(survey.mine), longest = __reduce_max_sync(~0u, survey.longest);
  if (lane == 31) shared.warp_units[warp] = through, shared.warp_longest[warp] = longest;
  if (deals && thread < call.groups) shared.loads[thread] = 0, shared.rest[thread] = thread;
  __syncthreads();
  int sum = lane < Planning::kWarps ? shared.warp_units[lane] : 0;
  survey.longest = __reduce_max_sync(~0u, lane < Planning::kWarps ? shared.warp_longest[lane] : 0);
  survey.all = __reduce_add_sync(~0u, sum);
  survey.before = __reduce_add_sync(~0u, lane < warp ? sum : 0) + through - survey.mine;
  return survey;
}

// Deals whole rounds, and lists the rows that are left. Every thread block deals all rows and keeps those of its group.
__device__ __forceinline__ void deal_rows(const Call& call, Planning& shared, const Survey& survey, int group,
                                          Plan& plan) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, of_size = 0, of_warps_before = 0;
#pragma unroll 4
  for (int i = 0; i < Planning::kWarps; i++) {
    int count = shared.sizes[i][lane];
    of_size += count;
    if (i < warp) of_warps_before += count;
  }
  shared.places[warp][lane] = scan_warp(of_size) - of_size + of_warps_before;
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < (call.rows + kThreads - 1) / kThreads; i++) {
    int row = survey.first + i;
    bool there = row < survey.last;
    int blocks = there ? shared.blocks[row] : 1, size = size_of(call, blocks);
    unsigned same = __match_any_sync(~0u, there ? size : -1), before = same & ((1u << lane) - 1);
    int place = shared.places[warp][size] + __popc(before);
    __syncwarp();
    if (there && !before) shared.places[warp][size] += __popc(same);
    __syncwarp();
    if (!there) continue;
    int round = call.deal.groups.quotient(place), at = place - round * call.groups;
    if (round == call.deal.rounds) {
      shared.rest[at] = row;
      continue;
    }
    at = turn(call, round, at);
    atomicAdd(&shared.loads[at], blocks);
    if (at == group) plan.dealt[round] = row;
  }
  __syncthreads();
}

// How long the groups take, in units of time.
struct Times {
  int rounds, whole, longest_rest;  // without the rest; with the rest, not split; its longest row in blocks

  __device__ __forceinline__ Times(const Call& call, const Planning& shared) {
    int most_rounds = 0, most = 0, longest = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < call.groups; i += 32) {
      int at = turn(call, call.deal.rounds, i), rest = 0;
      if (at < call.deal.rest) rest = shared.blocks[shared.rest[at]];
      int units = shared.loads[i] + call.deal.rounds * kRowCost;
      most_rounds = max(most_rounds, units);
      most = max(most, units + (rest ? rest + kRowCost : 0));
      longest = max(longest, rest);
    }
    rounds = __reduce_max_sync(~0u, most_rounds);
    whole = __reduce_max_sync(~0u, most);
    longest_rest = __reduce_max_sync(~0u, longest);
  }
};

// Splits the line where the groups' shares end, or, without cuts, at the nearest end of a row. The thread that counts
// the row writes the place.
__device__ __forceinline__ Piece piece_of_line(const Call& call, Planning& shared, const Survey& survey, int each,
                                               int group, bool cuts) {
#pragma unroll 1
  for (int side = 0; side < 2; side++) {
    int64_t wanted = static_cast<int64_t>(group + side) * each;
    bool ends = wanted >= survey.all;
    if (ends && threadIdx.x == 0) shared.cuts[side] = {call.rows, 0, survey.all - call.rows * kRowCost};
    if (ends || wanted < survey.before || wanted >= survey.before + survey.mine) continue;
    int row = survey.first, begin = survey.before, blocks;
#pragma unroll 1
    while (true) {
      blocks = lengths_of(call, row).blocks();
      if (wanted < begin + blocks + kRowCost) break;
      begin += blocks + kRowCost, row++;
    }
    int block = static_cast<int>(wanted) - begin, before = begin - row * kRowCost;
    if (!cuts) block = 2 * block < blocks ? 0 : blocks;
    if (block < blocks) shared.cuts[side] = {row, block, before + block};
    if (block >= blocks) shared.cuts[side] = {row + 1, 0, before + blocks};
  }
  __syncthreads();
  auto begin = shared.cuts[0], end = shared.cuts[1];
  return piece_between(begin.row, begin.block, end.row, end.block, end.before - begin.before, cuts);
}

__device__ __forceinline__ Piece piece_by_lengths(const Call& call, Planning& shared, Plan& plan, int group) {
  const Deal& deal = call.deal;
  bool may_cut = call.cuts != kNever, deals = deal.rounds <= kMostRounds && call.groups <= kMostGroups;
  Survey survey = survey_rows(call, shared, deals);
  int each = deal.groups.quotient(survey.all + call.groups - 1);
  if (!deals) return piece_of_line(call, shared, survey, each, group, may_cut && call.groups > 1);
  if (deal.rounds > 0) deal_rows(call, shared, survey, group, plan);
  Times times(call, shared);
  int least = call.cuts == kAlways ? INT_MAX : times.whole, parts = 1;
  if (may_cut && deal.parts.divisor > 1) {
    int part = deal.parts.quotient(times.longest_rest + deal.parts.divisor - 1);
    int units = times.rounds + part + deal.parts_cost;
    if (units < least) least = units, parts = deal.parts.divisor;
  }
  if (may_cut && each + deal.line_cost < least) return piece_of_line(call, shared, survey, each, group, true);
  int at = parts == 1 ? turn(call, deal.rounds, group) : deal.parts.quotient(group);
  int row = at < deal.rest ? shared.rest[at] : 0, blocks = at < deal.rest ? shared.blocks[row] : 0;
  Part part(call, blocks, parts > 1, parts == 1 ? 0 : group - at * parts);
  return piece_of_rounds(call, row, blocks, part, 0, plan.dealt, shared.loads[group], parts > 1);
}

// The same for fewer rows than groups, unless the line ends soonest. Each warp looks at all rows.
__device__ __forceinline__ bool plan_few_rows(const Call& call, int group, Piece& piece) {
  const Deal& deal = call.deal;
  int all = 0, longest = 0;
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < call.rows; row += 32) {
    int blocks = lengths_of(call, row).blocks();
    all += blocks + kRowCost;
    longest = max(longest, blocks);
  }
  all = __reduce_add_sync(~0u, all), longest = __reduce_max_sync(~0u, longest);
  int least = call.cuts == kAlways ? INT_MAX : longest + kRowCost, parts = 1;
  if (call.cuts != kNever) {
    int units = deal.parts.quotient(longest + deal.parts.divisor - 1) + deal.parts_cost;
    if (deal.parts.divisor > 1 && units < least) least = units, parts = deal.parts.divisor;
    if (deal.groups.quotient(all + call.groups - 1) + deal.line_cost < least) return false;
  }
  int row = parts == 1 ? group : deal.parts.quotient(group);
  int blocks = row < call.rows ? lengths_of(call, row).blocks() : 0;
  Part part(call, blocks, parts > 1, parts == 1 ? 0 : group - row * parts);
  piece = piece_of_rounds(call, row, blocks, part, 0, nullptr, 0, parts > 1);
  return true;
}

// --- for the kernel ---------------------------------------------------------------------------------------------

// Plans the piece of a group. All threads call it, and synchronise before they use the plan. Calls with and without
// lengths are two kernels, since code that a launch does not need slows the fetching of the code that it needs.
template <bool kByLengths>
__device__ __forceinline__ void plan_piece(const Call& call, Planning& shared, Plan& plan, int group) {
  Piece piece;
  if constexpr (kByLengths) {
    if (call.deal.rounds > 0 || !plan_few_rows(call, group, piece))
      piece = piece_by_lengths(call, shared, plan, group);
  } else {
    piece = uniform_piece(call, group);
  }
  if (threadIdx.x == 0) plan.piece = piece;
}

// The rows of which this piece has a part: the row in whose middle it begins, and the row whose first part it has.
__device__ __forceinline__ int2 parts_of(const Piece& piece) {
  int2 rows = {-1, -1};
  if (piece.left < 0) return rows;
  if (piece.left > 0 && piece.end != kToItsEnd) rows.y = piece.second + piece.left - 1;
  if (piece.until != kToItsEnd) rows.y = piece.row;
  if (piece.block > 0) rows.x = piece.row;
  if (piece.block > 0 && piece.until != kToItsEnd) rows.y = -1;
  return rows;
}

// Walks through a piece row by row.
struct Rows {
  struct {
    int row, block;
  } at;
  int until, end, left, second;
  const int* dealt;
  Lengths lengths, next;  // of this row; of the one after it, not clipped

  __device__ __forceinline__ Rows(const Call& call, const Piece& piece)
      : at{piece.row, piece.block}, until(piece.until), end(piece.end), left(piece.left), second(piece.second),
        dealt(piece.dealt), lengths(lengths_of(call, at.row)), next(given_lengths(call, following(call))) {}
  __device__ __forceinline__ bool any() const { return left >= 0; }
  // The block of this row before which the piece ends.
  __device__ __forceinline__ int last() const { return min(until, lengths.blocks()); }
  // Which of the thread block's two parts this is, if the row is split.
  __device__ __forceinline__ int part() const { return at.block == 0; }
  __device__ __forceinline__ int following(const Call& call) const {
    return left <= 0 ? call.rows : dealt ? *dealt : second;
  }
  __device__ __forceinline__ void advance(const Call& call) {
    at = {following(call), 0};
    if (left > 0 && dealt) dealt++;
    left--, second++;
    until = left == 0 ? end : kToItsEnd;
    lengths = clipped(call, next);
    next = given_lengths(call, following(call));
  }
};

}  // namespace sparse_decode
