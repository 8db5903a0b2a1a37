// The top-k of each row of logits and its transforms, as jax_sparse_mla.indices.topk defines them.
//
// A row's logits are compared as 64-bit entries. The upper half is the key, an unsigned integer in the order of the
// floats (-0.0 is +0.0, NaN is below every number). The lower half is the complement of the logit's place, so ties go
// to the lower place and no two entries are equal. The selection is a radix select with 11 bits a round; the few
// entries that are left at the end are ranked one against another.
// - A short row stays in registers, and only those few become entries.
// - A row that fits in shared memory is loaded as entries.
// - Of a longer row, a single pass collects the entries that reach a threshold, which comes from a sample of the row.
//   If the sample misled (too few or too many entries: ties), the selection reads the row itself.
// - Few long rows are read by clusters of thread blocks, which append to the shared memory of the first block.

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ffi = tvm::ffi;

namespace {

using Entry = unsigned long long;

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kHeld = 4;                  // logits of a short row in a thread's registers
constexpr int kTies = 64;                  // entries that are ranked one against another
constexpr Entry kLeast = Entry{1} << 32;   // no entry is below
constexpr int kIntMax = 2147483647, kNowhere = -kIntMax - 1;
constexpr int kShortThreads = 1024;
constexpr int kSample = 4096;  // logits of a row from which its threshold is chosen
constexpr int kPiece = 8;      // consecutive logits of a sample: a sector of 32 bytes

enum Method { kPositions, kPaged, kRagged };

struct Call {
  const void* logits;         // float32 or bfloat16 [rows, columns]
  const int* lengths;         // [rows]
  const int* row_starts;      // [rows] or null
  const int* page_table;      // [num_requests, num_pages], if PAGED
  const int* row_to_request;  // [rows] or null
  const int* offsets;         // [rows], if RAGGED
  int* out;                   // [rows, topk]
  int columns, topk, method, page_size, num_requests, num_pages;
  int page_shift;  // log2 of page_size, or -1; without pages 31
  int last_page;   // where the slot INT_MAX lies
  int capacity;    // entries that fit shared memory
};

struct Shared {
  unsigned bins[kBins];
  Entry ties[kTies];
  int sums[32];
  int bin, above, in_bin;  // the bin that holds the k-th entry, how many lie above it and in it
  int found, written, num_ties;
  float threshold;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ unsigned key_of(float value) {
  int bits = __float_as_int(value);
  int magnitude = bits & 0x7FFFFFFF;
  int key = bits < 0 ? -magnitude : magnitude;
  if (magnitude > 0x7F800000) key = -kIntMax;
  return static_cast<unsigned>(key) ^ 0x80000000u;
}

__device__ __forceinline__ float float_of(unsigned key) {
  int ordered = static_cast<int>(key ^ 0x80000000u);
  return __int_as_float(ordered < 0 ? -ordered | 0x80000000 : ordered);
}

__device__ __forceinline__ Entry entry_of(float value, unsigned place) {
  return static_cast<Entry>(key_of(value)) << 32 | ~place;
}

__device__ __forceinline__ int place_of(Entry entry) { return static_cast<int>(~static_cast<unsigned>(entry)); }

__device__ __forceinline__ Entry read_entry(const Entry* list, int i) { return list[i]; }
template <typename T>
__device__ __forceinline__ Entry read_entry(const T* values, int i) {
  return entry_of(to_float(values[i]), i);
}

// Visits the entries of a list or of a row, kEach at a time in each thread, a warp together; 0 is no entry.
template <int kEach, typename T>
struct Entries {
  const T* from;
  int n;
  template <typename Visit>
  __device__ __forceinline__ void visit_groups(Visit visit) const {
    int lane = threadIdx.x % 32;
    for (int begin = threadIdx.x; begin - lane < n; begin += kEach * blockDim.x) {
      Entry group[kEach];
      for (int j = 0, i = begin; j < kEach; j++, i += blockDim.x) group[j] = i < n ? read_entry(from, i) : 0;
      visit(group);
    }
  }
};

// The bins of the first round, by the upper 14 bits of keys: sign, exponent and 5 bits of the mantissa, the largest
// first. All magnitudes below 2^-16 share a bin, and of each sign those from 2^16 on.
constexpr int kUpperBits = 14, kSide = 1023;        // bins of either sign
constexpr int kPositive = 11744, kNegative = 4640;  // the upper bits of key_of(2^-16) and key_of(-2^-16)

__device__ __forceinline__ unsigned bin_of(Entry entry) {
  int upper = static_cast<int>(entry >> (64 - kUpperBits));
  return kSide - min(max(upper - kPositive, 0), kSide) - max(min(upper - kNegative, 0), -kSide);
}

// The least entry that could be in a bin.
__device__ __forceinline__ Entry least_in(int bin) {
  int from_zero = kSide - bin;
  if (from_zero == -kSide) return kLeast;
  return static_cast<Entry>(from_zero + (from_zero > 0 ? kPositive : kNegative)) << (64 - kUpperBits);
}

// The sum of the lanes up to this one.
__device__ __forceinline__ int scan(int mine) {
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(~0u, mine, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) mine += other;
  }
  return mine;
}

// The first of the `mine` slots that this lane gets from a counter.
__device__ __forceinline__ int reserve(int* counter, int mine) {
  int through = scan(mine), first = 0;
  if (threadIdx.x % 32 == 31 && through) first = atomicAdd(counter, through);
  return __shfl_sync(~0u, first, 31) + through - mine;
}

// Sets shared.bin, above and in_bin for the bin where the count reaches k, and zeroes the bins. A warp sums 64 at once.
__device__ void find_bin(Shared& shared, int k) {
  int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  uint2* bins = reinterpret_cast<uint2*>(shared.bins) + lane;
  for (int part = threadIdx.x / 32; part < 32; part += warps) {
    uint2 counts = bins[part * 32];
    int sum = __reduce_add_sync(~0u, counts.x + counts.y);
    if (lane == 0) shared.sums[part] = sum;
  }
  __syncthreads();
  int sum = shared.sums[lane];
  for (int part = threadIdx.x / 32; part < 32; part += warps) {
    uint2 counts = bins[part * 32];
    bins[part * 32] = make_uint2(0, 0);
    int before = __reduce_add_sync(~0u, lane < part ? sum : 0);
    if (before >= k || before + __shfl_sync(~0u, sum, part) < k) continue;
    int mine = counts.x + counts.y, through = before + scan(mine), above = through - mine;
    if (above >= k || through < k) continue;
    bool second = above + static_cast<int>(counts.x) < k;
    shared.bin = part * 64 + lane * 2 + second;
    shared.above = second ? above + counts.x : above;
    shared.in_bin = second ? counts.y : counts.x;
  }
  __syncthreads();
}

// `above` entries are at least `upper`, and `within` from `lower` on but below it: with these they are k or more.
struct Cut {
  Entry lower, upper;
  int above, within;
};

// A cut with at most `most` entries within, by a radix select. shared.bins are zero before and after.
template <typename Source>
__device__ Cut select(Shared& shared, const Source& source, int k, int most) {
  source.visit_groups([&](const auto& group) {
    for (Entry entry : group)
      if (entry >= kLeast) atomicAdd(&shared.bins[bin_of(entry)], 1u);
  });
  __syncthreads();
  find_bin(shared, k);
  int bin = shared.bin;
  Cut cut = {least_in(bin), bin ? least_in(bin - 1) : ~Entry{0}, shared.above, shared.in_bin};
  while (cut.within > most) {
    int shift = max(64 - __clzll(cut.upper - cut.lower - 1) - kBinBits, 0);
    source.visit_groups([&](const auto& group) {
      for (Entry entry : group)
        if (entry >= cut.lower && entry < cut.upper)
          atomicAdd(&shared.bins[kBins - 1 - static_cast<unsigned>((entry - cut.lower) >> shift)], 1u);
    });
    __syncthreads();
    find_bin(shared, k - cut.above);
    cut.lower += static_cast<Entry>(kBins - 1 - shared.bin) << shift;
    cut.upper = min(cut.upper, cut.lower + (Entry{1} << shift));
    cut.above += shared.above;
    cut.within = shared.in_bin;
  }
  return cut;
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

// Ranks the ties, each by one warp, and writes the indices of the largest behind the `above` others.
__device__ void write_ties(const Call& call, Shared& shared, int above, int ties, int row, int shift) {
  int lane = threadIdx.x % 32;
  for (int tie = threadIdx.x / 32; tie < ties; tie += blockDim.x / 32) {
    Entry entry = shared.ties[tie];
    int slot = above;
    for (int other = lane; other - lane < ties; other += 32)
      slot += __popc(__ballot_sync(~0u, other < ties && shared.ties[other] > entry));
    if (lane == 0 && slot < call.topk)
      call.out[static_cast<int64_t>(row) * call.topk + slot] = index_of(call, row, shift + place_of(entry));
  }
}

// Writes the indices of the topk largest entries in the order of their arrival. Leaves shared.bins not zero.
template <typename Source>
__device__ void write_chosen(const Call& call, Shared& shared, const Source& source, int row, int shift) {
  Cut cut = select(shared, source, call.topk, kTies);
  int* out = call.out + static_cast<int64_t>(row) * call.topk;
  // If the positions fit, they are gathered in shared memory first and mapped together: one wait for the page table.
  int* positions = call.topk <= kBins ? reinterpret_cast<int*>(shared.bins) : out;
  source.visit_groups([&](const auto& group) {
    int mine = 0;
    for (Entry entry : group) mine += entry >= cut.upper;
    int slot = reserve(&shared.written, mine);
    for (Entry entry : group) {
      if (entry >= cut.upper)
        positions[slot++] = shift + place_of(entry);
      else if (entry >= cut.lower)
        shared.ties[atomicAdd(&shared.num_ties, 1)] = entry;
    }
  });
  __syncthreads();
#pragma unroll 2
  for (int i = threadIdx.x; i < cut.above; i += blockDim.x) out[i] = index_of(call, row, positions[i]);
  write_ties(call, shared, cut.above, cut.within, row, shift);
}

// A threshold that somewhat more than topk of the n logits reach, estimated from a sample with one piece from each of
// equal parts of the row. A random sample has topk · kSample / n of the topk largest logits, with a standard
// deviation of the root of that. With four roots added, fewer than topk candidates come in one row of tens of
// thousands.
template <typename T>
__device__ float sample_threshold(Shared& shared, Entry* list, const T* values, int n, int topk) {
  int part = n / (kSample / kPiece);
  for (int i = threadIdx.x; i < kSample; i += blockDim.x) {
    int piece = i / kPiece;
    int jitter = ((piece * 40503 & 0xFFFF) >> 4) % max(part - (kPiece - 1), 1);  // follows no period of the logits
    list[i] = entry_of(to_float(values[piece * part + jitter + i % kPiece]), i);
  }
  __syncthreads();
  float expected = static_cast<float>(topk) * kSample / n;
  int rank = min(static_cast<int>(expected + 4 * sqrtf(expected) + 4), kSample);
  Cut cut = select(shared, Entries<4, Entry>{list, kSample}, rank, max(rank / 16, 1));
  return float_of(static_cast<unsigned>(cut.lower >> 32));
}

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

// Appends the entries of a warp's hits. Bit i of each lane's mask stands for place + i.
template <typename T>
__device__ __forceinline__ void append(unsigned hits, const T* values, int place, int* found, Entry* list,
                                       int capacity) {
  if (!__any_sync(~0u, hits != 0)) return;
  int slot = reserve(found, __popc(hits));
  for (; hits; hits &= hits - 1, slot++) {
    int i = place + __ffs(hits) - 1;
    if (slot < capacity) list[slot] = entry_of(to_float(values[i]), i);  // in L1
  }
}

// Appends the entries of the places begin ... end - 1 that reach the threshold.
template <typename T>
__device__ void filter(const T* values, int begin, int end, float threshold, int* found, Entry* list, int capacity) {
  constexpr int kUnroll = 4;
  int lane = threadIdx.x % 32;
  // Loads take four logits. Up to three before the first whole four, and after the last, are loaded one by one.
  int head = (-(reinterpret_cast<uintptr_t>(values + begin) / sizeof(T))) % 4;
  int body = min(begin + head, end);
  int fours = (end - body) / 4, tail = body + 4 * fours;
  if (threadIdx.x < 32) {
    int place = lane < 4 ? begin + lane : tail + lane - 4;
    bool inside = lane < 4 ? place < body : lane < 8 && place < end;
    append(inside && to_float(values[place]) >= threshold ? 1u : 0u, values, place, found, list, capacity);
  }
  const Four<T>* source = reinterpret_cast<const Four<T>*>(values + body);
  int stride = blockDim.x * kUnroll;
  for (int base = (threadIdx.x - lane) * kUnroll; base < fours; base += stride) {
    Four<T> loaded[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; j++)
      if (base + j * 32 + lane < fours) loaded[j] = source[base + j * 32 + lane];
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      int four = base + j * 32 + lane;
      unsigned hits = 0;
      if (four < fours) {
#pragma unroll
        for (int i = 0; i < 4; i++) hits |= to_float(loaded[j].x[i]) >= threshold ? 1u << i : 0u;
      }
      append(hits, values, body + 4 * four, found, list, capacity);
    }
  }
}

// Each thread from the `skip`-th on prefetches a line of 128 bytes.
template <typename T>
__device__ void prefetch(const T* from, int count, int skip) {
  int at = (static_cast<int>(threadIdx.x) - skip) * static_cast<int>(128 / sizeof(T));
  if (at >= 0 && at < count) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
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
__global__ void __launch_bounds__(1024) topk_kernel(const Call call) {
  extern __shared__ Entry list[];
  __shared__ Shared shared;
  int blocks = 1, block = 0;
#if __CUDA_ARCH__ >= 900
  auto cluster = cooperative_groups::this_cluster();
  blocks = cluster.num_blocks();
  block = cluster.block_rank();
#endif
  int row = blockIdx.x / blocks;

  // Rows and page tables usually come from memory, each after a wait for its address. Prefetch both before that wait.
  prefetch(static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns,
           min(call.columns, call.capacity), 0);
  if (call.method == kPaged && !call.row_to_request && block == 0)
    prefetch(call.page_table + static_cast<int64_t>(row) * call.num_pages, call.num_pages, blockDim.x / 2);

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
  if (threadIdx.x == 0) shared.found = shared.written = shared.num_ties = 0;
  int count = n;
  if (fits) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) list[i] = entry_of(to_float(values[i]), i);
    __syncthreads();
  } else {
    __syncthreads();
    int* found = &shared.found;
    Entry* all = list;
    if (block == 0) {
      float threshold = sample_threshold(shared, list, values, n, call.topk);
      if (threadIdx.x == 0) shared.threshold = threshold;
      __syncthreads();  // the sample has been read
    }
    float threshold;
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      cluster.sync();
      found = cluster.map_shared_rank(found, 0);
      all = cluster.map_shared_rank(all, 0);
      threshold = *cluster.map_shared_rank(&shared.threshold, 0);
    } else
#endif
      threshold = shared.threshold;
    int begin = static_cast<int>(static_cast<int64_t>(n) * block / blocks);
    int end = static_cast<int>(static_cast<int64_t>(n) * (block + 1) / blocks);
    filter(values, begin, end, threshold, found, all, call.capacity);
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) cluster.sync();
#endif
    if (block > 0) return;
    __syncthreads();
    count = shared.found;
  }
  if (count >= call.topk && count <= call.capacity)
    write_chosen(call, shared, Entries<4, Entry>{list, count}, row, shift);
  else
    write_chosen(call, shared, Entries<4, T>{values, n}, row, shift);
}

// The order of two floats, the largest first, in 16 bits each: as halves, rounded to 0. The upper kBinBits name a bin.
__device__ __forceinline__ unsigned order_of(float low, float high) {
  unsigned halves, negative;  // all ones where negative
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(negative) : "r"(halves));
  return halves ^ (~negative & 0x7FFF7FFFu);
}

// Collects the entries of a short row in its k-th bin and those above: places in shared.bins, and ties.
template <typename T>
__device__ __forceinline__ void collect(Shared& shared, const unsigned (&orders)[kHeld], const T* values, int first) {
  constexpr unsigned kWidth = 1u << (32 - kBinBits);
  unsigned bound = shared.bin * kWidth;
  int mine = 0;
  for (int j = 0; j < kHeld; j++) mine += orders[j] < bound;
  int slot = reserve(&shared.written, mine);
  for (int j = 0; j < kHeld; j++) {
    int column = threadIdx.x + j * kShortThreads;
    if (orders[j] < bound)
      shared.bins[slot++] = column - first;
    else if (orders[j] - bound < kWidth)
      shared.ties[atomicAdd(&shared.num_ties, 1)] = entry_of(to_float(values[column]), column - first);
  }
}

// topk_kernel for rows that fit in registers, with topk at most kBins. The instructions for each logit are the limit.
template <typename T>
__global__ void __launch_bounds__(kShortThreads, 2) topk_short_kernel(const Call call) {
  __shared__ Shared shared;
  __shared__ int starts[kShortThreads];  // the first index of each of the first pages
  const float kLowest = -65504, kOutside = __int_as_float(0xFF800000);
  int row = blockIdx.x, thread = threadIdx.x;
  const T* values = static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns;
  float held[kHeld];
  for (int j = 0; j < kHeld; j++) {
    int column = thread + j * kShortThreads;
    held[j] = column < call.columns ? to_float(values[column]) : 0;
  }
  starts[thread] = page_start(call, row, thread);
  Window window = window_of(call, row);
  reinterpret_cast<uint2*>(shared.bins)[thread] = make_uint2(0, 0);
  if (thread == 0) shared.written = shared.num_ties = 0;
  __syncthreads();
  if (window.n <= call.topk) {
    write_all(call, window, row, thread, kShortThreads);
    return;
  }

  // Logits outside the window become -inf, in a bin below all others. NaN and numbers below all halves become the
  // lowest half.
  for (int j = 0; j < kHeld; j++) {
    bool inside = static_cast<unsigned>(thread + j * kShortThreads - window.first) < window.n;
    held[j] = inside ? fmaxf(held[j], kLowest) + 0.0f : kOutside;  // -0.0 + 0.0 is +0.0
  }
  unsigned orders[kHeld];  // in the upper 16 bits
  for (int j = 0; j < kHeld; j += 2) {
    orders[j + 1] = order_of(held[j], held[j + 1]);
    orders[j] = orders[j + 1] << 16;
  }
  for (int j = 0; j < kHeld; j++) atomicAdd(&shared.bins[orders[j] >> (32 - kBinBits)], 1u);
  __syncthreads();
  find_bin(shared, call.topk);
  if (shared.in_bin > kTies) {
    write_chosen(call, shared, Entries<1, T>{values + window.first, window.n}, row, window.shift);
    return;
  }
  int above = shared.above, ties = shared.in_bin;
  collect(shared, orders, values, window.first);
  __syncthreads();
  for (int i = thread; i < above; i += kShortThreads) {
    int position = shared.bins[i] + window.shift, at = page_of(call, position);
    int start = at < kShortThreads ? starts[at] : page_start(call, row, at);
    call.out[static_cast<int64_t>(row) * call.topk + i] = index_in(call, start, position, at);
  }
  write_ties(call, shared, above, ties, row, window.shift);
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

// An upper estimate of how many logits of a row of so many columns reach its threshold.
int expected_candidates(int columns, int topk) {
  double expected = static_cast<double>(topk) * kSample / columns;
  double rank = (expected + 4 * std::sqrt(expected) + 4) * 17 / 16;
  return static_cast<int>(std::min((rank + 3 * std::sqrt(rank)) * columns / kSample, 1e9));
}

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "topk: " << cudaGetErrorString(error);
}

template <typename T>
void launch(Call call, int rows, int device, cudaStream_t stream) {
  int sms = attribute(cudaDevAttrMultiProcessorCount, device);
  int most = (attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - static_cast<int>(sizeof(Shared)) - 1024) / 8;
  if (call.columns <= kHeld * kShortThreads && call.topk <= kBins) {
    topk_short_kernel<T><<<rows, kShortThreads, 0, stream>>>(call);
    check_cuda(cudaGetLastError());
    return;
  }
  // Many rows run in several blocks on each multiprocessor, so that one computes while another loads.
  bool few = rows <= sms;
  int capacity = !few ? 5632 : call.columns <= 16384 ? call.columns : 8192;
  capacity = std::max(capacity, expected_candidates(call.columns, call.topk));
  call.capacity = std::max(std::min({capacity, call.columns, most}), 1);
  int cluster = 1;
  if (call.columns > call.capacity && attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9)
    while (cluster < 8 && rows * cluster * 2 <= sms) cluster *= 2;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows * cluster);
  config.blockDim = dim3(rows * cluster <= sms ? 1024 : rows * cluster <= 2 * sms ? 512 : 256);
  config.dynamicSmemBytes = call.capacity * sizeof(Entry);
  config.stream = stream;
  cudaLaunchAttribute shape;
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = cluster;
  shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  config.attrs = &shape;
  config.numAttrs = cluster > 1 ? 1 : 0;
  check_cuda(cudaFuncSetAttribute(topk_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, config.dynamicSmemBytes));
  check_cuda(cudaLaunchKernelEx(&config, topk_kernel<T>, call));
}

const int* data(const ffi::Optional<ffi::TensorView>& x) {
  return x.has_value() ? static_cast<const int*>(x.value().data_ptr()) : nullptr;
}

// Writes `out`, int32 [rows, topk]; the other tensors are as in Call. The caller validates sizes and dtypes.
void Topk(ffi::TensorView logits, ffi::TensorView lengths, ffi::Optional<ffi::TensorView> row_starts,
          ffi::Optional<ffi::TensorView> page_table, ffi::Optional<ffi::TensorView> row_to_request,
          ffi::Optional<ffi::TensorView> offsets, int64_t page_size, ffi::TensorView out) {
  Call call = {};
  call.logits = logits.data_ptr();
  call.lengths = static_cast<const int*>(lengths.data_ptr());
  call.row_starts = data(row_starts);
  call.page_table = data(page_table);
  call.row_to_request = data(row_to_request);
  call.offsets = data(offsets);
  call.out = static_cast<int*>(out.data_ptr());
  call.columns = static_cast<int>(logits.size(1));
  call.topk = static_cast<int>(out.size(1));
  call.page_size = static_cast<int>(page_size);
  call.page_shift = page_size & (page_size - 1) ? -1 : static_cast<int>(std::log2(page_size));
  call.last_page = kIntMax / call.page_size;
  if (page_table.has_value()) {
    call.method = kPaged;
    call.num_requests = static_cast<int>(page_table.value().size(0));
    call.num_pages = static_cast<int>(page_table.value().size(1));
  } else {
    call.method = offsets.has_value() ? kRagged : kPositions;
    call.page_shift = 31;
  }
  int rows = static_cast<int>(logits.size(0)), device = logits.device().device_id;
  if (!rows) return;
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(logits.device().device_type, device));
  if (logits.dtype().code == kDLBfloat)
    launch<__nv_bfloat16>(call, rows, device, stream);
  else
    launch<float>(call, rows, device, stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk, Topk);
