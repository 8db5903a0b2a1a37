// The top-k of each row of logits and its transforms, as jax_sparse_mla.indices.topk defines them.
//
// A row's logits are compared as 64-bit entries. The upper half is the key, an unsigned integer in the order of the
// floats (-0.0 is +0.0, NaN is below every number). The lower half is the complement of the logit's place, so ties go
// to the lower place and no two entries are equal. The selection is a radix select with 11 bits a round; the few
// entries that are left at the end are ranked one against another.
// - A short row stays in registers, and only those few become entries. Few rows are loaded before their lengths are
//   known; of many rows, only the logits within their lengths.
// - Of a row that shared memory can hold as keys of 16 bits, only the entries around the topk-th are made (held.cuh).
// - Where topk is above kBins or a large share of the row, a row that fits in shared memory is loaded as entries.
// - Of a longer row, a single pass collects the entries that reach a threshold, which comes from a sample of the row.
//   If the sample misled (too few or too many entries: ties), the selection reads the row itself.
// - Few long rows are read by clusters of thread blocks, which append to the shared memory of the first block.
//
// The chosen positions are written in ascending order. Where a thread block reads a row or a list in the order of its
// places, each warp counts what it chooses of a part of its own, and then knows where to write. Candidates come in
// segments, in the order in which the warps find them; each is in order. How many of each segment are chosen tells
// where it goes.

#pragma once

#include <cstdint>

#include "call.cuh"
#include "order.cuh"

namespace {

using namespace topk_kernels;

constexpr int kShort = 4096;        // logits of a row that fit in registers
constexpr int kFewThreads = 1024;   // for a short row where rows are few: the least time for one of them
constexpr int kManyThreads = 256;   // where they are many: the fewest instructions for a row
constexpr int kPiece = 8;  // consecutive logits of a sample: a sector of 32 bytes

// The dynamic shared memory, as entries: the list, its segments and its words.
__host__ __device__ inline int shared_entries(const Call& call) {
  return call.capacity + (call.segments ? call.segments + call.capacity / 32 + 1 : 0);
}

// Logits of a row from which its threshold is chosen. More would take longer than the candidates that they save.
__host__ __device__ inline int sample_size(int columns) {
  return columns <= 16384 ? 1024 : columns <= 32768 ? 2048 : 4096;
}

// Positions lie in pages, each with its first index: the pages of the table, or a single page.
__device__ __forceinline__ int page_of(const Call& call, int position) {
  return call.page_shift >= 0 ? position >> call.page_shift : position / call.page_size;
}

// A page's first index; kNowhere, which stays negative whatever is added, where there is no page.
__device__ __forceinline__ int page_start(const Call& call, int row, int at) {
  if (call.method == kPaged) {
    int request = call.row_to_request ? call.row_to_request[row] : row;
    if (request < 0 || request >= call.num_requests || at >= call.num_pages) return kNowhere;
    int page = call.page_table[static_cast<int64_t>(request) * call.num_pages + at];
    return page < 0 || page > call.last_page ? kNowhere : page * call.page_size;
  }
  int start = call.method == kRagged ? call.offsets[row] : 0;
  return start < 0 ? kNowhere : start;
}

// A sum past INT_MAX wraps to below 0.
__device__ __forceinline__ int index_in(const Call& call, int start, int position, int at) {
  unsigned offset = call.method == kPaged ? position - at * call.page_size : position;
  return max(static_cast<int>(start + offset), -1);
}

__device__ int index_of(const Call& call, int row, int position) {
  int at = page_of(call, position);
  return index_in(call, page_start(call, row, at), position, at);
}

// Maps the positions, which may lie where the indices go.
__device__ __forceinline__ void write_indices(const Call& call, const int* places, int row, int shift) {
  int* out = call.out + static_cast<int64_t>(row) * call.topk;
#pragma unroll 2
  for (int i = threadIdx.x; i < call.topk; i += blockDim.x) out[i] = index_of(call, row, shift + places[i]);
}

// Where the chosen places are gathered: in shared memory if they fit, in place of the bins.
__device__ __forceinline__ int* places_of(const Call& call, Shared& shared, int row) {
  if (call.topk <= kBins) return reinterpret_cast<int*>(shared.bins);
  return call.out + static_cast<int64_t>(row) * call.topk;
}

// A threshold that somewhat more than topk of the n logits reach, estimated from a sample with one piece from each of
// equal parts of the row. A random sample has topk · size / n of the topk largest logits, with a standard
// deviation of the root of that. With four roots added, fewer than topk candidates come in one row of tens of
// thousands.
template <typename T>
__device__ float sample_threshold(Shared& shared, Entry* list, const T* values, int n, int topk,
                                  int size) {
  int part = n / (size / kPiece), range = max(part - (kPiece - 1), 1);
  constexpr int kLoads = 4;  // that wait together
  for (int base = threadIdx.x; base < size; base += kLoads * blockDim.x) {
    float held[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; j++) {
      int i = base + j * blockDim.x, piece = i / kPiece;
      int jitter = __umulhi(piece * 40503u << 16, range);  // follows no period of the logits
      held[j] = i < size ? to_float(values[piece * part + jitter + i % kPiece]) : 0;
    }
#pragma unroll
    for (int j = 0; j < kLoads; j++)
      if (int i = base + j * blockDim.x; i < size) list[i] = entry_of(held[j], i);
  }
  __syncthreads();
  float expected = static_cast<float>(topk) * size / n;
  int rank = min(static_cast<int>(expected + 4 * sqrtf(expected) + 4), size);
  Cut cut = select(shared, Entries<4, Entry>{list, size}, rank, max(rank / 16, 1));
  return float_of(static_cast<unsigned>(cut.lower >> 32));
}

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

// How many logits lie between the last whole four of them and the first of a row.
template <typename T>
__device__ __forceinline__ int back_of(const T* values) {
  return reinterpret_cast<uintptr_t>(values) / sizeof(T) % 4;
}

// Appends the entries that reach the threshold, and lists the segments: the block's share of those of n logits. A warp
// reads a segment by loads of four logits. Those of the first and the last four that lie inside are loaded one by one.
template <typename T>
__device__ void filter(const T* values, int n, int block, int blocks, float threshold, int* found, Entry* list,
                       int capacity, Segment* segments) {
  constexpr int kUnroll = kSegment / 128;
  int lane = threadIdx.x % 32, back = back_of(values), all = (n - 1 + back) / kSegment + 1;
  int end = static_cast<int>(static_cast<int64_t>(all) * (block + 1) / blocks);
  int segment = static_cast<int>(static_cast<int64_t>(all) * block / blocks) + threadIdx.x / 32;
  for (; segment < end; segment += blockDim.x / 32) {
    int place = segment * kSegment + 4 * lane - back;
    Four<T> loaded[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      int from = place + 128 * j;
      if (from >= 0 && from + 4 <= n) loaded[j] = *reinterpret_cast<const Four<T>*>(values + from);
    }
    unsigned hits[kUnroll], counts = 0;  // a byte of counts for each load
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      int from = place + 128 * j;
      hits[j] = 0;
      if (from >= 0 && from + 4 <= n) {
#pragma unroll
        for (int i = 0; i < 4; i++) hits[j] |= to_float(loaded[j].x[i]) >= threshold ? 1u << i : 0u;
      } else {
#pragma unroll 1
        for (int i = max(-from, 0); i < min(n - from, 4); i++)
          hits[j] |= to_float(values[from + i]) >= threshold ? 1u << i : 0u;
      }
      counts |= static_cast<unsigned>(__popc(hits[j])) << 8 * j;
    }
    int slot = 0, total = 0;
    bool any = __any_sync(~0u, counts != 0);
    unsigned through = any ? scan(counts) : 0, totals = __shfl_sync(~0u, through, 31), before = through - counts;
    for (int j = 0; j < kUnroll; j++) total += totals >> 8 * j & 0xFF;
    if (lane == 0) {
      if (any) slot = atomicAdd(found, total);
      if (segments) segments[segment] = {slot, total};
    }
    if (!any) continue;
    slot = __shfl_sync(~0u, slot, 0);
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      int at = slot + (before >> 8 * j & 0xFF);
      for (; hits[j]; hits[j] &= hits[j] - 1, at++) {
        int i = place + 128 * j + __ffs(hits[j]) - 1;
        if (at < capacity) list[at] = entry_of(to_float(values[i]), i);  // in L1
      }
      slot += totals >> 8 * j & 0xFF;
    }
  }
}

// Each thread from the `skip`-th on prefetches a line of 128 bytes.
template <typename T>
__device__ void prefetch(const T* from, int count, int skip) {
  int at = (static_cast<int>(threadIdx.x) - skip) * static_cast<int>(128 / sizeof(T));
  if (at >= 0 && at < count) prefetch_line(from + at);
}

// Rows and page tables usually come from memory, each after a wait for its address. These two ask for them before that
// wait. Each block of a cluster has its share of the row; the first one writes the indices, so it needs the pages.
template <typename T>
__device__ __forceinline__ void prefetch_row(const Call& call, int row, int block, int blocks) {
  int share = (call.columns - 1) / blocks + 1;
  prefetch(static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns + block * share,
           min(share, call.columns - block * share), 0);
}

__device__ __forceinline__ void prefetch_pages(const Call& call, int row, int block) {
  if (call.method == kPaged && !call.row_to_request && block == 0)
    prefetch(call.page_table + static_cast<int64_t>(row) * call.num_pages, call.num_pages, blockDim.x / 2);
}

// The logits of a row that are compared: n from column `first` on, of which the first is position `shift`. If there are
// topk or fewer, the row's indices are those of the n positions from `shift` on.
struct Window {
  int n, first, shift;
};

__device__ __forceinline__ Window window_of(const Call& call, int row) {
  int length = max(call.lengths[row], 0);
  int64_t start = call.row_starts ? call.row_starts[row] : 0;
  int64_t first = max(start, int64_t{0});
  int n = static_cast<int>(max(min(start + length, static_cast<int64_t>(call.columns)) - first, int64_t{0}));
  if (length <= call.topk) return {length, 0, 0};
  return {n, static_cast<int>(first), static_cast<int>(first - start)};
}

// Writes every position of a window of at most topk, in order, without reading the logits.
__device__ void write_all(const Call& call, Window window, int row, int thread, int threads) {
  for (int i = thread; i < call.topk; i += threads)
    call.out[static_cast<int64_t>(row) * call.topk + i] = i < window.n ? index_of(call, row, window.shift + i) : -1;
}

template <typename T>
__global__ void __launch_bounds__(1024, 1) topk_kernel(const Call call) {
  Entry* list = dynamic_shared<Entry>();
  Segment* segments = reinterpret_cast<Segment*>(list + call.capacity);
  Word* words = reinterpret_cast<Word*>(segments + call.segments);
  __shared__ Shared shared;
  int blocks = cluster_blocks(), block = cluster_rank(), row = blockIdx.x / blocks;
  prefetch_row<T>(call, row, block, blocks);
  prefetch_pages(call, row, block);

  Window window = window_of(call, row);
  if (window.n <= call.topk) {
    write_all(call, window, row, block * blockDim.x + threadIdx.x, blocks * blockDim.x);
    return;
  }
  int n = window.n, first = window.first, shift = window.shift;
  const T* values = static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns + first;
  bool fits = n <= call.capacity;
  if (fits && block > 0) return;

  for (int i = threadIdx.x; i < kBins; i += blockDim.x) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.found = shared.num_ties = 0;
  int count = n;
  if (fits) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) list[i] = entry_of(to_float(values[i]), i);
    __syncthreads();
  } else {
    __syncthreads();
    int* found = &shared.found;
    Entry* all = list;
    Segment* parts = call.segments ? segments : nullptr;
    if (block == 0) {
      float threshold = sample_threshold(shared, list, values, n, call.topk, sample_size(call.columns));
      if (threadIdx.x == 0) shared.threshold = threshold;
      __syncthreads();  // the sample has been read
    }
    float threshold;
    if (blocks > 1) {
      cluster_sync();
      found = of_first(found);
      all = of_first(all);
      if (parts) parts = of_first(parts);
      threshold = *of_first(&shared.threshold);
    } else {
      threshold = shared.threshold;
    }
    filter(values, n, block, blocks, threshold, found, all, call.capacity, parts);
    if (blocks > 1) cluster_sync();
    if (block > 0) return;
    __syncthreads();
    count = shared.found;
  }

  Entries<4, Entry> entries = {list, count};
  Entries<4, T> whole = {values, n};
  bool enough = count >= call.topk && count <= call.capacity;
  Cut cut = enough ? select(shared, entries, call.topk, kTies) : select(shared, whole, call.topk, kTies);
  int* places = places_of(call, shared, row);
  if (fits) {
    choose_in_order(shared, entries, cut, call.topk, places);
  } else if (enough && call.segments) {
    int back = back_of(values), all = (n - 1 + back) / kSegment + 1;
    choose_in_segments(shared, list, count, cut, call.topk, back, segments, all, words, places);
  } else {
    choose_in_order(shared, whole, cut, call.topk, places);
  }
  write_indices(call, places, row, shift);
}

// The order of two floats, the largest first, in 16 bits each: as halves, rounded to 0. The upper kBinBits name a bin.
__device__ __forceinline__ unsigned order_of(float low, float high) {
  unsigned halves = halves_of(low, high);
  return halves ^ (~negative_halves(halves) & 0x7FFF7FFFu);
}

// A short row in the registers of kThreads threads.
template <int kThreads>
struct Short {
  static constexpr int kWarps = kThreads / 32, kHeld = kShort / kThreads, kOfWarp = 32 * kHeld;
  static constexpr int kStarts = kThreads == kFewThreads ? kThreads : 0;
  unsigned chosen[kWarps][kHeld];  // a bit for each column
  int starts[kStarts + 1];         // the first index of each of the first pages, in a thread each

  // The column of a thread's j-th logit: each warp holds columns that stand side by side.
  static __device__ __forceinline__ int column(int j) { return threadIdx.x / 32 * kOfWarp + j * 32 + threadIdx.x % 32; }
};

// The columns of a short row's k largest entries, ascending, in shared.bins: the `above` for which is_above(j) holds of
// a thread's j-th logit, and the largest of the `ties` for which is_tie(j) does.
template <int kThreads, typename T, typename Above, typename Tie>
__device__ __forceinline__ void collect(Shared& shared, Short<kThreads>& row, const T* values, int wanted, int ties,
                                        Above is_above, Tie is_tie) {
  using S = Short<kThreads>;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = 0;
#pragma unroll
  for (int j = 0; j < S::kHeld; j++) {
    unsigned word = __ballot_sync(~0u, is_above(j));
    if (lane == 0) row.chosen[warp][j] = word;
    count += __popc(word);
    if (is_tie(j))
      shared.ties[atomicAdd(&shared.num_ties, 1)] = entry_of(to_float(values[S::column(j)]), S::column(j));
  }
  if (lane == 0) shared.sums[warp] = count;
  __syncthreads();
  take_ties(shared.ties, ties, wanted, [&](int, int tie) {
    int column = place_of(shared.ties[tie]);
    atomicOr(&row.chosen[0][column / 32], 1u << column % 32);
    atomicAdd(&shared.sums[column / S::kOfWarp], 1);
  });
  __syncthreads();
  int slot = sum_before(shared);
  for (int j = 0; j < S::kHeld; j++) {
    unsigned word = row.chosen[warp][j];
    if (word >> lane & 1) shared.bins[slot + bits_before(word, lane)] = S::column(j);
    slot += __popc(word);
  }
  __syncthreads();
}

// topk_kernel for rows of at most kShort logits, with topk at most kBins. Where rows are few, the instructions for each
// logit are the limit. Where they are many, the instructions that each warp has for a row are.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 2 : 5) topk_short_kernel(const Call call) {
  using S = Short<kThreads>;
  constexpr bool kFew = kThreads == kFewThreads;
  __shared__ Shared shared;
  __shared__ S held_row;
  const float kLowest = -65504, kOutside = __int_as_float(0xFF800000);
  int row = blockIdx.x, thread = threadIdx.x;
  const T* values = static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns;
  float held[S::kHeld];
  if (kFew)  // before the window is known
    for (int j = 0; j < S::kHeld; j++) {
      int column = S::column(j);
      held[j] = column < call.columns ? to_float(values[column]) : 0;
    }
  if constexpr (kFew) held_row.starts[thread] = page_start(call, row, thread);
  Window window = window_of(call, row);
  for (int i = thread; i < kBins / 2; i += kThreads) reinterpret_cast<uint2*>(shared.bins)[i] = make_uint2(0, 0);
  if (thread == 0) shared.num_ties = 0;
  auto inside = [&](int j) { return static_cast<unsigned>(S::column(j) - window.first) < window.n; };
  if (!kFew && window.n > call.topk) {
#pragma unroll
    for (int j = 0; j < S::kHeld; j++) held[j] = inside(j) ? to_float(values[S::column(j)]) : 0;
  }
  __syncthreads();
  if (window.n <= call.topk) {
    write_all(call, window, row, thread, kThreads);
    return;
  }

  // Logits outside the window become -inf, in a bin below all others. NaN and numbers below all halves become the
  // lowest half.
#pragma unroll
  for (int j = 0; j < S::kHeld; j++) held[j] = inside(j) ? fmaxf(held[j], kLowest) + 0.0f : kOutside;  // no -0.0
  unsigned orders[S::kHeld];  // in the upper 16 bits
#pragma unroll
  for (int j = 0; j < S::kHeld; j += 2) {
    orders[j + 1] = order_of(held[j], held[j + 1]);
    orders[j] = orders[j + 1] << 16;
  }
#pragma unroll
  for (int j = 0; j < S::kHeld; j++)
    if (kFew || inside(j)) atomicAdd(&shared.bins[orders[j] >> (32 - kBinBits)], 1u);
  __syncthreads();
  find_bin(shared, call.topk);
  if (shared.in_bin <= kTies) {
    constexpr unsigned kWidth = 1u << (32 - kBinBits);
    unsigned bound = shared.bin * kWidth;
    collect(shared, held_row, values, call.topk - shared.above, shared.in_bin,
            [&](int j) { return orders[j] < bound; }, [&](int j) { return orders[j] - bound < kWidth; });
  } else {
    Cut cut = select(shared, Entries<1, T>{values + window.first, window.n}, call.topk, kTies);
    auto reaches = [&](int j, Entry least) {
      return inside(j) && read_entry(values + window.first, S::column(j) - window.first) >= least;
    };
    collect(shared, held_row, values, call.topk - cut.above, cut.within, [&](int j) { return reaches(j, cut.upper); },
            [&](int j) { return reaches(j, cut.lower) && !reaches(j, cut.upper); });
  }
  for (int i = thread; i < call.topk; i += kThreads) {
    int position = static_cast<int>(shared.bins[i]) - window.first + window.shift, at = page_of(call, position);
    int start = at < S::kStarts ? held_row.starts[at] : page_start(call, row, at);
    call.out[static_cast<int64_t>(row) * call.topk + i] = index_in(call, start, position, at);
  }
}

}  // namespace
