// The top-k of rows that shared memory holds as keys of 16 bits, by one thread block or by a cluster.
//
// A row is read once, and each logit leaves a key: the upper half of its float, as an unsigned integer in its order,
// with NaN as -inf. Of each group of 8, 4 or 1 logits the largest is counted in a bin. As many groups as topk reach the
// bin in which that count reaches topk, so as many logits do: these are the candidates, usually few more than topk, and
// a bit for each says where they lie. They are counted by their keys, which gives the key of the topk-th. Only logits
// with that key are read again, and are compared as entries, which puts equal ones in the order of their places. A scan
// over the bits then writes the positions in ascending order. If more logits share the key than the list holds, one
// thread block selects from the row itself.
//
// The blocks of a cluster hold a part of the row each, and the first one has the sums, the list and the bits of all.

#pragma once

#include "kernel.cuh"

namespace {

constexpr int kListed = 1024;     // logits with the key of the topk-th that are compared in shared memory
constexpr int kRanked = 256;      // one against another
constexpr int kMostHeld = 32768;  // logits that a thread block holds
constexpr int kAlone = 32768;     // of a row that one block holds rather than a cluster

// The dynamic shared memory is this, a bit for each logit of the row, and the block's keys.
struct alignas(16) Held {
  Shared shared;
  Entry list[kListed];
};

// A row in words of 32 places, the first of which begins where four logits could be loaded at once.
__host__ __device__ inline int words_of(int columns) { return (columns + 2) / 32 + 1; }

__host__ __device__ inline int padded(int words) { return (words + 31) / 32 * 32; }

__host__ __device__ inline int held_bytes(int columns, int blocks) {
  int words = words_of(columns);
  return static_cast<int>(sizeof(Held)) + padded(words) * 4 + padded((words - 1) / blocks + 1) * 64;
}

// A logit without NaN, which becomes -inf.
template <typename T>
__device__ __forceinline__ float clean(T value) {
  return fmaxf(to_float(value), __int_as_float(0xFF800000));
}

// The keys of two clean logits, that of `low` in the lower half. None is below 0x7F. Those of -0.0 and +0.0 differ, but
// lie far above every bound that is not above both: the candidates' upper bin has them.
__device__ __forceinline__ unsigned keys_of(float low, float high) {
  unsigned halves = upper_halves(low, high);
  return halves ^ (negative_halves(halves) | 0x80008000u);
}

__device__ __forceinline__ unsigned bin_of_key(unsigned key) { return bin_of(static_cast<Entry>(key) << 48); }

// The keys of places i and i + 16 of a word share 32 bits, and those of i to i + 3 and i + 16 to i + 19 are a piece of
// 16 bytes. Neither a warp that writes the four pieces of eight words nor one that reads a piece of 32 words meets a
// bank more often than it must.
__device__ __forceinline__ unsigned piece_at(unsigned word, unsigned piece) {
  return (word & ~31u) * 4 + piece * 32 + ((word + 2 * piece) & 31);
}

__device__ __forceinline__ uint16_t& key_at(uint4* keys, unsigned word, unsigned place) {
  unsigned at = piece_at(word, place >> 2 & 3) * 8 + (place & 3) * 2 + (place >> 4);
  return reinterpret_cast<uint16_t*>(keys)[at];
}

// Adds the bins of all blocks in the first block's, and finds the bin there in which their count reaches k.
__device__ void find_bin_of_all(Shared& shared, Shared& first, int k, int blocks, int block) {
  __syncthreads();
  if (blocks > 1) {
    if (block > 0)
      for (int i = threadIdx.x; i < kBins; i += blockDim.x)
        if (unsigned count = shared.bins[i]) {
          atomicAdd(&first.bins[i], count);
          shared.bins[i] = 0;
        }
    cluster_sync();
  }
  if (block == 0) find_bin(shared, k);
  if (blocks > 1) cluster_sync();
}

// Holds the keys of the words from `begin` to `end`, by loads of four logits, and counts the largest of each group, but
// for those at the row's edges if a group is more than one. A thread has the same piece of each of its words.
template <typename T>
__device__ void hold(Shared& shared, uint4* keys, const T* values, int n, int back, int begin, int end, int group) {
  constexpr int kUnroll = 4;
  int piece = threadIdx.x % 4, step = blockDim.x / 4, word = begin + threadIdx.x / 4;
  auto is_whole = [&](int place) { return place >= 0 && place + 20 <= n; };
  int stop = min(end, ((n + back - 20 - piece * 4) >> 5) + 1);
  if (!is_whole(word * 32 + piece * 4 - back)) word += step;  // the first of the row, or none follows
  const T* from = values + piece * 4 - back;
  for (; word < stop; word += kUnroll * step) {
    Four<T> low[kUnroll], high[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      int at = word + j * step;
      if (j && at >= stop) continue;
      low[j] = *reinterpret_cast<const Four<T>*>(from + at * 32);
      high[j] = *reinterpret_cast<const Four<T>*>(from + at * 32 + 16);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      int at = word + j * step;
      if (j && at >= stop) break;
      float x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = clean(low[j].x[i]), y[i] = clean(high[j].x[i]);
      keys[piece_at(at - begin, piece)] = {keys_of(x[0], y[0]), keys_of(x[1], y[1]), keys_of(x[2], y[2]),
                                           keys_of(x[3], y[3])};
      float of_low = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), of_high = fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
      unsigned largest = keys_of(group == 8 ? fmaxf(of_low, of_high) : of_low, of_high);
      if (group > 1) atomicAdd(&shared.bins[bin_of_key(largest & 0xFFFF)], 1u);
      if (group == 4) atomicAdd(&shared.bins[bin_of_key(largest >> 16)], 1u);
    }
  }
  // The pieces at the edges lie in the first and the last word. Places outside the row have the key 0.
  for (int i = threadIdx.x; i < 64; i += blockDim.x) {
    int edge = i < 32 ? 0 : (n - 1 + back) / 32, place = edge * 32 + i % 32 - back;
    if (edge < begin || edge >= end || is_whole(edge * 32 + i % 16 / 4 * 4 - back)) continue;
    key_at(keys, edge - begin, i % 32) = place >= 0 && place < n ? keys_of(clean(values[place]), 0) & 0xFFFF : 0;
  }
  if (group > 1) return;
  __syncthreads();
  for (int i = threadIdx.x; i < (end - begin) * 32; i += blockDim.x)
    if (unsigned key = key_at(keys, i / 32, i % 32)) atomicAdd(&shared.bins[bin_of_key(key)], 1u);
}

// Sets a bit for each key of at least `bound`, an even number, and counts these keys, the largest first.
__device__ void find_candidates(Shared& shared, uint4* keys, unsigned* bits, int words, unsigned bound) {
  unsigned complement = (0x8000 - bound / 2) * 0x10001;  // it carries half a key of at least bound / 2 to the top bit
  for (int word = threadIdx.x; word < words; word += blockDim.x) {
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      uint4 piece = keys[piece_at(word, i / 4)];
      auto reaches = [&](unsigned pair, int at) {
        return ((pair >> 1 & 0x7FFF7FFF) + complement) >> (15 - at) & 0x10001u << at;
      };
      found |= reaches(piece.x, i) | reaches(piece.y, i + 1) | reaches(piece.z, i + 2) | reaches(piece.w, i + 3);
    }
    bits[word] = found;
    for (; found; found &= found - 1) {
      unsigned above = key_at(keys, word, __ffs(found) - 1) - bound;
      atomicAdd(&shared.bins[kBins - 1 - min(above, kBins - 1u)], 1u);
    }
  }
}

// The places whose bits are set, in ascending order.
__device__ void write_places(Shared& shared, const unsigned* bits, int words, int back, int* places) {
  int step = (words - 1) / blockDim.x + 1, mine = 0;
  int begin = min(static_cast<int>(threadIdx.x) * step, words), end = min(begin + step, words);
#pragma unroll 1
  for (int word = begin; word < end; word++) mine += __popc(bits[word]);
  int through = scan(mine);
  if (threadIdx.x % 32 == 31) shared.sums[threadIdx.x / 32] = through;
  __syncthreads();
  int slot = sum_before(shared) + through - mine;
  for (int word = begin; word < end; word++)
    for (unsigned left = bits[word]; left; left &= left - 1) places[slot++] = word * 32 + __ffs(left) - 1 - back;
  __syncthreads();
}

// topk_kernel for rows that the blocks of a cluster, or one block, can hold as keys, with topk at most kBins.
template <typename T>
__global__ void __launch_bounds__(1024, 1) topk_held_kernel(const Call call) {
  Held& held = *dynamic_shared<Held>();
  Shared& shared = held.shared;
  unsigned* bits = reinterpret_cast<unsigned*>(&held + 1);
  uint4* keys = reinterpret_cast<uint4*>(bits + padded(words_of(call.columns)));
  int blocks = cluster_blocks(), block = cluster_rank(), row = blockIdx.x / blocks, topk = call.topk;
  const T* logits = static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns;
  if (blockDim.x == 1024) prefetch_row<T>(call, row, block, blocks);  // rows are few
  prefetch_pages(call, row, block);
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.found = shared.num_ties = 0;
  Window window = window_of(call, row);
  if (window.n <= topk) {
    write_all(call, window, row, block * blockDim.x + threadIdx.x, blocks * blockDim.x);
    return;
  }

  int n = window.n;
  const T* values = logits + window.first;
  int back = back_of(values), words = (n - 1 + back) / 32 + 1, share = (words - 1) / blocks + 1;
  int begin = min(block * share, words), end = min(begin + share, words);
  __syncthreads();
  if (blocks > 1) cluster_arrive();
  int group = n >= max(16 * topk, 256) ? 8 : n >= max(8 * topk, 256) ? 4 : 1;  // there are more groups than topk
  hold(shared, keys, values, n, back, begin, end, group);
  if (blocks > 1) cluster_wait();
  Held& first = blocks > 1 ? *of_first(&held) : held;
  find_bin_of_all(shared, first.shared, topk, blocks, block);
  unsigned bound = max(static_cast<unsigned>(least_in(first.shared.bin) >> 48), 2u);  // 0 is outside of the row
  find_candidates(shared, keys, bits, end - begin, bound);
  find_bin_of_all(shared, first.shared, topk, blocks, block);

  // The topk-th has a key from `lower` to `upper`: the upper bin, 0, has all keys from its own on.
  unsigned lower = bound + kBins - 1 - first.shared.bin, upper = first.shared.bin ? lower : 0xFFFF;
  int ties = first.shared.in_bin, wanted = topk - first.shared.above;
  if (ties <= kListed) {
    unsigned* all = reinterpret_cast<unsigned*>(&first + 1);
    for (int word = threadIdx.x; word < end - begin; word += blockDim.x) {
      unsigned chosen = bits[word];
      for (unsigned left = chosen; left; left &= left - 1) {
        int bit = __ffs(left) - 1, place = (begin + word) * 32 + bit - back;
        unsigned key = key_at(keys, word, bit);
        if (key > upper) continue;
        chosen &= ~(1u << bit);
        if (key >= lower) first.list[atomicAdd(&first.shared.found, 1)] = entry_of(to_float(values[place]), place);
      }
      all[begin + word] = chosen;
    }
  }
  if (blocks > 1) cluster_sync();
  if (block > 0) return;
  __syncthreads();

  int* places = reinterpret_cast<int*>(shared.bins);
  if (ties > kListed) {
    Entries<4, T> whole = {values, n};
    Cut cut = select(shared, whole, topk, kTies);
    choose_in_order(shared, whole, cut, topk, places);
  } else {
    auto choose = [&](Entry entry) {
      int at = place_of(entry) + back;
      atomicOr(&bits[at / 32], 1u << at % 32);
    };
    const Entry* ranked = held.list;
    if (ties > kRanked) {
      Cut cut = select(shared, Entries<4, Entry>{held.list, ties}, wanted, kTies);
      for (int i = threadIdx.x; i < ties; i += blockDim.x) {
        Entry entry = held.list[i];
        if (entry >= cut.upper)
          choose(entry);
        else if (entry >= cut.lower)
          shared.ties[atomicAdd(&shared.num_ties, 1)] = entry;
      }
      __syncthreads();
      ties = cut.within;
      wanted -= cut.above;
      ranked = shared.ties;
    }
    take_ties(ranked, ties, wanted, [&](int, int tie) { choose(ranked[tie]); });
    __syncthreads();
    write_places(shared, bits, words, back, places);
  }
  write_indices(call, places, row, window.shift);
}

}  // namespace
