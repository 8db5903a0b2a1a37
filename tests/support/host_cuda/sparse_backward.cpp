// The gradient of sparse MLA prefill as the thread blocks of its kernel would compute it, for tests.

#include "sm90_host.h"

#include "kernel.cuh"

using namespace sparse_backward;

template <int kDim>
static void run(const Call& call, int rows, unsigned seed) {
  for (int i = 0; i < rows * call.tiles; i++)
    sm90::run(1, kThreads, kSharedBytes<kDim> + 1024, [&] { sparse_backward_kernel<kDim>(call); },
              [i](int) { blockIdx.x = i; }, seed);
}

// As sparse_backward.cu's launch. `tensors` are q, kv, grad, indices, lengths, lse, factor, offset, dq and dkv, which is
// zeros; `bytes` is the size of each.
extern "C" void sparse_backward_on_host(int rows, int heads, int dim, int topk, int num_keys, double scale,
                                        void* const* tensors, const int64_t* bytes, unsigned seed) {
  Call call = {};
  call.q = static_cast<const __nv_bfloat16*>(tensors[0]), call.kv = static_cast<const __nv_bfloat16*>(tensors[1]);
  call.grad = static_cast<const __nv_bfloat16*>(tensors[2]), call.indices = static_cast<const int*>(tensors[3]);
  call.lengths = static_cast<const int*>(tensors[4]), call.lse = static_cast<const float*>(tensors[5]);
  call.factor = static_cast<const float*>(tensors[6]), call.offset = static_cast<const float*>(tensors[7]);
  call.dq = static_cast<__nv_bfloat16*>(tensors[8]), call.dkv = static_cast<float*>(tensors[9]);
  call.scale = static_cast<float>(scale), call.heads = heads, call.topk = topk, call.num_keys = num_keys;
  call.tiles = (heads + kHeads - 1) / kHeads;
  sm90::readable.clear();
  for (int i = 0; i < 8; i++) sm90::allow(tensors[i], bytes[i]);
  dim == 576 ? run<576>(call, rows, seed) : run<512>(call, rows, seed);
}
