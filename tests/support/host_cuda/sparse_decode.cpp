// Sparse decode as the thread blocks of its kernels would compute it, for tests.

#include "sm90_host.h"

#undef __shared__
#define __shared__
#include "call.cuh"
#include "kernel.cuh"

using namespace sparse_decode;

uint8_t sparse_decode::dynamic_shared[1];  // of the entry points, which tests do not call

template <Format kFormat, bool kByLengths>
static void run_many(const Call& call, unsigned seed) {
  using Memory = Shared<kFormat>;
  blockIdx = {}, gridDim.x = call.groups * call.tiles;
  auto program = [&] { attend<kFormat, kByLengths>(call, *reinterpret_cast<Memory*>(sm90::tiles_memory())); };
  sm90::run(gridDim.x, kThreads, sizeof(Memory) + 1024, program, [](int block) { blockIdx.x = block; }, seed);
}

template <typename Memory>
static void run_clusters(const Call& call, unsigned seed, void (*attend)(const Call&, Memory&)) {
  auto program = [&] { attend(call, *reinterpret_cast<Memory*>(sm90::tiles_memory())); };
  for (int row = 0; row < call.rows; row++)
    for (int tile = 0; tile < call.tiles; tile++)
      sm90::run(call.groups, kThreads, sizeof(Memory) + 1024, program, [=](int block) {
        blockIdx.x = block, blockIdx.y = tile, blockIdx.z = row;
      }, seed, true);
}

template <Format kFormat, int kN>
static void run_few(const Call& call, unsigned seed) {
  using Memory = ClusterShared<kFormat, kN>;
  run_clusters<Memory>(call, seed, [](const Call& call, Memory& shared) {
    PartOfRow<kFormat, kN>(call, shared).attend();
  });
}

template <Format kFormat>
static void run_window(const Call& call, unsigned seed) {
  if constexpr (kHasWindow<kFormat>) {
    using Memory = WindowShared<kFormat>;
    auto program = [&] { WindowRow<kFormat>(call, *reinterpret_cast<Memory*>(sm90::tiles_memory())).attend(); };
    for (int row = 0; row < call.rows; row++)
      for (int tile = 0; tile < call.tiles; tile++)
        sm90::run(1, kThreads, sizeof(Memory) + 1024, program, [=](int) { blockIdx.x = tile, blockIdx.y = row; }, seed);
  } else {
    host::require(false, "a format without the window kernel");
  }
}

template <Format kFormat>
static void run(const Call& call, int tile, unsigned seed) {
  bool by_lengths = call.tables[0].lengths || call.tables[1].lengths;
  if (call.cuts == kInWindow) return run_window<kFormat>(call, seed);
  if (call.cuts == kInClusters) return run_clusters<WideShared<kFormat>>(call, seed, attend_wide<kFormat>);
  if (tile == 16) return run_few<kFormat, 16>(call, seed);
  if (tile == 32) return run_few<kFormat, 32>(call, seed);
  by_lengths ? run_many<kFormat, true>(call, seed) : run_many<kFormat, false>(call, seed);
}

// As sparse_decode.cu's launch. `tensors` are q, then cache, indices and lengths of each table, sink, out, lse and
// scratch; `bytes` is the size of each. `shapes` are those of both tables.
extern "C" void sparse_decode_on_host(int rows, int heads, int format, const Shape* shapes,
                                      double softmax_scale, double empty_lse, int tile, int groups, int cuts, void* const* tensors,
                                      const int64_t* bytes, unsigned seed) {
  Call call = call_of(rows, heads, shapes[0], shapes[1], softmax_scale, empty_lse, tile, groups, cuts);
  if (tile != kHeads || cuts == kInClusters) call.deal.parts = divisor_of(groups);
  call.q = static_cast<const __nv_bfloat16*>(tensors[0]);
  for (int i = 0; i < 2; i++) {
    call.tables[i].data = static_cast<const uint8_t*>(tensors[1 + 3 * i]);
    call.tables[i].indices = static_cast<const int*>(tensors[2 + 3 * i]);
    call.tables[i].lengths = static_cast<const int*>(tensors[3 + 3 * i]);
  }
  call.sink = static_cast<const float*>(tensors[7]);
  call.out = static_cast<__nv_bfloat16*>(tensors[8]);
  call.lse = static_cast<float*>(tensors[9]);
  place_scratch(call, tensors[10]);
  sm90::readable.clear();
  sm90::allow(zero_row, sizeof zero_row);
  for (int i = 0; i < 7; i++) sm90::allow(tensors[i], bytes[i]);
  void (*of_formats[])(const Call&, int, unsigned) = {run<kV4>,     run<kV32>,    run<kV41>,
                                                       run<kV41Fp4>, run<kV4Bf16>, run<kV32Bf16>};
  of_formats[format](call, tile, seed);
}
