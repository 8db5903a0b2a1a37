// The exchange of context parallel decode in one launch on each device: a device stores the parts of other devices' heads
// straight into their memory, and merges what comes for its own.
//
// A thread block has chunks of items (a head of a row). Of each it
//   1. stores every other device's items and their lse into that device's slot of this block,
//   2. raises this block's flag there to its epoch,
//   3. waits until the others' flags of this block, in its own memory, have reached the epoch,
//   4. merges, its own part from where it lies.
// It waits only for the same block of other devices, which raises its flag before it waits for anything. So all blocks of
// a launch must be able to run at once (`most_blocks`): then every block that another waits for runs or will run.
//
// Epochs are counted for each block, in device memory, so a launch has no number and a graph may replay it. All devices
// run the same launches in the same order, so the counts of a block are the same on all of them, whatever the launches'
// sizes are. Two slots take turns, by the parity of the epoch. No slot is overwritten before it is read:
//   * Device A's block writes epoch e to device B's slot after it has passed step 3 of its epoch e - 1, so after it has
//     seen B's flag e - 1.
//   * B raised this flag in step 2 of its epoch e - 1, after step 4 of its epoch e - 2, in which it has read what lay in
//     the slot of e's parity. A barrier of the block stands between its reads and its flag, and the flag is released and
//     acquired, so the reads happen before A's writes.
// A flag says "at least": a device may be one epoch ahead of another, not two. Slots and flags of a block are its own, so
// blocks of one launch, and of launches of other sizes, do not touch each other's.
//
// Nothing here can tell one launch from another: two of a device at once, or other orders on two devices, would mix their
// parts. XLA runs a program's launches one by one, in the order of its schedule, which is the same on all devices.

#pragma once

#include <cstdint>

#ifndef PEER_SYSTEM
#include "system.cuh"
#endif

#ifndef PEER_THREADS
#define PEER_THREADS 256
#endif

namespace peer {

constexpr int kThreads = PEER_THREADS;
constexpr int kMostDevices = 8;
constexpr int kEach = 4;  // pieces of a thread in a chunk
constexpr int kPieces = kThreads * kEach;
constexpr int kLeastPieces = 8;  // of an item; a chunk's items are at most as many as threads

struct Call {
  const uint4* out;   // [rows, heads, pieces]: what this device has of all heads
  const float* lse;   // [rows, heads]
  const float* sink;  // [own], or null
  uint4* merged;      // [rows, own, pieces]
  float* merged_lse;  // [rows, own]
  int items;          // rows · own
  int heads, own;
  int piece_shift;  // an item has 2^piece_shift pieces of 16 bytes
  int chunks;
  int rank, size;
  int most_blocks;
  uint64_t patience;                // nanoseconds
  uint8_t* received[kMostDevices];  // of each device: [2, size, most_blocks] slots
  uint32_t* flags[kMostDevices];    // of each device: [size, most_blocks]
  uint32_t* epochs;                 // of this device: [most_blocks]
  int* trouble;                     // in the host's memory
};

// Bytes of a slot: a chunk's pieces, and as many lse as it has items at most.
constexpr int kSlotBytes = kPieces * 16 + kPieces / kLeastPieces * 4;
static_assert(kPieces / kLeastPieces <= kThreads && kSlotBytes % 16 == 0);

__device__ __forceinline__ uint8_t* slot(const Call& call, int device, uint32_t epoch, int source, int block) {
  int64_t number = (static_cast<int64_t>(epoch & 1) * call.size + source) * call.most_blocks + block;
  return call.received[device] + number * kSlotBytes;
}

// Whether the flag has reached the epoch; both count beyond 2^32.
__device__ __forceinline__ bool reached(uint32_t flag, uint32_t epoch) { return static_cast<int32_t>(flag - epoch) >= 0; }

__device__ __forceinline__ void wait(const Call& call, int source, int block, uint32_t epoch) {
  const uint32_t* flag = call.flags[call.rank] + source * call.most_blocks + block;
  for (int tries = 0; tries < 64; tries++)
    if (reached(acquire(flag), epoch)) return;
  for (uint64_t start = nanoseconds(); !reached(acquire(flag), epoch); pause())
    if (nanoseconds() - start > call.patience) give_up(call.trouble, call.rank, source, block, epoch);
}

template <typename T>
__device__ __forceinline__ void unpack(uint4 piece, float* values);
template <>
__device__ __forceinline__ void unpack<float>(uint4 piece, float* values) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; i++) values[i] = as_float(words[i]);
}
template <>
__device__ __forceinline__ void unpack<uint16_t>(uint4 piece, float* values) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    values[2 * i] = as_float(words[i] << 16);
    values[2 * i + 1] = as_float(words[i] & 0xFFFF0000u);
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float* values);
template <>
__device__ __forceinline__ uint4 pack<float>(const float* values) {
  return {as_bits(values[0]), as_bits(values[1]), as_bits(values[2]), as_bits(values[3])};
}
template <>
__device__ __forceinline__ uint4 pack<uint16_t>(const float* values) {
  return {rounded_pair(values[0], values[1]), rounded_pair(values[2], values[3]), rounded_pair(values[4], values[5]),
          rounded_pair(values[6], values[7])};
}

// Of parts' lse, -inf for one that is absent or not there, by the rules of merge_received_kernel.
struct Weights {
  bool empty;
  float shift, factor, lse;
};
template <int kParts>
__device__ __forceinline__ Weights weigh(const float (&lse)[kParts], const float* sink) {
  const float low = as_float(0xFF800000u);
  float top = low;
#pragma unroll
  for (int part = 0; part < kParts; part++)
    if (lse[part] > top || lse[part] != lse[part]) top = lse[part];
  Weights w;
  w.empty = top == low;
  w.shift = w.empty ? 0.0f : top;
  float total = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; part++) total += exponential(lse[part] - w.shift);
  total = w.empty ? 1.0f : total;
  w.factor = w.empty ? 0.0f : quotient(1.0f, total);
  w.lse = w.empty ? low : w.shift + logarithm(total);
  if (sink != nullptr) w.factor = w.empty ? 0.0f : quotient(w.factor, 1.0f + exponential(*sink - w.lse));
  return w;
}

// T: float, or uint16_t for bfloat16. kParts: as many parts as there are devices, or more.
template <typename T, int kParts>
__device__ __forceinline__ void exchange(const Call& call) {
  constexpr int kValues = 16 / sizeof(T);
  const int block = blockIdx.x, thread = threadIdx.x, shift = call.piece_shift;
  uint32_t epoch = call.epochs[block];
  for (int chunk = block; chunk < call.chunks; chunk += gridDim.x) {
    epoch++;
    const int first = chunk * (kPieces >> shift);
    int item[kEach], place[kEach];  // which item of this device, and that of rank 0 in its row
    uint4 own[kEach];
#pragma unroll
    for (int u = 0; u < kEach; u++) {
      item[u] = first + ((thread + u * kThreads) >> shift);
      place[u] = item[u] / call.own * call.heads + item[u] % call.own;
    }
    for (int step = 1; step < call.size; step++) {
      const int device = call.rank + step < call.size ? call.rank + step : call.rank + step - call.size;
      uint8_t* to = slot(call, device, epoch, call.rank, block);
      uint4 sent[kEach];
#pragma unroll
      for (int u = 0; u < kEach; u++) {
        const int piece = (thread + u * kThreads) & ((1 << shift) - 1);
        if (item[u] < call.items)
          sent[u] = load_once(call.out + ((static_cast<int64_t>(place[u]) + device * call.own) << shift) + piece);
      }
#pragma unroll
      for (int u = 0; u < kEach; u++)
        if (item[u] < call.items) reinterpret_cast<uint4*>(to)[thread + u * kThreads] = sent[u];
      if (thread < kPieces >> shift && first + thread < call.items) {
        const int mine = first + thread, from = mine / call.own * call.heads + mine % call.own + device * call.own;
        reinterpret_cast<float*>(to + kPieces * 16)[thread] = call.lse[from];
      }
    }
    __syncthreads();
    if (thread < call.size && thread != call.rank)
      release(call.flags[thread] + call.rank * call.most_blocks + block, epoch);
#pragma unroll
    for (int u = 0; u < kEach; u++) {  // meanwhile
      const int piece = (thread + u * kThreads) & ((1 << shift) - 1);
      if (item[u] < call.items)
        own[u] = load_once(call.out + ((static_cast<int64_t>(place[u]) + call.rank * call.own) << shift) + piece);
    }
    if (thread < call.size && thread != call.rank) wait(call, thread, block, epoch);
    __syncthreads();

#pragma unroll
    for (int u = 0; u < kEach; u++) {
      if (item[u] >= call.items) continue;
      uint4 pieces[kParts];
      float lse[kParts];
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        pieces[part] = own[u];
        lse[part] = as_float(0xFF800000u);
        if (part == call.rank) {
          lse[part] = call.lse[place[u] + call.rank * call.own];
        } else if (part < call.size) {
          const uint8_t* from = slot(call, call.rank, epoch, part, block);
          pieces[part] = load_received(reinterpret_cast<const uint4*>(from) + thread + u * kThreads);
          lse[part] = load_received(reinterpret_cast<const float*>(from + kPieces * 16) + (item[u] - first));
        }
      }
      const float* sink = call.sink == nullptr ? nullptr : call.sink + item[u] % call.own;
      const Weights w = weigh<kParts>(lse, sink);
      float sums[kValues] = {};
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        if (lse[part] != as_float(0xFF800000u)) {  // an absent part may hold anything
          const float weight = exponential(lse[part] - w.shift) * w.factor;
          float values[kValues];
          unpack<T>(pieces[part], values);
#pragma unroll
          for (int i = 0; i < kValues; i++) sums[i] += values[i] * weight;
        }
      }
      const int piece = (thread + u * kThreads) & ((1 << shift) - 1);
      call.merged[(static_cast<int64_t>(item[u]) << shift) + piece] = pack<T>(sums);
      if (piece == 0) call.merged_lse[item[u]] = w.lse;
    }
  }
  if (thread == 0) call.epochs[block] = epoch;
}

template <typename T, int kParts>
__global__ void __launch_bounds__(kThreads, 2) peer_exchange_kernel(const __grid_constant__ Call call) {
  exchange<T, kParts>(call);
}

}  // namespace peer
