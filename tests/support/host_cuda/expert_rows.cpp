// Products of few rows with experts' weights as the thread blocks of the kernel would compute them, for tests.

#include "sm90_host.h"

#include "kernel.cuh"
#include "plan.cuh"

using namespace expert_rows;

template <bool kFp4>
static void run_block(const Call& call, int wide, int warps) {
  if (wide == 4) return expert_rows_kernel<kFp4, 4, kManyWarps>(call);
  if (wide == 2) return expert_rows_kernel<kFp4, 2, kManyWarps>(call);
  warps == kFewWarps ? expert_rows_kernel<kFp4, 1, kFewWarps>(call) : expert_rows_kernel<kFp4, 1, kManyWarps>(call);
}

// `found`: split, tiles, columns, wide, warps, the grid's two sizes, and bytes of dynamic shared memory. Whether it fits.
extern "C" int expert_rows_plan(int kind, int rows, int experts, int n, int k, int fp4, int multiprocessors,
                                int shared_of_block, int shared_of_multiprocessor, int* found) {
  Device device = {multiprocessors, shared_of_block, shared_of_multiprocessor};
  Plan plan = plan_of(static_cast<Which>(kind), rows, experts, n, k, fp4, device);
  int bytes = plan.fits ? shared_bytes(k, plan.tiles, plan.split, plan.columns) : 0;
  int all[] = {plan.split, plan.tiles, plan.columns, plan.wide, plan.warps, plan.across, plan.down, bytes};
  std::copy(std::begin(all), std::end(all), found);
  return plan.fits;
}

// As expert_rows.cu's launch, with these tiles of a thread block, warps that share one, columns, 8 times `wide` at most, and
// warps.
extern "C" void expert_rows_on_host(const uint16_t* x, const uint8_t* values, const uint8_t* scales, const int* which,
                                    int rows, int experts, int n, int k, int repeat, int fp4, int scale_shift, int float_scales,
                                    int kind, int float_out, int tiles, int split, int wide, int warps,
                                    int columns, int gated, float limit, unsigned seed, void* out) {
  Call call = {x, values, scales, which, out, rows, experts, n, k, repeat, scale_shift, tiles, split, columns};
  call.kind = static_cast<Which>(kind), call.float_scales = float_scales, call.float_out = float_out;
  call.gated = gated, call.limit = limit > 0 ? limit : INFINITY;
  sm90::readable.clear();
  int64_t numbers = int64_t{experts} * n * k;
  sm90::allow(values, fp4 ? numbers / 2 : numbers);
  sm90::allow(scales, fp4 ? numbers / 32 : (numbers / kFp8Group >> scale_shift) * (float_scales ? 4 : 1));
  sm90::allow(which, int64_t{kind == kEach ? rows : experts} * 4);
  int all = (n + kTile - 1) / kTile;
  int most = kind == kOne ? 1 : kind == kEach ? rows : std::min(rows, experts);
  for (int y = 0; y < most; y++)
    for (int i = 0; i < (all + tiles - 1) / tiles; i++)
      sm90::run(1, warps * 32, shared_bytes(k, tiles, split, columns) + 1024,
                [&] { fp4 ? run_block<true>(call, wide, warps) : run_block<false>(call, wide, warps); },
                [i, y](int) { blockIdx.x = i, blockIdx.y = y; }, seed);
}
