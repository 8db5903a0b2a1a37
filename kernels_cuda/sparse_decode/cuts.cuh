// Which rows were cut, and where their parts lie.

#pragma once

#include "schedule.cuh"

namespace sparse_decode {

// A row that is cut: the thread block that has its first part, and how many parts it has, in thread blocks that follow
// each other at a distance of `tiles`.
struct CutRow {
  int row, first, parts;
};

// Lists the rows that are cut each in equal parts, as `Part` says; some have one part.
__device__ __forceinline__ int list_equal_parts(const Call& call, CutRow* list) {
  int groups = call.deal.parts.divisor, count = call.deal.rest * call.tiles;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    int row = i / call.tiles, blocks = lengths_of(call, row).blocks(), each = Part(call, blocks, true, 0).last;
    list[i] = {row, row * groups * call.tiles + i % call.tiles, (blocks + each - 1) / each};
  }
  __syncthreads();
  return count;
}

// Lists the cut rows in shared memory, in the same order in all thread blocks; all threads.
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
