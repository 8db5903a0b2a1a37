// Sparse MLA decode on SM90, behind TVM FFI: one binary that XLA and torch call. The kernel: sparse_decode_kernel.cuh.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cfloat>

#include "sparse_decode_kernel.cuh"

namespace ffi = tvm::ffi;

namespace {

using namespace sparse_decode;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "sparse_decode: " << cudaGetErrorString(error);
}

template <typename T>
T* data(const ffi::Optional<ffi::TensorView>& x) {
  return x.has_value() ? static_cast<T*>(x.value().data_ptr()) : nullptr;
}

Table table_of(const ffi::Optional<ffi::TensorView>& cache, const ffi::Optional<ffi::TensorView>& indices,
               const ffi::Optional<ffi::TensorView>& lengths, int64_t num_slots, int64_t page_size, int64_t page_bytes,
               int rows) {
  Table table = {};
  table.data = data<const uint8_t>(cache);
  table.indices = data<const int>(indices);
  table.lengths = data<const int>(lengths);
  table.page_bytes = page_bytes;
  table.num_slots = static_cast<int>(num_slots);
  table.topk = indices.has_value() ? static_cast<int>(indices.value().size(indices.value().ndim() - 1)) : 0;
  table.page_size = divisor_of(page_size);
  table.rows_per_length = divisor_of(lengths.has_value() ? rows / lengths.value().numel() : 1);
  return table;
}

void launch(const Call& call, bool is_v4, int bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(call.groups * call.tiles);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute together;  // thread blocks that join parts wait for each other
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  config.attrs = &together;
  config.numAttrs = call.cuts != kNever;
  auto kernel = by_lengths(call) ? (is_v4 ? sparse_decode_v4_by_lengths : sparse_decode_v32_by_lengths)
                                 : (is_v4 ? sparse_decode_v4 : sparse_decode_v32);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  check_cuda(cudaLaunchKernelEx(&config, kernel, call));
}

// q bfloat16 [rows..., heads, 512 or 576]; caches begin at multiples of 16 bytes, as do their pages; indices int32
// [rows..., topk]; lengths int32 [rows] or fewer, each of as many rows that follow each other; sink float32 [heads].
// Written: out bfloat16 [rows..., heads, 512], lse float32 [rows..., heads]. Scratch, where cuts is not 0 (kNever): as
// Call says, for groups · ⌈heads / 64⌉ thread blocks, no more than the device has multiprocessors.
// Sizes, dtypes and the plan (groups, cuts) are the caller's to check.
void SparseDecode(ffi::TensorView q, ffi::TensorView cache, ffi::TensorView indices,
                  ffi::Optional<ffi::TensorView> lengths, ffi::Optional<ffi::TensorView> extra_cache,
                  ffi::Optional<ffi::TensorView> extra_indices, ffi::Optional<ffi::TensorView> extra_lengths,
                  ffi::Optional<ffi::TensorView> sink, int64_t num_slots, int64_t page_size, int64_t page_bytes,
                  int64_t extra_num_slots, int64_t extra_page_size, int64_t extra_page_bytes, double softmax_scale,
                  double empty_lse, int64_t groups, int64_t cuts, ffi::TensorView out, ffi::TensorView lse,
                  ffi::Optional<ffi::TensorView> part_values, ffi::Optional<ffi::TensorView> part_sums,
                  ffi::Optional<ffi::TensorView> part_rows) {
  int ndim = q.ndim(), heads = static_cast<int>(q.size(ndim - 2));
  bool is_v4 = q.size(ndim - 1) == 512;
  Call call = {};
  call.q = static_cast<const __nv_bfloat16*>(q.data_ptr());
  call.sink = data<const float>(sink);
  call.out = static_cast<__nv_bfloat16*>(out.data_ptr());
  call.lse = static_cast<float*>(lse.data_ptr());
  call.part_values = data<float>(part_values);
  call.part_sums = data<float2>(part_sums);
  call.part_rows = data<int2>(part_rows);
  call.rows = static_cast<int>(lse.numel()) / heads;
  call.heads = heads;
  call.tiles = (heads + kHeads - 1) / kHeads;
  call.groups = static_cast<int>(groups);
  call.cuts = static_cast<int>(cuts);
  call.scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
  if (call.scale_log2 == 0) call.scale_log2 = FLT_MIN;  // as good as 0, but -inf times it is -inf
  call.empty_lse = static_cast<float>(empty_lse);
  call.tables[0] = table_of(cache, indices, lengths, num_slots, page_size, page_bytes, call.rows);
  call.tables[1] = table_of(extra_cache, extra_indices, extra_lengths, extra_num_slots, extra_page_size,
                            extra_page_bytes, call.rows);
  call.deal = deal_of(call.rows, call.groups, call.tiles, most_blocks(call));
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(q.device().device_type, q.device().device_id));
  launch(call, is_v4, is_v4 ? shared_bytes<kV4>() : shared_bytes<kV32>(), stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode, SparseDecode);
