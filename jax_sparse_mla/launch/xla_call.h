// XLA custom calls into TVM-FFI functions: two handlers, for a CPU and for a GPU, serve any number of functions.
//
// The call's attribute `key` says which function; Python puts it into the table when the call is lowered. A function gets
// the inputs and then the results as DLTensors; on a GPU TVM-FFI's current stream is XLA's. The handlers may be captured
// into a CUDA graph, so a function must only launch kernels on that stream.

#pragma once

#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace xla_call {

namespace xla = ::xla::ffi;
namespace tvm = ::tvm::ffi;

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<int64_t, tvm::Function> functions;
};

inline Table& TheTable() {
  static Table* table = new Table;  // programs may outlive the destructors of a process that ends
  return *table;
}

// A function that is there already stays.
inline void Add(int64_t key, tvm::Function function) {
  Table& table = TheTable();
  std::unique_lock lock(table.mutex);
  table.functions.emplace(key, std::move(function));
}

inline std::optional<tvm::Function> Find(int64_t key) {
  Table& table = TheTable();
  std::shared_lock lock(table.mutex);
  auto found = table.functions.find(key);
  if (found == table.functions.end()) return std::nullopt;
  return found->second;
}

inline std::optional<DLDataType> TypeOf(xla::DataType type) {
  const auto of = [](int code, int bits) {
    return DLDataType{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (type) {
    case xla::PRED: return of(kDLBool, 8);
    case xla::S8: return of(kDLInt, 8);
    case xla::S16: return of(kDLInt, 16);
    case xla::S32: return of(kDLInt, 32);
    case xla::S64: return of(kDLInt, 64);
    case xla::U8: return of(kDLUInt, 8);
    case xla::U16: return of(kDLUInt, 16);
    case xla::U32: return of(kDLUInt, 32);
    case xla::U64: return of(kDLUInt, 64);
    case xla::F16: return of(kDLFloat, 16);
    case xla::F32: return of(kDLFloat, 32);
    case xla::F64: return of(kDLFloat, 64);
    case xla::BF16: return of(kDLBfloat, 16);
    case xla::F8E4M3FN: return of(kDLFloat8_e4m3fn, 8);
    case xla::F8E5M2: return of(kDLFloat8_e5m2, 8);
    default: return std::nullopt;
  }
}

// Buffers as tensors whose addresses stay.
struct Tensors {
  DLDevice device;
  std::deque<std::vector<int64_t>> numbers;
  std::deque<DLTensor> tensors;
  std::vector<tvm::AnyView> views;

  xla::Error Add(const xla::AnyBuffer& buffer) {
    const auto type = TypeOf(buffer.element_type());
    if (!type) return xla::Error::InvalidArgument("jax_sparse_mla: a buffer of a type that is not passed on");
    const auto sizes = buffer.dimensions();
    auto& shape = numbers.emplace_back(sizes.begin(), sizes.end());
    auto& strides = numbers.emplace_back(shape.size(), 1);
    for (int i = static_cast<int>(shape.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * shape[i + 1];
    const int rank = static_cast<int>(shape.size());
    views.push_back(&tensors.emplace_back(
        DLTensor{buffer.untyped_data(), device, rank, *type, shape.data(), strides.data(), 0}));
    return xla::Error::Success();
  }
};

// TVM-FFI's current stream of a device, until the end of the scope.
class Stream {
 public:
  Stream(DLDevice device, void* stream) : device_(device) {
    if (device.device_type != kDLCUDA) return;
    is_set_ = TVMFFIEnvSetStream(kDLCUDA, device.device_id, stream, &before_) == 0;
  }
  ~Stream() {
    if (is_set_ && device_.device_type == kDLCUDA) TVMFFIEnvSetStream(kDLCUDA, device_.device_id, before_, nullptr);
  }
  bool is_set() const { return is_set_; }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

 private:
  DLDevice device_;
  void* before_ = nullptr;
  bool is_set_ = true;
};

inline xla::Error Run(DLDevice device, void* stream, xla::RemainingArgs inputs, xla::RemainingRets results,
                      int64_t key) {
  const auto function = Find(key);
  if (!function) return xla::Error::Internal("jax_sparse_mla: no function has the key " + std::to_string(key));
  Tensors buffers{device};
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto buffer = inputs.get<xla::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    if (auto error = buffers.Add(*buffer); error.failure()) return error;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<xla::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    if (auto error = buffers.Add(**buffer); error.failure()) return error;
  }
  const Stream current(device, stream);
  if (!current.is_set()) return xla::Error::Internal("jax_sparse_mla: TVM-FFI does not take XLA's stream");
  try {
    tvm::Any result;
    function->CallPacked(buffers.views.data(), static_cast<int32_t>(buffers.views.size()), &result);
  } catch (const tvm::Error& error) {
    return xla::Error::Internal(error.kind() + ": " + error.message());
  } catch (const std::exception& error) {
    return xla::Error::Internal(error.what());
  } catch (...) {
    return xla::Error::Internal("jax_sparse_mla: an unknown exception");
  }
  return xla::Error::Success();
}

inline xla::Error RunOnHost(xla::RemainingArgs inputs, xla::RemainingRets results, int64_t key) {
  return Run({kDLCPU, 0}, nullptr, inputs, results, key);
}

inline xla::Error RunOnCuda(void* stream, int32_t device, xla::RemainingArgs inputs, xla::RemainingRets results,
                            int64_t key) {
  return Run({kDLCUDA, device}, stream, inputs, results, key);
}

}  // namespace xla_call

XLA_FFI_DEFINE_HANDLER(jax_sparse_mla_on_host, xla_call::RunOnHost,
                       xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("key"));
XLA_FFI_DEFINE_HANDLER(jax_sparse_mla_on_cuda, xla_call::RunOnCuda,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::PlatformStream<void*>>()
                           .Ctx<xla::ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("key"),
                       {xla::ffi::Traits::kCmdBufferCompatible});

namespace xla_call {

// The address of a platform's handler.
inline void* Handler(bool cuda) {
  return reinterpret_cast<void*>(cuda ? jax_sparse_mla_on_cuda : jax_sparse_mla_on_host);
}

}  // namespace xla_call
