// The top-k kernels as a thread block of them would compute a row, for tests.

#include "cuda_bf16.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// What stands in device.cuh, on the host.
static std::vector<uint64_t> memory;
template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(memory.data());
}
inline void prefetch_line(const void*) {}
inline unsigned half_of(float x) {
  _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return std::fabs(static_cast<float>(half)) > std::fabs(x) ? bits - 1 : bits;  // rounded to 0
}
inline unsigned halves_of(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline unsigned negative_halves(unsigned halves) {
  return (halves & 0x8000 ? 0xFFFF : 0) | (halves & 0x80000000 ? 0xFFFF0000 : 0);
}
#define TOPK_DEVICE
#include "kernel.cuh"

template <typename T>
static void run_row(Call call) {
  if (call.capacity)
    topk_kernel<T>(call);
  else if (blockDim.x == kFewThreads)
    topk_short_kernel<T, kFewThreads>(call);
  else
    topk_short_kernel<T, kManyThreads>(call);
}

template <typename T>
static void run(Call call, int rows, int threads) {
  for (int row = 0; row < rows; row++) {
    blockIdx.x = row;
    blockDim.x = threads;
    memory.assign(shared_entries(call), 0xABABABABABABABAB);
    host::run(threads, [&] { run_row<T>(call); });
  }
}

// As topk.cu's launch, with these threads and this capacity; a capacity of 0 runs a kernel of short rows, the one with
// so many threads.
extern "C" void topk(const void* logits, int is_bfloat16, const int* lengths, const int* row_starts,
                     const int* page_table, const int* row_to_request, const int* offsets, int rows, int columns,
                     int topk, int page_size, int requests, int pages, int threads, int capacity, int* out) {
  Call call = {logits, lengths, row_starts, page_table, row_to_request, offsets, out};
  call.columns = columns, call.topk = topk, call.capacity = capacity;
  call.segments = columns > capacity && columns < 200000 ? (columns + 2) / kSegment + 1 : 0;  // as if more did not fit
  call.page_size = page_size, call.num_requests = requests, call.num_pages = pages;
  call.method = page_table ? kPaged : offsets ? kRagged : kPositions;
  call.page_shift = !page_table ? 31 : page_size & (page_size - 1) ? -1 : __builtin_ctz(page_size);
  call.last_page = kIntMax / page_size;
  is_bfloat16 ? run<__nv_bfloat16>(call, rows, threads) : run<float>(call, rows, threads);
}
