// The places of the k largest entries in ascending order, by a thread block.

#pragma once

#include "select.cuh"

namespace {

constexpr int kGroup = 128;  // positions whose bits are counted together

// How many of a word's bits lie before this lane's.
__device__ __forceinline__ int bits_before(unsigned word, unsigned bit) { return __popc(word & ((1u << bit) - 1)); }

// The sum of what the warps before this one have left in shared.sums.
__device__ __forceinline__ int sum_before(const Shared& shared) {
  int lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < static_cast<int>(threadIdx.x / 32) ? shared.sums[lane] : 0);
}

// Calls take(rank, tie) for the `wanted` largest ties, each in one thread; the largest has rank 0.
template <typename Take>
__device__ __forceinline__ void take_ties(const Shared& shared, int ties, int wanted, Take take) {
  int lane = threadIdx.x % 32;
  for (int tie = threadIdx.x / 32; tie < ties; tie += blockDim.x / 32) {
    Entry entry = shared.ties[tie];
    int rank = 0;
    for (int other = lane; other - lane < ties; other += 32)
      rank += __popc(__ballot_sync(~0u, other < ties && shared.ties[other] > entry));
    if (lane == 0 && rank < wanted) take(rank, entry);
  }
}

// The places of the k largest entries in ascending order, from a source whose places ascend.
template <typename Source>
__device__ void choose_in_order(Shared& shared, const Source& source, const Cut& cut, int k, int* places) {
  int warps = blockDim.x / 32, part = ((source.n - 1) / (32 * warps) + 1) * 32, wanted = k - cut.above, mine = 0;
  source.visit_part(part, [&](const auto& group) {
    for (Entry entry : group) {
      mine += entry >= cut.upper;
      if (entry >= cut.lower && entry < cut.upper) shared.ties[atomicAdd(&shared.num_ties, 1)] = entry;
    }
  });
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = mine;
  __syncthreads();
  take_ties(shared, cut.within, wanted, [&](int rank, Entry tie) {
    atomicAdd(&shared.sums[place_of(tie) / part], 1);
    if (rank == wanted - 1) shared.least = tie;
  });
  __syncthreads();
  Entry least = shared.least;
  int slot = sum_before(shared);
  source.visit_part(part, [&](const auto& group) {
    for (Entry entry : group) {
      unsigned chosen = __ballot_sync(~0u, entry >= least);
      if (entry >= least) places[slot + bits_before(chosen, threadIdx.x % 32)] = place_of(entry);
      slot += __popc(chosen);
    }
  });
  __syncthreads();
}

// The ints of `room` that choose_and_sort needs for k of n places.
__host__ __device__ inline int ints_to_sort(int n, int k) { return ((n - 1) / kGroup + 1) * (kGroup / 32 + 1) + k; }

// The places of the k largest entries in ascending order, from a source in any order whose places are below n. `places`
// holds them meanwhile; `room` may be where the source is.
template <typename Source>
__device__ const int* choose_and_sort(Shared& shared, const Source& source, const Cut& cut, int n, int k, int* places,
                                      int* room) {
  source.visit_groups([&](const auto& group) {
    int mine = 0;
    for (Entry entry : group) mine += entry >= cut.upper;
    int slot = reserve(&shared.written, mine);
    for (Entry entry : group) {
      if (entry >= cut.upper)
        places[slot++] = place_of(entry);
      else if (entry >= cut.lower)
        shared.ties[atomicAdd(&shared.num_ties, 1)] = entry;
    }
  });
  __syncthreads();
  constexpr int kWords = kGroup / 32;
  int groups = (n - 1) / kGroup + 1;
  int *counts = room, *sorted = room + groups * (1 + kWords);
  unsigned* bits = reinterpret_cast<unsigned*>(room) + groups;
  for (int i = threadIdx.x; i < groups * (1 + kWords); i += blockDim.x) room[i] = 0;
  take_ties(shared, cut.within, k - cut.above, [&](int rank, Entry tie) { places[cut.above + rank] = place_of(tie); });
  __syncthreads();
  for (int i = threadIdx.x; i < k; i += blockDim.x) {
    unsigned place = places[i];
    atomicOr(&bits[place / 32], 1u << place % 32);
    atomicAdd(&counts[place / kGroup], 1);
  }
  __syncthreads();
  // Each count becomes that of the groups before. A thread has an odd number of groups, so that a warp reads all banks.
  int each = ((groups - 1) / blockDim.x + 1) | 1, begin = min(static_cast<int>(threadIdx.x) * each, groups);
  int end = min(begin + each, groups), mine = 0;
  for (int i = begin; i < end; i++) mine += counts[i];
  int through = scan(mine);
  if (threadIdx.x % 32 == 31) shared.sums[threadIdx.x / 32] = through;
  __syncthreads();
  int before = sum_before(shared) + through - mine;
  for (int i = begin; i < end; i++) {
    int count = counts[i];
    counts[i] = before;
    before += count;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < k; i += blockDim.x) {
    unsigned place = places[i], word = place / 32;
    int rank = counts[place / kGroup] + bits_before(bits[word], place % 32);
    for (unsigned other = place / kGroup * kWords; other < word; other++) rank += __popc(bits[other]);
    sorted[rank] = place;
  }
  __syncthreads();
  return sorted;
}

}  // namespace
