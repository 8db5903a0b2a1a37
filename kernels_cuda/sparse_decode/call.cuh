// What a Call has before its launch, but for the addresses of its arguments.

#pragma once

#include <cfloat>

#include "schedule.cuh"

namespace sparse_decode {

// A table's shape as XLA and torch give it.
struct Shape {
  int64_t topk, stride, rows_per_length;  // stride in indices; rows_per_length 0: no lengths
  int64_t num_slots, page_size, page_bytes;
  int64_t row_stride, scales, scale_stride;  // as in Places
};

inline Table table_of(const Shape& shape) {
  Table table = {};
  table.page_bytes = shape.page_bytes;
  table.num_slots = static_cast<int>(shape.num_slots);
  table.topk = static_cast<int>(shape.topk);
  table.stride = shape.stride;
  table.page_size = divisor_of(shape.page_size);
  table.rows_per_length = divisor_of(shape.rows_per_length ? shape.rows_per_length : 1);
  return table;
}

inline Places places_of(const Shape& shape) {
  return {shape.scales, static_cast<int>(shape.row_stride), static_cast<int>(shape.scale_stride)};
}

// `tile` is the heads of a thread block. The launch of a cluster kernel sets `deal.parts` too.
inline Call call_of(int rows, int heads, const Shape& table, const Shape& extra, double softmax_scale,
                    double empty_lse, int tile, int groups, int cuts) {
  Call call = {};
  call.rows = rows;
  call.heads = heads;
  call.tiles = (heads + tile - 1) / tile;
  call.groups = groups;
  call.cuts = cuts;
  call.scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
  if (call.scale_log2 == 0) call.scale_log2 = FLT_MIN;  // nearly 0, but -inf times it is -inf, not NaN
  call.empty_lse = static_cast<float>(empty_lse);
  call.tables[0] = table_of(table);
  call.tables[1] = table_of(extra);
  call.places[0] = places_of(table);
  call.places[1] = places_of(extra);
  call.deal = deal_of(rows, groups, call.tiles, most_blocks(call));
  return call;
}

// The schedule counts the blocks of all rows, and more, in 32 bits.
inline int64_t units_of(const Call& call) {
  return int64_t{call.rows} * (most_blocks(call) + kRowCost) + call.groups;
}

// Scratch memory for the parts of split rows, one array behind the other.
inline void place_scratch(Call& call, void* scratch) {
  size_t blocks = static_cast<size_t>(call.groups) * call.tiles;
  call.part_values = static_cast<float*>(scratch);
  call.part_sums = reinterpret_cast<float2*>(call.part_values + blocks * 2 * kHeads * kValues);
  call.part_rows = reinterpret_cast<int2*>(call.part_sums + blocks * 2 * kHeads);
}

}  // namespace sparse_decode
