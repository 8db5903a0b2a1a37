// The gradient of sparse MLA prefill on SM90 as a TVM FFI function. The kernel is in kernel.cuh.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "kernel.cuh"

namespace ffi = tvm::ffi;

namespace {

using namespace sparse_backward;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "sparse_backward: " << cudaGetErrorString(error);
}

template <int kDim>
void launch(const Call& call, int64_t blocks, cudaStream_t stream) {
  auto kernel = sparse_backward_kernel<kDim>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kDim>));
  kernel<<<static_cast<unsigned>(blocks), kThreads, kSharedBytes<kDim>, stream>>>(call);
  check_cuda(cudaGetLastError());
}

template <typename T>
T* data_of(const ffi::TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// q is bfloat16 [rows, heads, dim], dim 512 or 576, kv [num_keys, dim], grad [rows, heads, 512]; indices int32 [rows,
// topk], lengths int32 [rows] or none; lse, factor and offset float32 [rows, heads]. All begin at multiples of 16
// bytes. It writes dq, as q, and dkv, float32 as kv, whose columns are in the order of `add_rows`. The caller validates
// sizes and dtypes.
void SparseBackward(ffi::TensorView q, ffi::TensorView kv, ffi::TensorView indices, ffi::Optional<ffi::TensorView> lengths,
                    ffi::TensorView grad, ffi::TensorView lse, ffi::TensorView factor, ffi::TensorView offset,
                    double scale, ffi::TensorView dq, ffi::TensorView dkv) {
  Call call = {};
  call.q = data_of<const __nv_bfloat16>(q), call.kv = data_of<const __nv_bfloat16>(kv);
  call.grad = data_of<const __nv_bfloat16>(grad), call.indices = data_of<const int>(indices);
  call.lengths = lengths.has_value() ? data_of<const int>(*lengths) : nullptr;
  call.lse = data_of<const float>(lse), call.factor = data_of<const float>(factor);
  call.offset = data_of<const float>(offset), call.dq = data_of<__nv_bfloat16>(dq), call.dkv = data_of<float>(dkv);
  call.scale = static_cast<float>(scale);
  call.heads = static_cast<int>(q.size(1)), call.topk = static_cast<int>(indices.size(1));
  call.num_keys = static_cast<int>(kv.size(0)), call.tiles = (call.heads + kHeads - 1) / kHeads;
  int64_t dim = q.size(2), blocks = q.size(0) * call.tiles;
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(q.device().device_type, q.device().device_id));
  if (kv.size(0) > 0) check_cuda(cudaMemsetAsync(call.dkv, 0, kv.size(0) * dim * sizeof(float), stream));
  if (blocks == 0) return;
  dim == 576 ? launch<576>(call, blocks, stream) : launch<512>(call, blocks, stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_backward, SparseBackward);
