// Top-k by the kernels of kernel.cuh and held.cuh, which launch.cuh launches; TVM FFI calls it.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cuda_bf16.h>

#include <climits>
#include <cmath>
#include <cstdint>

#include "call.cuh"

namespace ffi = tvm::ffi;

namespace topk_kernels {

// Launches the kernels for float32 or bfloat16 logits, each in a file of its own: nvcc compiles them side by side.
template <typename T>
cudaError_t launch(Call call, int rows, int device, cudaStream_t stream);

}  // namespace topk_kernels

namespace {

using namespace topk_kernels;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "topk: " << cudaGetErrorString(error);
}

const int* data(const ffi::Optional<ffi::TensorView>& x) {
  return x.has_value() ? static_cast<const int*>(x.value().data_ptr()) : nullptr;
}

// Writes `out`, int32 [rows, topk]; the other tensors are as in Call. The caller validates sizes and dtypes.
void Topk(ffi::TensorView logits, ffi::TensorView lengths, ffi::Optional<ffi::TensorView> row_starts,
          ffi::Optional<ffi::TensorView> page_table, ffi::Optional<ffi::TensorView> row_to_request,
          ffi::Optional<ffi::TensorView> offsets, int64_t page_size, ffi::TensorView out) {
  Call call = {};
  call.logits = logits.data_ptr();
  call.lengths = static_cast<const int*>(lengths.data_ptr());
  call.row_starts = data(row_starts);
  call.page_table = data(page_table);
  call.row_to_request = data(row_to_request);
  call.offsets = data(offsets);
  call.out = static_cast<int*>(out.data_ptr());
  call.columns = static_cast<int>(logits.size(1));
  call.topk = static_cast<int>(out.size(1));
  call.page_size = static_cast<int>(page_size);
  call.page_shift = page_size & (page_size - 1) ? -1 : static_cast<int>(std::log2(page_size));
  call.last_page = INT_MAX / call.page_size;
  if (page_table.has_value()) {
    call.method = kPaged;
    call.num_requests = static_cast<int>(page_table.value().size(0));
    call.num_pages = static_cast<int>(page_table.value().size(1));
  } else {
    call.method = offsets.has_value() ? kRagged : kPositions;
    call.page_shift = 31;
  }
  int rows = static_cast<int>(logits.size(0)), device = logits.device().device_id;
  if (!rows) return;
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(logits.device().device_type, device));
  bool bf16 = logits.dtype().code == kDLBfloat;
  check_cuda(bf16 ? launch<__nv_bfloat16>(call, rows, device, stream) : launch<float>(call, rows, device, stream));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk, Topk);
