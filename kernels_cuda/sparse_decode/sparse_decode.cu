// Sparse MLA decode on SM90 as a TVM FFI function: one binary for XLA and torch. The kernels are in kernel.cuh.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <atomic>
#include <cfloat>

#include "kernel.cuh"

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

using Kernel = void (*)(Call);

struct Launch {
  Kernel kernel;
  int bytes;  // of shared memory
};

template <Format kFormat>
Launch launch_of(const Call& call, int tile) {
  constexpr bool kIsV4 = kFormat == kV4;
  if (tile == 16)
    return {kIsV4 ? sparse_decode_v4_few_16 : sparse_decode_v32_few_16, shared_bytes<ClusterShared<kFormat, 16>>()};
  if (tile == 32)
    return {kIsV4 ? sparse_decode_v4_few_32 : sparse_decode_v32_few_32, shared_bytes<ClusterShared<kFormat, 32>>()};
  Kernel by_shape = kIsV4 ? sparse_decode_v4 : sparse_decode_v32;
  Kernel given_lengths = kIsV4 ? sparse_decode_v4_by_lengths : sparse_decode_v32_by_lengths;
  return {by_lengths(call) ? given_lengths : by_shape, shared_bytes<Shared<kFormat>>()};
}

constexpr int kPortableCluster = 8;  // thread blocks of the largest cluster that any device can run

void allow(Launch what) {
  check_cuda(cudaFuncSetAttribute(what.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, what.bytes));
  check_cuda(cudaFuncSetAttribute(what.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

cudaLaunchAttribute clusters_of(int parts) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
  return attribute;
}

// Whether the device can run clusters of every size of the kernel that needs most of a multiprocessor.
bool has_room_for_all_clusters(int device) {
  static std::atomic<int> known[64];  // 1 + the answer
  if (device < 64 && known[device]) return known[device] > 1;
  Launch largest = {sparse_decode_v32_few_32, shared_bytes<ClusterShared<kV32, 32>>()};
  allow(largest);
  cudaLaunchAttribute attribute = clusters_of(kMostParts);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kMostParts), config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = largest.bytes;
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, largest.kernel, &config);
  if (error == cudaErrorInvalidClusterSize) cudaGetLastError(), clusters = 0, error = cudaSuccess;
  check_cuda(error);
  if (device < 64) known[device] = 1 + (clusters > 0);
  return clusters > 0;
}

void launch(Call& call, Launch what, int tile, int device, cudaStream_t stream) {
  allow(what);
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = what.bytes;
  config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  if (tile == kHeads) {
    config.gridDim = dim3(call.groups * call.tiles);
    attribute.id = cudaLaunchAttributeCooperative;  // thread blocks that join parts wait for each other
    attribute.val.cooperative = call.cuts != kNever;
  } else {
    int parts = call.groups > kPortableCluster && !has_room_for_all_clusters(device) ? kPortableCluster : call.groups;
    call.deal.parts = divisor_of(parts);
    config.gridDim = dim3(parts, call.tiles, call.rows);
    attribute = clusters_of(parts);
  }
  check_cuda(cudaLaunchKernelEx(&config, what.kernel, call));
}

// q is bfloat16 [rows..., heads, 512 or 576]. Caches and their pages begin at multiples of 16 bytes. indices are int32
// [rows..., topk]; lengths int32 [n], each for rows / n consecutive rows; sink is float32 [heads].
// It writes out, bfloat16 [rows..., heads, 512], and lse, float32 [rows..., heads]. Where cuts is not 0 (kNever) it
// needs scratch memory as in Call, for groups · ⌈heads / 64⌉ thread blocks, at most one for each multiprocessor.
// `tile` is the heads of a thread block. With 16 or 32 instead of 64 the cluster kernel runs: `groups` thread blocks,
// from 2 to 16, share each row; then there are no cuts, and at most 65,535 rows. The caller validates sizes, dtypes
// and the plan (tile, groups, cuts).
void SparseDecode(ffi::TensorView q, ffi::TensorView cache, ffi::TensorView indices,
                  ffi::Optional<ffi::TensorView> lengths, ffi::Optional<ffi::TensorView> extra_cache,
                  ffi::Optional<ffi::TensorView> extra_indices, ffi::Optional<ffi::TensorView> extra_lengths,
                  ffi::Optional<ffi::TensorView> sink, int64_t num_slots, int64_t page_size, int64_t page_bytes,
                  int64_t extra_num_slots, int64_t extra_page_size, int64_t extra_page_bytes, double softmax_scale,
                  double empty_lse, int64_t tile, int64_t groups, int64_t cuts, ffi::TensorView out,
                  ffi::TensorView lse, ffi::Optional<ffi::TensorView> part_values,
                  ffi::Optional<ffi::TensorView> part_sums, ffi::Optional<ffi::TensorView> part_rows) {
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
  call.tiles = static_cast<int>((heads + tile - 1) / tile);
  call.groups = static_cast<int>(groups);
  call.cuts = static_cast<int>(cuts);
  call.scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
  if (call.scale_log2 == 0) call.scale_log2 = FLT_MIN;  // nearly 0, but -inf times it is -inf, not NaN
  call.empty_lse = static_cast<float>(empty_lse);
  call.tables[0] = table_of(cache, indices, lengths, num_slots, page_size, page_bytes, call.rows);
  call.tables[1] = table_of(extra_cache, extra_indices, extra_lengths, extra_num_slots, extra_page_size,
                            extra_page_bytes, call.rows);
  call.deal = deal_of(call.rows, call.groups, call.tiles, most_blocks(call));
  int device = q.device().device_id, heads_of_block = static_cast<int>(tile);
  launch(call, is_v4 ? launch_of<kV4>(call, heads_of_block) : launch_of<kV32>(call, heads_of_block), heads_of_block,
         device, static_cast<cudaStream_t>(TVMFFIEnvGetStream(q.device().device_type, device)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode, SparseDecode);
