// The schedule of the decode kernel as its threads would compute it, for tests.

#include "cuts.cuh"

#include <cstring>
#include <vector>

using namespace sparse_decode;

// The rows that are cut, as a thread block that joins their parts lists them.
static std::vector<CutRow> cut_rows(const Call& call, bool equally) {
  std::vector<CutRow> list(gridDim.x, CutRow{-9, -9, -9});
  std::vector<int2> part_rows(gridDim.x, int2{-9, -9});
  int found = -9, count = 0;
  host::run(kThreads, [&] {
    int mine = equally ? list_equal_parts(call, list.data())
                       : list_cut_rows(call, part_rows.data(), list.data(), &found);
    count = std::max(count, mine);
  });
  list.resize(count);
  return list;
}

// Writes, for each group, its piece's blocks, whether parts are joined and whether they are equal, the rows of its
// parts, the number of runs, and the runs: row, first block, the block before which it ends, the part that it would be,
// and the row's blocks. Then the number of rows that are listed as cut, and those: row, first thread block, parts.
// Returns how many numbers these are; no more than `capacity` are written.
extern "C" int64_t decode_schedule(int rows, int groups, int tiles, int cuts, const int* topks,
                                   const int* first_lengths, const int* second_lengths, int rows_per_length,
                                   int64_t capacity, int* to) {
  Call call = {};
  call.rows = rows, call.groups = groups, call.cuts = cuts, call.tiles = tiles;
  gridDim.x = groups * tiles;
  std::vector<int2> part_rows(gridDim.x);
  call.part_rows = part_rows.data();
  const int* lengths[2] = {first_lengths, second_lengths};
  for (int i = 0; i < 2; i++) {
    call.tables[i].topk = topks[i];
    call.tables[i].lengths = lengths[i];
    call.tables[i].rows_per_length = divisor_of(rows_per_length);
  }
  call.deal = deal_of(rows, groups, call.tiles, most_blocks(call));
  int64_t written = 0;
  auto write = [&](int x) {
    if (written < capacity) to[written] = x;
    written++;
  };
  bool joins = false, equally = false;
  for (int group = 0; group < groups; group++) {
    Planning planning;
    Plan plan;
    memset(&planning, 0xAB, sizeof planning);
    memset(&plan, 0xAB, sizeof plan);
    host::run(kThreads, [&] {
      if (first_lengths || second_lengths)
        plan_piece<true>(call, planning, plan, group);
      else
        plan_piece<false>(call, planning, plan, group);
    });
    memset(&planning, 0xCD, sizeof planning);
    const Piece& piece = plan.piece;
    joins = piece.joins, equally = piece.equally;
    int2 parts = parts_of(piece);
    for (int tile = 0; tile < tiles; tile++) part_rows[group * tiles + tile] = parts;
    for (int x : {piece.blocks, int{joins}, int{equally}, parts.x, parts.y}) write(x);
    int64_t count = written;
    write(0);
    int runs = 0;
    if (piece.blocks > 0)
      for (Rows left(call, piece); left.any(); left.advance(call), runs++)
        for (int x : {left.at.row, left.at.block, left.last(), left.part(), left.lengths.blocks()}) write(x);
    if (count < capacity) to[count] = runs;
  }
  std::vector<CutRow> list = joins ? cut_rows(call, equally) : std::vector<CutRow>();
  write(list.size());
  for (const CutRow& cut : list)
    for (int x : {cut.row, cut.first, cut.parts}) write(x);
  return written;
}
