// Few rows times their experts' weights as a TVM FFI function: one binary for XLA and torch. The kernel is in kernel.cuh.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <bit>
#include <limits>

#include "kernel.cuh"
#include "plan.cuh"

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
  int bytes = shared_bytes(call.k, call.tiles, call.split, call.columns);
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

// x is bfloat16 [rows, k], or where rows name experts [rows / a whole number, k], and row r takes its row r / this number;
// k is a multiple of 256 for FP4 and of 128 for FP8; values uint8 [experts, n, k / 2] of FP4, the even
// value in the low nibble, or [experts, n, k] of FP8; scales UE8M0 bytes [experts, n, k / 32] of FP4, else bytes or float32
// [experts, n / a power of two, k / 128]; without experts all have an axis less. which is None, or int32 [rows], each row's
// expert, or with `sizes` [experts], how many rows each has, one expert's after the other's: rows behind all are not
// written. `gated`: x is [.., 2 k], the gate first, and silu(gate) * up is multiplied; a limit above 0 bounds both, the gate
// from above only. out is bfloat16 or float32 [rows, n]. x, values and out begin at multiples of 16 bytes, scales of 8. The caller
// validates sizes and dtypes.
void ExpertRows(ffi::TensorView x, ffi::TensorView values, ffi::TensorView scales, ffi::Optional<ffi::TensorView> which,
                bool sizes, bool gated, double limit, ffi::TensorView out) {
  Call call = {};
  int axes = values.ndim();
  call.rows = static_cast<int>(out.size(0)), call.k = static_cast<int>(x.size(1)) / (gated ? 2 : 1);
  call.gated = gated, call.limit = limit > 0 ? static_cast<float>(limit) : std::numeric_limits<float>::infinity();
  call.n = static_cast<int>(values.size(axes - 2)), call.experts = axes == 3 ? static_cast<int>(values.size(0)) : 1;
  call.repeat = x.size(0) ? call.rows / static_cast<int>(x.size(0)) : 1;
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
  if (which.has_value()) {
    call.which = static_cast<const int*>(which.value().data_ptr());
    call.kind = sizes ? kSorted : kEach;
    if (call.kind == kEach && call.rows > kMostNamed)
      TVM_FFI_THROW(ValueError) << "expert_rows: at most " << kMostNamed << " rows name an expert, got " << call.rows;
  }
  if (reinterpret_cast<uintptr_t>(call.x) % 16 || reinterpret_cast<uintptr_t>(call.values) % 16 ||
      reinterpret_cast<uintptr_t>(call.scales) % 8)
    TVM_FFI_THROW(ValueError) << "expert_rows: x and values begin at multiples of 16 bytes, scales of 8";
  if (!call.rows || !call.n) return;

  int device = x.device().device_id;
  Device has = {attribute(cudaDevAttrMultiProcessorCount, device),
                attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)};
  Plan plan = plan_of(call.kind, call.rows, call.experts, call.n, call.k, fp4, has);
  if (!plan.fits) TVM_FFI_THROW(ValueError) << "expert_rows: no room for k = " << call.k;
  call.tiles = plan.tiles, call.split = plan.split, call.columns = plan.columns;
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, device));
  dim3 grid(plan.across, plan.down);
  if (fp4)
    launch_for<true>(call, plan.wide, plan.warps, grid, stream);
  else
    launch_for<false>(call, plan.wide, plan.warps, grid, stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_rows, ExpertRows);
