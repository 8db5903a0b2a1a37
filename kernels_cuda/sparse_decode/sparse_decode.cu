// Sparse MLA decode on SM90: one binary for XLA, which calls `sparse_decode`, and for torch, which keeps what
// `sparse_decode_plan` makes and launches it by `sparse_decode_run`. The kernels are in kernel.cuh, those of
// a format compiled in its own file, v4.cu and others.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "call.cuh"
#include "cluster.cuh"
#include "launch.cuh"

namespace ffi = tvm::ffi;

namespace {

using namespace sparse_decode;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "sparse_decode: " << cudaGetErrorString(error);
}

Kernels kernels_for(int format) {
  if (format == kV32) return kernels_of<kV32>();
  if (format == kV41) return kernels_of<kV41>();
  if (format == kV41Fp4) return kernels_of<kV41Fp4>();
  if (format == kV4Bf16) return kernels_of<kV4Bf16>();
  if (format == kV32Bf16) return kernels_of<kV32Bf16>();
  return kernels_of<kV4>();
}

Launch launch_of(int format, int tile, int cuts, bool by_lengths) {
  Kernels kernels = kernels_for(format);
  if (cuts == kInClusters) return kernels.wide;
  if (cuts == kInWindow) return kernels.window;
  return tile == 16 ? kernels.few_16 : tile == 32 ? kernels.few_32 : by_lengths ? kernels.by_lengths : kernels.many;
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
  Launch largest = kernels_of<kV32>().wide;
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

// A launch of which the addresses alone are still open.
struct Planned {
  Call call;
  Launch what;
  unsigned grid[3];
  int parts;   // thread blocks of a cluster; 0: there are none
  bool waits;  // thread blocks that join parts wait for each other
};

// The tensors of a call, in the order in which their addresses are given; 0 for one that is absent.
enum Place { kQ, kCache, kIndices, kLengths, kExtraCache, kExtraIndices, kExtraLengths, kSink, kOut, kLse, kScratch };
constexpr int kPlaces = kScratch + 1;

// The device must be the current one: the kernel is allowed on it what it needs.
Planned planned(int rows, int heads, int format, const Shape& table, const Shape& extra, double softmax_scale,
                double empty_lse, int tile, int groups, int cuts, int device) {
  Planned made = {};
  Call& call = made.call = call_of(rows, heads, table, extra, softmax_scale, empty_lse, tile, groups, cuts);
  if (units_of(call) > INT_MAX)
    TVM_FFI_THROW(ValueError) << "sparse_decode: " << rows << " rows have too many blocks of keys";
  bool by_lengths = table.rows_per_length || extra.rows_per_length;
  made.what = launch_of(format, tile, cuts, by_lengths);
  allow(made.what);
  if (cuts == kInWindow) {
    if (!made.what.bytes || table.topk > kWindowBlocks * kBlock || extra.topk)
      TVM_FFI_THROW(ValueError) << "sparse_decode: the window kernel has no rows of this format or length";
    made.grid[0] = call.tiles, made.grid[1] = rows, made.grid[2] = 1;
  } else if (tile == kHeads && cuts != kInClusters) {
    made.grid[0] = groups * call.tiles, made.grid[1] = made.grid[2] = 1;
    made.waits = cuts != kNever;
  } else {
    made.parts = groups > kPortableCluster && !has_room_for_all_clusters(device) ? kPortableCluster : groups;
    call.deal.parts = divisor_of(made.parts);
    made.grid[0] = made.parts, made.grid[1] = call.tiles, made.grid[2] = rows;
  }
  return made;
}

cudaError_t start(Planned planned, const uint64_t* addresses, cudaStream_t stream) {
  Call& call = planned.call;
  call.q = reinterpret_cast<const __nv_bfloat16*>(addresses[kQ]);
  call.sink = reinterpret_cast<const float*>(addresses[kSink]);
  call.out = reinterpret_cast<__nv_bfloat16*>(addresses[kOut]);
  call.lse = reinterpret_cast<float*>(addresses[kLse]);
  for (int i = 0; i < 2; i++) {
    const uint64_t* of_table = addresses + (i ? kExtraCache : kCache);
    call.tables[i].data = reinterpret_cast<const uint8_t*>(of_table[0]);
    call.tables[i].indices = reinterpret_cast<const int*>(of_table[1]);
    call.tables[i].lengths = reinterpret_cast<const int*>(of_table[2]);
  }
  place_scratch(call, reinterpret_cast<void*>(addresses[kScratch]));
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (planned.parts) attributes[count++] = clusters_of(planned.parts);
  if (planned.waits) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  } else {  // thread blocks come to free multiprocessors while the launch ahead ends, and wait there
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(planned.grid[0], planned.grid[1], planned.grid[2]);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = planned.what.bytes;
  config.stream = stream;
  config.attrs = attributes, config.numAttrs = count;
  return cudaLaunchKernelEx(&config, planned.what.kernel, call);
}

// q is bfloat16 [rows..., heads, 512 or 576]. Caches and their pages begin at multiples of 16 bytes. indices are int32
// [rows..., topk]; lengths int32 [n], each for rows / n consecutive rows; sink is float32 [heads].
// It writes out, bfloat16 [rows..., heads, 512], and lse, float32 [rows..., heads]. Where cuts is kAlways or
// kAsLengthsSay it needs scratch memory for the parts as in Call, one behind the other, for groups · ⌈heads / 64⌉ thread
// blocks, at most one for each multiprocessor.
// `tile` is the heads of a thread block. With 16 or 32 instead of 64 the cluster kernel runs: `groups` thread blocks,
// from 2 to 16, share each row; then there are no cuts, and at most 65,535 rows. With 64 and cuts kInClusters the same
// holds for the wide cluster kernel, and with cuts kInWindow for the window kernel, which takes the first table alone, of
// at most 128 columns. The caller validates sizes, dtypes and the plan (tile, groups, cuts). `format` is one of Format. A table's last six numbers are those of a Shape, in its order; those of Places are read for V4.1 alone.
// FP4 rows are the second table's, also where there is no first one.
void SparseDecode(ffi::TensorView q, ffi::Optional<ffi::TensorView> cache, ffi::Optional<ffi::TensorView> indices,
                  ffi::Optional<ffi::TensorView> lengths, ffi::Optional<ffi::TensorView> extra_cache,
                  ffi::Optional<ffi::TensorView> extra_indices, ffi::Optional<ffi::TensorView> extra_lengths,
                  ffi::Optional<ffi::TensorView> sink, int64_t format, int64_t num_slots, int64_t page_size,
                  int64_t page_bytes, int64_t row_stride, int64_t scales, int64_t scale_stride,
                  int64_t extra_num_slots, int64_t extra_page_size, int64_t extra_page_bytes,
                  int64_t extra_row_stride, int64_t extra_scales, int64_t extra_scale_stride, double softmax_scale,
                  double empty_lse, int64_t tile, int64_t groups, int64_t cuts, ffi::TensorView out,
                  ffi::TensorView lse, ffi::Optional<ffi::TensorView> scratch) {
  using Given = ffi::Optional<ffi::TensorView>;
  int heads = static_cast<int>(q.size(q.ndim() - 2)), rows = static_cast<int>(lse.numel() / heads);
  auto shape_of = [&](const Given& given, const Given& its_lengths, auto... numbers) {
    int64_t topk = given.has_value() ? given.value().size(given.value().ndim() - 1) : 0;
    int64_t rows_per_length = its_lengths.has_value() ? rows / its_lengths.value().numel() : 0;
    return Shape{topk, topk, rows_per_length, numbers...};
  };
  Shape table = shape_of(indices, lengths, num_slots, page_size, page_bytes, row_stride, scales, scale_stride);
  Shape extra = shape_of(extra_indices, extra_lengths, extra_num_slots, extra_page_size, extra_page_bytes,
                         extra_row_stride, extra_scales, extra_scale_stride);
  DLDevice device = q.device();
  Planned made = planned(rows, heads, static_cast<int>(format), table, extra, softmax_scale, empty_lse,
                         static_cast<int>(tile), static_cast<int>(groups), static_cast<int>(cuts), device.device_id);
  uint64_t addresses[kPlaces];
  int count = 0;
  for (const Given& x : std::initializer_list<Given>{q, cache, indices, lengths, extra_cache, extra_indices,
                                                     extra_lengths, sink, out, lse, scratch}) {
    addresses[count++] = x.has_value() ? reinterpret_cast<uint64_t>(x.value().data_ptr()) : 0;
  }
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  check_cuda(start(made, addresses, static_cast<cudaStream_t>(stream)));
}

// A call on the current device, for `sparse_decode_run`. Each table is the numbers of a Shape; the rest as above.
ffi::Bytes SparseDecodePlan(int64_t rows, int64_t heads, int64_t format, ffi::Array<int64_t> table,
                            ffi::Array<int64_t> extra_table, double softmax_scale, double empty_lse, int64_t tile,
                            int64_t groups, int64_t cuts, int64_t device) {
  auto shape_of = [](const ffi::Array<int64_t>& x) { return Shape{x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8]}; };
  Planned made = planned(static_cast<int>(rows), static_cast<int>(heads), static_cast<int>(format), shape_of(table),
                         shape_of(extra_table), softmax_scale, empty_lse, static_cast<int>(tile),
                         static_cast<int>(groups), static_cast<int>(cuts), static_cast<int>(device));
  return ffi::Bytes(reinterpret_cast<const char*>(&made), sizeof made);
}

// The address of a function that launches what was planned: its bytes, the addresses of a call's tensors, a stream.
int64_t SparseDecodeRun() {
  int (*run)(const void*, const uint64_t*, void*) = [](const void* made, const uint64_t* addresses, void* stream) {
    Planned copy;
    memcpy(&copy, made, sizeof copy);
    return static_cast<int>(start(copy, addresses, static_cast<cudaStream_t>(stream)));
  };
  return reinterpret_cast<int64_t>(run);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode, SparseDecode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode_plan, SparseDecodePlan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode_run, SparseDecodeRun);
