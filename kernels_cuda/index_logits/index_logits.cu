// The indexer's logits on SM90 as TVM FFI functions: one binary for XLA and torch. The kernels are in kernel.cuh and fp4.cuh.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "fp4.cuh"
#include "kernel.cuh"

namespace ffi = tvm::ffi;

namespace {

using namespace index_logits;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "index_logits: " << cudaGetErrorString(error);
}

template <int kAxes>
CUtensorMap map_of(const Tiles<kAxes>& tiles) {
  std::string why;
  CUtensorMap map = tensor_map::of(tiles, why);
  if (!why.empty()) TVM_FFI_THROW(RuntimeError) << "index_logits: " << why;
  return map;
}

// The sizes and addresses of a call's tensors, but for its queries.
template <typename Call>
void fill_in(Call& call, ffi::TensorView q, ffi::TensorView weights, ffi::TensorView cache, ffi::TensorView page_table,
             ffi::TensorView lengths, int token_bytes, int64_t num_pages, int64_t first_page, bool fill,
             ffi::TensorView out) {
  set_sizes(call, q.size(0), page_table.size(1), cache.size(1), token_bytes, num_pages, fill);
  call.weights = static_cast<const float*>(weights.data_ptr());
  call.cache = static_cast<const uint8_t*>(cache.data_ptr()) + first_page * call.page_bytes;
  call.page_table = static_cast<const int*>(page_table.data_ptr());
  call.lengths = static_cast<const int*>(lengths.data_ptr());
  call.out = static_cast<float*>(out.data_ptr());
}

// q is e4m3 [rows, 64, 128], weights float32 [rows, 64], cache uint8 [pages, page_size * 132] with page_size a multiple
// of 64, of which the keys are the num_pages pages from first_page on; page_table int32 [rows, width], lengths int32
// [rows]. All begin at multiples of 16 bytes. It writes out, float32 [rows, width * page_size]; without `fill` only the
// columns of the blocks of 256 that a row's length reaches into. The caller validates sizes and dtypes.
void IndexLogits(ffi::TensorView q, ffi::TensorView weights, ffi::TensorView cache, ffi::TensorView page_table,
                 ffi::TensorView lengths, int64_t num_pages, int64_t first_page, bool fill,
                 ffi::TensorView out) {
  Call call = {};
  fill_in(call, q, weights, cache, page_table, lengths, kTokenBytes, num_pages, first_page, fill, out);
  call.queries = map_of(tiles_of_queries(q.data_ptr(), call.rows));
  call.keys = map_of(tiles_of_keys(call));
  call.group = group_of(call.rows);
  int device = q.device().device_id, sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  int64_t items = int64_t{units_of(call.rows)} * ((call.capacity + kBlock - 1) / kBlock);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(q.device().device_type, device));
  check_cuda(cudaFuncSetAttribute(index_logits_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  index_logits_kernel<<<static_cast<int>(std::min<int64_t>(items, sms)), kThreads, kSharedBytes, stream>>>(call);
  check_cuda(cudaGetLastError());
}

template <int kHeads>
void launch_fp4(const fp4::Call& call, int blocks, cudaStream_t stream) {
  constexpr int kBytes = fp4::kSharedBytes<kHeads>;
  auto kernel = fp4::fp4_logits_kernel<kHeads>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<blocks, fp4::kThreads, kBytes, stream>>>(call);
  check_cuda(cudaGetLastError());
}

// As IndexLogits, for at most 256 rows and 64 heads: q is bfloat16 [rows, heads, 128], cache uint8 [pages, page_size *
// 68]. Weights may begin anywhere. Without `fill` it writes the columns of the blocks of 128 that a row's length reaches
// into.
void IndexLogitsFP4(ffi::TensorView q, ffi::TensorView weights, ffi::TensorView cache, ffi::TensorView page_table,
                    ffi::TensorView lengths, int64_t num_pages, int64_t first_page, bool fill, ffi::TensorView out) {
  fp4::Call call = {};
  call.heads = static_cast<int>(q.size(1));
  if (q.size(0) > fp4::kMostRows || call.heads > 64)
    TVM_FFI_THROW(ValueError) << "index_logits_fp4: at most " << fp4::kMostRows << " rows and 64 heads, got " << q.size(0)
                              << " and " << call.heads;
  fill_in(call, q, weights, cache, page_table, lengths, fp4::kTokenBytes, num_pages, first_page, fill, out);
  call.q = static_cast<const uint16_t*>(q.data_ptr());

  int device = q.device().device_id, sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  int64_t steps = int64_t{call.rows} * ((call.capacity + fp4::kStep - 1) / fp4::kStep);
  int blocks = static_cast<int>(std::min<int64_t>(steps, sms));
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(q.device().device_type, device));
  auto launch = call.heads > 32 ? launch_fp4<64> : call.heads > 16 ? launch_fp4<32> : launch_fp4<16>;
  launch(call, blocks, stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_logits, IndexLogits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_logits_fp4, IndexLogitsFP4);
