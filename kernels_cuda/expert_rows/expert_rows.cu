// Few rows times their experts' weights as a TVM FFI function: one binary for XLA and torch. The kernel is in kernel.cuh.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <bit>

#include "kernel.cuh"

namespace ffi = tvm::ffi;

namespace {

using namespace expert_rows;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "expert_rows: " << cudaGetErrorString(error);
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

template <bool kFp4, int kWide, int kWarps = kManyWarps>
void launch(const Call& call, dim3 grid, cudaStream_t stream) {
  int bytes = shared_bytes(call.k, call.tiles, call.split, kWide);
  auto kernel = expert_rows_kernel<kFp4, kWide, kWarps>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, kWarps * 32, bytes, stream>>>(call);
  check_cuda(cudaGetLastError());
}

template <bool kFp4>
void launch_for(const Call& call, int wide, int warps, dim3 grid, cudaStream_t stream) {
  if (wide == 4) return launch<kFp4, 4>(call, grid, stream);
  if (wide == 2) return launch<kFp4, 2>(call, grid, stream);
  warps == kFewWarps ? launch<kFp4, 1, kFewWarps>(call, grid, stream) : launch<kFp4, 1>(call, grid, stream);
}

// x is bfloat16 [rows, k], k a multiple of 256 for FP4 and of 128 for FP8; values uint8 [experts, n, k / 2] of FP4, the even
// value in the low nibble, or [experts, n, k] of FP8; scales UE8M0 bytes [experts, n, k / 32] of FP4, else bytes or float32
// [experts, n / a power of two, k / 128]; without experts all have an axis less. which is None, or int32 [rows], each row's
// expert, or with `sizes` [experts], how many rows each has, one expert's after the other's: rows behind all are not
// written. out is bfloat16 or float32 [rows, n]. x, values and out begin at multiples of 16 bytes. The caller validates
// sizes and dtypes.
void ExpertRows(ffi::TensorView x, ffi::TensorView values, ffi::TensorView scales, ffi::Optional<ffi::TensorView> which,
                bool sizes, ffi::TensorView out) {
  Call call = {};
  int axes = values.ndim();
  call.rows = static_cast<int>(x.size(0)), call.k = static_cast<int>(x.size(1));
  call.n = static_cast<int>(values.size(axes - 2)), call.experts = axes == 3 ? static_cast<int>(values.size(0)) : 1;
  int scale_rows = call.n / static_cast<int>(scales.size(axes - 2));
  if (!std::has_single_bit(static_cast<unsigned>(scale_rows)))
    TVM_FFI_THROW(ValueError) << "expert_rows: a power of two of rows shares a scale, got " << scale_rows;
  call.scale_shift = std::countr_zero(static_cast<unsigned>(scale_rows));
  call.x = static_cast<const uint16_t*>(x.data_ptr());
  call.values = static_cast<const uint8_t*>(values.data_ptr());
  call.scales = static_cast<const uint8_t*>(scales.data_ptr());
  call.out = out.data_ptr();
  call.float_scales = scales.dtype().bits == 32, call.float_out = out.dtype().bits == 32;
  bool fp4 = values.size(axes - 1) < call.k;
  int most = 1, named = call.rows;  // thread blocks side by side; rows of each, about
  if (which.has_value()) {
    call.which = static_cast<const int*>(which.value().data_ptr());
    call.kind = sizes ? kSorted : kEach;
    most = std::min(call.rows, sizes ? call.experts : call.rows);
    named = (call.rows + call.experts - 1) / call.experts;
    if (call.kind == kEach && call.rows > kMostNamed)
      TVM_FFI_THROW(ValueError) << "expert_rows: at most " << kMostNamed << " rows name an expert, got " << call.rows;
  }
  if (reinterpret_cast<uintptr_t>(call.x) % 16 || reinterpret_cast<uintptr_t>(call.values) % 16)
    TVM_FFI_THROW(ValueError) << "expert_rows: x and values begin at multiples of 16 bytes";
  if (!call.rows || !call.n) return;

  int device = x.device().device_id;
  int named_bytes = kMostNamed * static_cast<int>(sizeof(int)), kept = 1024;  // kept by the system of each block's
  int room = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - named_bytes;
  int half = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / 2 - named_bytes - kept;
  int sms = attribute(cudaDevAttrMultiProcessorCount, device);
  // Warps that share a tile have few steps of it each, of an expert's weight 4 or more: there are many more.
  int steps = call.k / (fp4 ? kStep<true> : kStep<false>);
  for (call.split = kFewWarps; axes == 3 && call.split > 1 && steps < 4 * call.split;) call.split /= 2;
  int wide = named > 16 ? 4 : named > kColumns ? 2 : 1, warps = kManyWarps;
  auto least = [&] { return warps / call.split; };  // tiles: one for each warp
  auto fits = [&](int tiles) { return shared_bytes(call.k, tiles, call.split, wide) <= room; };
  while (wide > 1 && !fits(least())) wide /= 2;
  if (wide == 1 && shared_bytes(call.k, kFewWarps / call.split, call.split, wide) <= half) warps = kFewWarps, room = half;
  if (!fits(call.tiles = least())) TVM_FFI_THROW(ValueError) << "expert_rows: no room for k = " << call.k;
  // Many tiles share a copy of x, if enough thread blocks are left to fill the device twice and again.
  int all = (call.n + kTile - 1) / kTile;
  for (int tiles = call.tiles * 2; tiles <= kMostTiles && fits(tiles); tiles *= 2)
    if (int64_t{most} * all / tiles >= 4 * sms) call.tiles = tiles;

  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, device));
  dim3 grid((all + call.tiles - 1) / call.tiles, most);
  fp4 ? launch_for<true>(call, wide, warps, grid, stream) : launch_for<false>(call, wide, warps, grid, stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_rows, ExpertRows);
