// The places of the k largest entries in ascending order, by a thread block.

#pragma once

#include "select.cuh"

namespace {

constexpr int kSegment = 512;  // places whose candidates stand side by side

// How many of a word's bits lie before this lane's.
__device__ __forceinline__ int bits_before(unsigned word, unsigned bit) { return __popc(word & ((1u << bit) - 1)); }

// The sum of what the warps before this one have left in shared.sums.
__device__ __forceinline__ int sum_before(const Shared& shared) {
  int lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < static_cast<int>(threadIdx.x / 32) ? shared.sums[lane] : 0);
}

// Calls take(rank, i) for the `wanted` largest of list[i], each in one thread; the largest has rank 0.
template <typename Take>
__device__ __forceinline__ void take_ties(const Entry* list, int ties, int wanted, Take take) {
  int lane = threadIdx.x % 32;
  for (int tie = threadIdx.x / 32; tie < ties; tie += blockDim.x / 32) {
    Entry entry = list[tie];
    int rank = 0;
    for (int other = lane; other - lane < ties; other += 32)
      rank += __popc(__ballot_sync(~0u, other < ties && list[other] > entry));
    if (lane == 0 && rank < wanted) take(rank, tie);
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
  take_ties(shared.ties, cut.within, wanted, [&](int rank, int tie) {
    atomicAdd(&shared.sums[place_of(shared.ties[tie]) / part], 1);
    if (rank == wanted - 1) shared.least = shared.ties[tie];
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

// Of a list in parts of a row: where the candidates of one begin in the list and how many these are. Each part's
// candidates stand side by side, in the order of their places.
struct Segment {
  int first, count;
};

// 32 entries of a list: those that are chosen, and how many are chosen before them.
struct Word {
  unsigned chosen;
  int before;
};

// The places of the k largest entries of a list in ascending order, where an entry of place p lies in the segment
// (p + back) / kSegment.
__device__ void choose_in_segments(Shared& shared, const Entry* list, int n, const Cut& cut, int k, int back,
                                   Segment* segments, int num_segments, Word* words, int* places) {
  int lane = threadIdx.x % 32, num_words = (n - 1) / 32 + 1;
#pragma unroll 4
  for (int i = threadIdx.x; i - lane < n; i += blockDim.x) {
    Entry entry = i < n ? list[i] : 0;
    unsigned chosen = __ballot_sync(~0u, entry >= cut.upper);
    if (lane == 0) words[i / 32].chosen = chosen;
    if (entry >= cut.lower && entry < cut.upper) {
      int tie = atomicAdd(&shared.num_ties, 1);
      shared.ties[tie] = entry;
      shared.tie_at[tie] = i;
    }
  }
  __syncthreads();
  take_ties(shared.ties, cut.within, k - cut.above, [&](int, int tie) {
    int at = shared.tie_at[tie];
    atomicOr(&words[at / 32].chosen, 1u << at % 32);
  });
  __syncthreads();
  // All warps find the same sums, which saves a barrier. Steps are odd, so that a warp reads all banks.
  int step = ((num_words - 1) / 32 + 1) | 1, begin = min(lane * step, num_words), end = min(begin + step, num_words);
  int mine = 0;
  for (int i = begin; i < end; i++) mine += __popc(words[i].chosen);
  int before = scan(mine) - mine;
  for (int i = begin; i < end; i++) {
    words[i].before = before;
    before += __popc(words[i].chosen);
  }
  __syncwarp();
  auto chosen_before = [&](int i) {
    Word word = words[i / 32];
    return word.before + bits_before(word.chosen, i % 32);
  };
  // What is to be added to a chosen entry's rank in the list.
  step = ((num_segments - 1) / blockDim.x + 1) | 1;
  begin = min(static_cast<int>(threadIdx.x) * step, num_segments), end = min(begin + step, num_segments), mine = 0;
  for (int i = begin; i < end; i++) {
    Segment segment = segments[i];
    if (!segment.count) continue;
    int first = chosen_before(segment.first), last = segment.first + segment.count - 1;
    int count = chosen_before(last) + (words[last / 32].chosen >> last % 32 & 1) - first;
    segments[i] = {mine - first, count};
    mine += count;
  }
  int through = scan(mine);
  if (lane == 31) shared.sums[threadIdx.x / 32] = through;
  __syncthreads();
  before = sum_before(shared) + through - mine;
  for (int i = begin; i < end; i++) segments[i].first += before;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    Word word = words[i / 32];
    int place = place_of(list[i]);
    if (word.chosen >> lane & 1)
      places[segments[(place + back) / kSegment].first + word.before + bits_before(word.chosen, lane)] = place;
  }
  __syncthreads();
}

}  // namespace
