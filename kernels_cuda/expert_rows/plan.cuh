// How a product of few rows is divided among thread blocks and warps.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernel.cuh"

namespace expert_rows {

struct Device {
  int multiprocessors, shared_of_block, shared_of_multiprocessor;  // numbers of bytes
};

struct Plan {
  int split, tiles, columns, wide, warps;  // as Call has them; the kernel's template arguments
  int across, down;                        // the grid: groups of tiles, and experts or rows
  bool fits;
};

// Warps that share a tile. It decides in which order a row's products are summed, so it depends on the weight alone. An
// expert's weights are many tiles of few steps. Of one weight so many warps share a tile that all of them have work.
inline int split_of(int steps, int tiles, bool has_experts, int multiprocessors) {
  int split = 4;
  while (split > 1 && steps < 2 * split) split /= 2;
  int filling = multiprocessors * kManyWarps * 9 / 10;
  while (!has_experts && split < kManyWarps && steps >= 4 * split && tiles * split < filling) split *= 2;
  return split;
}

// x has `rows` rows, some of them for each of at most `groups` experts. The time of a block is counted in steps of a warp:
// what it takes to begin and end, its own steps, and copying x.
inline Plan plan_of(Which kind, int rows, int experts, int n, int k, bool fp4, const Device& device) {
  constexpr int kBegins = 2;
  constexpr int kNamedBytes = kMostNamed * static_cast<int>(sizeof(int)), kKept = 1024;  // of each block
  Plan plan = {};
  int steps = k / (fp4 ? kStep<true> : kStep<false>), all = (n + kTile - 1) / kTile;
  plan.split = split_of(steps, all, kind != kOne, device.multiprocessors);
  plan.down = kind == kOne ? 1 : kind == kEach ? rows : std::min(rows, experts);
  // Rows of an expert, on average; those that exceed the columns take the weights a second time.
  int named = kind == kOne ? rows : (rows + experts - 1) / experts;
  int room = device.shared_of_block - kNamedBytes;
  for (plan.wide = named > 16 ? 4 : named > kColumns ? 2 : 1;; plan.wide /= 2) {
    plan.columns = std::min(rows, plan.wide * kColumns);
    if (plan.wide == 1 || shared_bytes(k, kManyWarps / plan.split, plan.split, plan.columns) <= room) break;
  }
  int most = std::min(kMostTiles, kMostSteps / steps);
  double least = 0;
  for (int warps : {kFewWarps, kManyWarps}) {
    if (warps % plan.split || (warps == kFewWarps && plan.wide > 1)) continue;
    int at_a_time = warps / plan.split, most_blocks = warps == kFewWarps ? kFewBlocks : 1;
    for (int tiles = at_a_time; tiles <= std::max(most, at_a_time); tiles += at_a_time) {
      int bytes = shared_bytes(k, tiles, plan.split, plan.columns);
      int blocks = std::min(most_blocks, device.shared_of_multiprocessor / (bytes + kNamedBytes + kKept));
      if (bytes > room || blocks < (warps == kFewWarps ? 2 : 1)) break;
      int across = (all + tiles - 1) / tiles, slots = device.multiprocessors * blocks;
      int64_t waves = (int64_t{across} * plan.down + slots - 1) / slots;
      // The L2 has x, which takes half the time.
      double x = std::min(plan.columns, named + (kind != kOne)) * k * 2.0 / (warps * kStepBytes * kTile) / 2;
      double time = waves * blocks * (kBegins + tiles / at_a_time * ((steps + plan.split - 1) / plan.split) + x) * warps;
      if (named < kColumns / 2 && plan.fits && warps != plan.warps) break;  // two small blocks are sooner there
      if (plan.fits && time >= least) continue;
      least = time, plan.tiles = tiles, plan.warps = warps, plan.across = across, plan.fits = true;
    }
  }
  return plan;
}

}  // namespace expert_rows
