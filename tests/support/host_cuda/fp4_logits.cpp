// The logits of FP4 index keys as the thread blocks of the kernel would compute them, for tests.

#include "sm90_host.h"

#include "fp4.cuh"

using namespace index_logits::fp4;

template <int kHeads>
static void run(const Call& call) {
  for (unsigned i = 0; i < gridDim.x; i++)
    sm90::run(1, kThreads<kHeads>, kSharedBytes<kHeads> + 1024, [&] { fp4_logits_kernel<kHeads>(call); },
              [i](int) { blockIdx.x = i; });
}

// As index_logits.cu's launch, of so many thread blocks.
extern "C" void fp4_logits(const uint16_t* q, const float* weights, const uint8_t* cache, const int* page_table,
                           const int* lengths, int rows, int heads, int width, int page_size, int num_pages, int fill,
                           int blocks, float* out) {
  Call call = {q, weights, cache, page_table, lengths, out};
  call.page_bytes = page_size * kTokenBytes;
  call.rows = rows, call.heads = heads, call.width = width, call.page_size = page_size;
  call.capacity = width * page_size, call.num_pages = num_pages, call.fill = fill;
  sm90::readable.clear();
  sm90::allow(cache, num_pages * call.page_bytes);
  gridDim.x = blocks;
  heads > 32 ? run<64>(call) : heads > 16 ? run<32>(call) : run<16>(call);
}
