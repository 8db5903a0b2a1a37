// Products of few rows with experts' weights as the thread blocks of the kernel would compute them, for tests.

#include "sm90_host.h"

#include "kernel.cuh"

using namespace expert_rows;

template <bool kFp4>
static void run_block(const Call& call, int wide, int warps) {
  if (wide == 4) return expert_rows_kernel<kFp4, 4, kManyWarps>(call);
  if (wide == 2) return expert_rows_kernel<kFp4, 2, kManyWarps>(call);
  warps == kFewWarps ? expert_rows_kernel<kFp4, 1, kFewWarps>(call) : expert_rows_kernel<kFp4, 1, kManyWarps>(call);
}

// As expert_rows.cu's launch, with these tiles of a thread block, warps that share one, columns, `wide` times 8, and warps.
extern "C" void expert_rows_on_host(const uint16_t* x, const uint8_t* values, const uint8_t* scales, const int* which,
                                    int rows, int experts, int n, int k, int fp4, int scale_shift, int float_scales,
                                    int kind, int float_out, int tiles, int split, int wide, int warps, unsigned seed, void* out) {
  Call call = {x, values, scales, which, out, rows, experts, n, k, scale_shift, tiles, split};
  call.kind = static_cast<Which>(kind), call.float_scales = float_scales, call.float_out = float_out;
  sm90::readable.clear();
  int64_t numbers = int64_t{experts} * n * k;
  sm90::allow(values, fp4 ? numbers / 2 : numbers);
  sm90::allow(scales, fp4 ? numbers / 32 : (numbers / kFp8Group >> scale_shift) * (float_scales ? 4 : 1));
  sm90::allow(which, int64_t{kind == kEach ? rows : experts} * 4);
  int all = (n + kTile - 1) / kTile;
  int most = kind == kOne ? 1 : kind == kEach ? rows : std::min(rows, experts);
  for (int y = 0; y < most; y++)
    for (int i = 0; i < (all + tiles - 1) / tiles; i++)
      sm90::run(1, warps * 32, shared_bytes(k, tiles, split, wide) + 1024,
                [&] { fp4 ? run_block<true>(call, wide, warps) : run_block<false>(call, wide, warps); },
                [i, y](int) { blockIdx.x = i, blockIdx.y = y; }, seed);
}
