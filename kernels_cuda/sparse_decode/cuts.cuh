// Which rows were split, and where their parts lie.

#pragma once

#include "schedule.cuh"

namespace sparse_decode {

// A split row: the thread block that has its first part, and the number of its parts. The thread blocks of its parts
// are `tiles` apart.
struct CutRow {
  int row, first, parts;
};

// Lists the rows that are each split into equal parts, as `Part` says; some have one part.
__device__ __forceinline__ int list_equal_parts(const Call& call, CutRow* list) {
  int groups = call.deal.parts.divisor, count = call.deal.rest * call.tiles;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    int row = i / call.tiles, blocks = lengths_of(call, row).blocks(), each = Part(call, blocks, true, 0).last;
    list[i] = {row, row * groups * call.tiles + i % call.tiles, (blocks + each - 1) / each};
  }
  __syncthreads();
  return count;
}

// Lists the split rows in shared memory, in the same order in all thread blocks. All threads call it.
__device__ __forceinline__ int list_cut_rows(const Call& call, int2* part_rows, CutRow* list, int* count) {
  int blocks = gridDim.x, thread = threadIdx.x;
  for (int i = thread; i < blocks; i += kThreads) part_rows[i] = __ldcg(&call.part_rows[i]);
  __syncthreads();
  if (thread < 32) {
    int found = 0;
    for (int begin = 0; begin < blocks; begin += 32) {
      int i = begin + thread;
      int row = i < blocks ? part_rows[i].y : -1;
      unsigned all = __ballot_sync(~0u, row >= 0);
      if (row >= 0) {
        int next = i + call.tiles;
        while (next < blocks && part_rows[next].x == row) next += call.tiles;
        list[found + __popc(all & ((1u << thread) - 1))] = {row, i, (next - i) / call.tiles};
      }
      found += __popc(all);
    }
    if (thread == 0) *count = found;
  }
  __syncthreads();
  return *count;
}

}  // namespace sparse_decode
