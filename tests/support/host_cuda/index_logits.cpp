// The indexer's logits as the thread blocks of the kernels would compute them, for tests: of FP8 keys and of FP4 keys.

#include "sm90_host.h"

#include "fp4.cuh"
#include "kernel.cuh"

using namespace index_logits;

template <typename Call>
static void fill_in(Call& call, const float* weights, const uint8_t* cache, const int* page_table, const int* lengths,
                    int rows, int width, int page_size, int num_pages, int token_bytes, int fill, float* out) {
  set_sizes(call, rows, width, page_size * token_bytes, token_bytes, num_pages, fill);
  call.weights = weights, call.cache = cache, call.page_table = page_table, call.lengths = lengths, call.out = out;
  sm90::readable.clear();
  sm90::allow(cache, num_pages * call.page_bytes);
}

template <int kAxes>
static CUtensorMap map_of(const Tiles<kAxes>& tiles) {
  CUtensorMap map = {static_cast<const uint8_t*>(tiles.data), kAxes + 1, {kDim}, {1}, {kDim}};
  for (int i = 0; i < kAxes; i++)
    map.sizes[i + 1] = tiles.sizes[i], map.strides[i + 1] = tiles.strides[i], map.box[i + 1] = tiles.tile[i];
  return map;
}

// As index_logits.cu's launches, of so many thread blocks. Here the queries are e4m3, of 64 heads.
extern "C" void index_logits_on_host(const uint8_t* q, const float* weights, const uint8_t* cache,
                                     const int* page_table, const int* lengths, int rows, int width, int page_size,
                                     int num_pages, int fill, int blocks, unsigned seed, float* out) {
  Call call = {};
  fill_in(call, weights, cache, page_table, lengths, rows, width, page_size, num_pages, kTokenBytes, fill, out);
  sm90::allow(q, int64_t{rows} * kHeads * kDim);
  sm90::allow(weights, int64_t{rows} * kHeads * 4);
  call.queries = map_of(tiles_of_queries(q, rows));
  call.keys = map_of(tiles_of_keys(call));
  call.group = group_of(rows);
  gridDim.x = blocks;
  for (int i = 0; i < blocks; i++)
    sm90::run(1, kThreads, kSharedBytes, [&] { index_logits_kernel(call); }, [i](int) { blockIdx.x = i; }, seed);
}

template <int kHeads>
static void run_fp4(const fp4::Call& call, unsigned seed) {
  for (unsigned i = 0; i < gridDim.x; i++)
    sm90::run(1, fp4::kThreads, fp4::kSharedBytes<kHeads>, [&] { fp4::fp4_logits_kernel<kHeads>(call); },
              [i](int) { blockIdx.x = i; }, seed);
}

extern "C" void fp4_logits_on_host(const uint16_t* q, const float* weights, const uint8_t* cache,
                                   const int* page_table, const int* lengths, int rows, int heads, int width,
                                   int page_size, int num_pages, int fill, int blocks, unsigned seed, float* out) {
  fp4::Call call = {};
  fill_in(call, weights, cache, page_table, lengths, rows, width, page_size, num_pages, fp4::kTokenBytes, fill, out);
  call.q = q, call.heads = heads;
  gridDim.x = blocks;
  heads > 32 ? run_fp4<64>(call, seed) : heads > 16 ? run_fp4<32>(call, seed) : run_fp4<16>(call, seed);
}
