// Sorted rows times their experts' weights as a TVM FFI function: one binary for XLA and torch. The kernel is in kernel.cuh.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <bit>

#include "launch.cuh"

namespace ffi = tvm::ffi;

namespace expert_tiles {

extern template void launch<Shape<true>>(Call, Operand, int, cudaStream_t, std::string&);
extern template void launch<Shape<false>>(Call, Operand, int, cudaStream_t, std::string&);

// x is bfloat16 [rows, k], k a multiple of 256 for FP4 and of 128 for FP8, for FP4 with its columns in the order of lanes
// (kernel.cuh, `sum_products`); values uint8 [experts, n, k / 2] of FP4, the
// even value in the low nibble, or [experts, n, k] of FP8, n even; scales UE8M0 bytes [experts, n, k / 32] of FP4, else
// bytes or float32 [experts, n / a power of two, k / 128]; without experts all have an axis less. sizes is int32 [experts],
// how many rows each has, one expert's after the other's: rows behind all are not written; or None, without experts. out
// is bfloat16 or float32 [rows, n]. x, values and scales begin at multiples of 16 bytes. The caller validates sizes and
// dtypes.
void ExpertTiles(ffi::TensorView x, ffi::TensorView values, ffi::TensorView scales,
                 ffi::Optional<ffi::TensorView> sizes, ffi::TensorView out) {
  Call call = {};
  int axes = values.ndim();
  call.rows = static_cast<int>(x.size(0)), call.k = static_cast<int>(x.size(1));
  call.n = static_cast<int>(values.size(axes - 2)), call.experts = axes == 3 ? static_cast<int>(values.size(0)) : 1;
  if (call.experts > kMostExperts)
    TVM_FFI_THROW(ValueError) << "expert_tiles: at most " << kMostExperts << " experts, got " << call.experts;
  int scale_rows = call.n / static_cast<int>(scales.size(axes - 2));
  if (!std::has_single_bit(static_cast<unsigned>(scale_rows)))
    TVM_FFI_THROW(ValueError) << "expert_tiles: a power of two of rows shares a scale, got " << scale_rows;
  call.scale_shift = std::countr_zero(static_cast<unsigned>(scale_rows));
  call.scales = static_cast<const uint8_t*>(scales.data_ptr());
  if (sizes.has_value()) call.sizes = static_cast<const int*>(sizes.value().data_ptr());
  call.out = out.data_ptr();
  call.float_scales = scales.dtype().bits == 32, call.float_out = out.dtype().bits == 32;
  bool fp4 = values.size(axes - 1) < call.k;
  if (!call.rows || !call.n) return;

  int device = x.device().device_id, sms = 0;
  std::string why;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) why = "no device";
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, device));
  auto launch_shape = fp4 ? launch<Shape<true>> : launch<Shape<false>>;
  if (why.empty()) launch_shape(call, {x.data_ptr(), values.data_ptr()}, sms, stream, why);
  if (!why.empty()) TVM_FFI_THROW(RuntimeError) << "expert_tiles: " << why;
}

}  // namespace expert_tiles

TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_tiles, expert_tiles::ExpertTiles);
