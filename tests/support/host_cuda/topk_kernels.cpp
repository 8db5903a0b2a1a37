// The top-k kernels as a thread block of them would compute a row, for tests.

#include "cuda_bf16.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// What stands in device.cuh, on the host.
static std::vector<std::vector<uint64_t>> memories;  // of the blocks of a cluster
template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(memories[host::block->number].data());
}
inline int cluster_blocks() { return memories.size(); }
inline int cluster_rank() { return host::block->number; }
inline void cluster_arrive() { host::grid.arrive(); }
inline void cluster_wait() { host::grid.wait(); }
inline void cluster_sync() { host::meet_all_blocks(); }
template <typename T>
T* of_first(T* shared) {
  auto at = reinterpret_cast<char*>(shared) - reinterpret_cast<char*>(memories[host::block->number].data());
  return reinterpret_cast<T*>(reinterpret_cast<char*>(memories[0].data()) + at);
}
inline void prefetch_line(const void*) {}
inline unsigned half_of(float x) {
  _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return std::fabs(static_cast<float>(half)) > std::fabs(x) ? bits - 1 : bits;  // rounded to 0
}
inline unsigned halves_of(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline unsigned upper_halves(float low, float high) {
  return static_cast<unsigned>(__float_as_int(low)) >> 16 | (__float_as_int(high) & 0xFFFF0000);
}
inline unsigned negative_halves(unsigned halves) {
  return (halves & 0x8000 ? 0xFFFF : 0) | (halves & 0x80000000 ? 0xFFFF0000 : 0);
}
inline float larger(float a, float b) { return a != a ? b : b != b ? a : std::max(a, b); }
#define fmaxf larger  // which takes a signalling NaN for the number beside it, unlike the host's
#define TOPK_DEVICE
#include "held.cuh"

// What shared memory holds before a kernel writes it: as a number of a bin or a count it is out of range.
constexpr uint64_t kFill = ~uint64_t{0};

template <typename T>
static void run_row(Call call) {
  if (call.capacity < 0)
    topk_held_kernel<T>(call);
  else if (call.capacity)
    topk_kernel<T>(call);
  else if (blockDim.x == kFewThreads)
    topk_short_kernel<T, kFewThreads>(call);
  else
    topk_short_kernel<T, kManyThreads>(call);
}

template <typename T>
static void run(Call call, int rows, int threads) {
  int blocks = call.capacity < 0 ? -call.capacity : 1;
  int bytes = call.capacity < 0 ? held_bytes(call.columns, blocks) : shared_entries(call) * 8;
  for (int row = 0; row < rows; row++) {
    blockDim.x = threads;
    memories.assign(blocks, std::vector<uint64_t>((bytes + 7) / 8 + 64, kFill));
    host::run_together(
        blocks, threads, [&] { run_row<T>(call); }, [&](int block) { blockIdx.x = row * blocks + block; },
        call.capacity < 0 ? row : 0);
    for (const std::vector<uint64_t>& memory : memories)
      for (int i = 0; i < 64; i++)
        host::require(memory.end()[-1 - i] == kFill, "a store behind the shared memory");
  }
}

// As topk.cu's launch, with these threads and this capacity. 0 runs a kernel of short rows, the one with so many
// threads; -b runs the kernel that holds keys, by clusters of b blocks.
extern "C" void topk(const void* logits, int is_bfloat16, const int* lengths, const int* row_starts,
                     const int* page_table, const int* row_to_request, const int* offsets, int rows, int columns,
                     int topk, int page_size, int requests, int pages, int threads, int capacity, int* out) {
  Call call = {logits, lengths, row_starts, page_table, row_to_request, offsets, out};
  call.columns = columns, call.topk = topk, call.capacity = capacity;
  bool lists = capacity > 0 && columns > capacity && columns < 200000;  // as if more did not fit
  call.segments = lists ? (columns + 2) / kSegment + 1 : 0;
  call.page_size = page_size, call.num_requests = requests, call.num_pages = pages;
  call.method = page_table ? kPaged : offsets ? kRagged : kPositions;
  call.page_shift = !page_table ? 31 : page_size & (page_size - 1) ? -1 : __builtin_ctz(page_size);
  call.last_page = kIntMax / page_size;
  is_bfloat16 ? run<__nv_bfloat16>(call, rows, threads) : run<float>(call, rows, threads);
}
