// Products of sorted rows with experts' weights as the thread blocks of the kernel would compute them, for tests.

#include "sm90_host.h"

#include "kernel.cuh"

using namespace expert_tiles;

static CUtensorMap map_of(const Tiles<2>& tiles) {
  return {static_cast<const uint8_t*>(tiles.data), 3, {kLine, tiles.sizes[0], tiles.sizes[1]},
          {1, tiles.strides[0], tiles.strides[1]}, {kLine, tiles.tile[0], tiles.tile[1]}};
}

template <typename Shape>
static void run(Call& call, const uint16_t* x, const uint8_t* values, int blocks, unsigned seed) {
  set_maps<Shape>(call, x, values, map_of);
  gridDim.x = blocks;
  for (int i = 0; i < blocks; i++)
    sm90::run(1, Shape::kThreads, kSharedBytes<Shape>, [&] { expert_tiles_kernel<Shape>(call); },
              [i](int) { blockIdx.x = i; }, seed);
}

// As expert_tiles.cu's launch, of so many thread blocks.
extern "C" void expert_tiles_on_host(const uint16_t* x, const uint8_t* values, const uint8_t* scales, const int* sizes,
                                     int rows, int experts, int n, int k, int fp4, int scale_shift, int float_scales,
                                     int float_out, int blocks, unsigned seed, void* out) {
  Call call = {};
  call.scales = scales, call.sizes = sizes, call.out = out, call.rows = rows, call.experts = experts, call.n = n, call.k = k;
  call.scale_shift = scale_shift, call.float_scales = float_scales, call.float_out = float_out;
  sm90::readable.clear();
  int64_t numbers = int64_t{experts} * n * k;
  sm90::allow(x, int64_t{rows} * k * 2);
  sm90::allow(values, fp4 ? numbers / 2 : numbers);
  sm90::allow(scales, fp4 ? numbers / 32 : (numbers / kFp8Group >> scale_shift) * (float_scales ? 4 : 1));
  sm90::allow(sizes, int64_t{experts} * 4);
  (fp4 ? run<Shape<true>> : run<Shape<false>>)(call, x, values, blocks, seed);
}
