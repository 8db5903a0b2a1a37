// What the kernels of the indexer's logits do with the rows of a call. A Call has `rows`, `capacity`, `lengths` and `out`.

#pragma once

#include <cstdint>

namespace index_logits {

// Says that a warp's lanes have the same value.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Fills in the sizes of a call over pages of so many bytes. `fill` is of the call, too.
template <typename Call>
inline void set_sizes(Call& call, int64_t rows, int64_t width, int64_t page_bytes, int token_bytes, int64_t num_pages,
                      bool fill) {
  call.rows = static_cast<int>(rows);
  call.width = static_cast<int>(width);
  call.page_bytes = page_bytes;
  call.page_size = static_cast<int>(page_bytes / token_bytes);
  call.capacity = call.width * call.page_size;
  call.num_pages = static_cast<int>(num_pages);
  call.fill = fill;
}

template <typename Call>
__device__ __forceinline__ int length_of(const Call& call, int row) {
  return row < call.rows ? min(max(call.lengths[row], 0), call.capacity) : 0;
}

// One warp writes -inf from the end of each row's last block on, in pieces of 2048 columns.
template <int kBlock, typename Call>
__device__ void fill(const Call& call) {
  constexpr int kPiece = 2048;
  int lane = threadIdx.x % 32, pieces = (call.capacity + kPiece - 1) / kPiece;
  int64_t count = int64_t{call.rows} * pieces;
  for (int64_t first = blockIdx.x; first < count; first += int64_t{gridDim.x} * 32) {
    int64_t mine = first + int64_t{lane} * gridDim.x;
    int row = static_cast<int>(mine / pieces), column = static_cast<int>(mine - int64_t{row} * pieces) * kPiece;
    int begin = mine < count ? max((length_of(call, row) + kBlock - 1) / kBlock * kBlock, column) : 0;
    int end = mine < count ? min(column + kPiece, call.capacity) : 0;
    for (int i = 0; i < 32; i++) {
      int from = __shfl_sync(~0u, begin, i), to = __shfl_sync(~0u, end, i);
      float* out = call.out + int64_t{__shfl_sync(~0u, row, i)} * call.capacity;
      for (int at = from + lane * 4; at < to; at += 128)
        *reinterpret_cast<float4*>(out + at) = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    }
  }
}

}  // namespace index_logits
