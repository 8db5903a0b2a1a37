// The k largest entries of a list or a row, but for a few that are left to rank: a radix select by a thread block.

#pragma once

#include <cstdint>

#include "device.cuh"

namespace {

using Entry = unsigned long long;

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kTies = 64;                 // entries that are ranked one against another
constexpr Entry kLeast = Entry{1} << 32;  // no entry is below
constexpr int kIntMax = 2147483647, kNowhere = -kIntMax - 1;

struct Shared {
  unsigned bins[kBins];
  Entry ties[kTies];
  int tie_at[kTies];       // where a tie lies in the list
  Entry least;             // the topk-th largest entry
  int sums[32];            // of a warp or of one of 32 parts
  int bin, above, in_bin;  // the bin that holds the k-th entry, how many lie above it and in it
  int found, num_ties;
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
    walk(threadIdx.x, n, blockDim.x, visit);
  }
  // Each warp those of its own part, in the order of their places.
  template <typename Visit>
  __device__ __forceinline__ void visit_part(int part, Visit visit) const {
    int begin = threadIdx.x / 32 * part;
    walk(begin + threadIdx.x % 32, min(begin + part, n), 32, visit);
  }
  template <typename Visit>
  __device__ __forceinline__ void walk(int begin, int end, int stride, Visit visit) const {
    int lane = threadIdx.x % 32;
    for (; begin - lane < end; begin += kEach * stride) {
      Entry group[kEach];
      for (int j = 0, i = begin; j < kEach; j++, i += stride) group[j] = i < end ? read_entry(from, i) : 0;
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
template <typename T>
__device__ __forceinline__ T scan(T mine) {
  for (int step = 1; step < 32; step *= 2) {
    T other = __shfl_up_sync(~0u, mine, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) mine += other;
  }
  return mine;
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

}  // namespace
