// An XLA custom call that runs a torch operator on XLA's stream, without Python and so without its lock.
//
// The operator is reached through the C functions that torch keeps stable for extensions (torch >= 2.10); they are
// looked up at run time in the libtorch that the process has loaded, so nothing here is compiled against torch.
// ffi.py compiles this file and builds the call's attributes from the operator's schema:
//
//   op         "namespace::name"
//   arguments  a code per argument of the schema: 'T' the next operand as a tensor, 'O' the next operand where the
//              schema has an optional tensor, '-' None, 'i' the next of `ints` (int or bool), 'f' the next of `floats`
//   views      per operand: rank, offset in XLA's buffer, sizes, strides (in elements)
//   returns    a code per value returned: 'T' tensor, 'O' optional tensor, 'L' list of tensors, 'M' of optional ones
//
// The operator allocates what it returns with torch's allocator. The first tensors returned are copied to XLA's
// results: a result has the tensor's leading rows, and of each row what comes first (so an operator that was given
// padded heads returns unpadded ones at no cost). Because of that allocator the call must not become part of a command
// buffer, and does not carry the trait.

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

using Tensor = struct TensorOpaque*;
using List = struct ListOpaque*;
using Guard = struct GuardOpaque*;
using Value = uint64_t;  // torch's StableIValue: a scalar, a handle, or a pointer to an optional's Value
using Status = int32_t;  // 0 is success

// --- torch ---------------------------------------------------------------------------------------------------------

struct Torch {
  Status (*create_tensor_from_blob)(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides,
                                    int64_t offset, int32_t dtype, int32_t device_type, int32_t device, Tensor*);
  Status (*call_dispatcher)(const char* op, const char* overload, Value* stack);
  Status (*delete_tensor)(Tensor);
  Status (*get_data_ptr)(Tensor, void**);
  Status (*get_numel)(Tensor, int64_t*);
  Status (*get_dtype)(Tensor, int32_t*);
  Status (*is_contiguous)(Tensor, bool*);
  Status (*list_size)(List, size_t*);
  Status (*list_get_item)(List, size_t, Value*);
  Status (*delete_list)(List);
  int32_t (*device_type_cpu)();
  int32_t (*device_type_cuda)();
  int32_t (*dtype_uint8)();
  int32_t (*dtype_int32)();
  int32_t (*dtype_bfloat16)();
  int32_t (*dtype_float32)();
  // torch >= 2.13; before, an optional is made by new and the message of an exception goes to stderr alone.
  Status (*new_value)(Value**);
  Status (*delete_value)(Value*);
  const char* (*exception_what)();
  // Present in a torch with CUDA.
  Status (*create_stream_guard)(void* stream, int32_t device, Guard*);
  Status (*delete_stream_guard)(Guard);
  int (*memcpy_async)(void* to, const void* from, size_t bytes, int kind, void* stream);
  int (*memcpy_2d_async)(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                         int kind, void* stream);
};

Torch torch;

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// --- a call --------------------------------------------------------------------------------------------------------

struct Device {
  int32_t type;
  int32_t index;
  void* stream;  // null on a CPU
};

struct Attributes {
  std::string_view op, arguments, returns;
  ffi::Span<const int64_t> views, ints;
  ffi::Span<const double> floats;
};

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("torch_call: " + message); }

ffi::Error Failed(std::string_view op, const char* step) {
  std::string message = "torch_call: " + std::string(op) + ": " + step + " failed";
  if (torch.exception_what != nullptr) {
    message += std::string(": ") + torch.exception_what();
  } else {
    message += "; torch's message is on stderr";
  }
  return ffi::Error::Internal(message);
}

int32_t TorchDtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::U8:
      return torch.dtype_uint8();
    case ffi::DataType::S32:
      return torch.dtype_int32();
    case ffi::DataType::BF16:
      return torch.dtype_bfloat16();
    case ffi::DataType::F32:
      return torch.dtype_float32();
    default:
      return -1;
  }
}

// Makes torch tensors of XLA's operands, in order.
class Operands {
 public:
  Operands(ffi::RemainingArgs buffers, ffi::Span<const int64_t> views) : buffers_(buffers), views_(views) {}

  ffi::Error Next(const Device& device, Tensor* tensor) {
    auto buffer = buffers_.get<ffi::AnyBuffer>(operand_);
    if (buffer.has_error()) return Invalid("too few operands");
    ++operand_;
    if (view_ == views_.size() || views_.size() - view_ < 2 + 2 * static_cast<size_t>(views_[view_])) {
      return Invalid("too few views");
    }
    const int64_t rank = views_[view_], offset = views_[view_ + 1];
    const int64_t* sizes = views_.begin() + view_ + 2;
    const int64_t* strides = sizes + rank;
    view_ += 2 + 2 * rank;
    int64_t reach = offset + 1;
    for (int64_t i = 0; i < rank; ++i) reach += (sizes[i] - 1) * strides[i];
    const int32_t dtype = TorchDtype(buffer->element_type());
    if (dtype < 0) return Invalid("an operand's dtype is none of uint8, int32, bfloat16, float32");
    if (offset < 0 || reach > static_cast<int64_t>(buffer->element_count())) return Invalid("a view exceeds its operand");
    // Not as the storage's offset: a kernel that takes the storage's start would read another layer's rows.
    void* data = static_cast<char*>(buffer->untyped_data()) + offset * ffi::ByteWidth(buffer->element_type());
    if (torch.create_tensor_from_blob(data, rank, sizes, strides, 0, dtype, device.type, device.index, tensor)) {
      return Failed("operand " + std::to_string(operand_ - 1), "making a tensor");
    }
    return ffi::Error::Success();
  }

 private:
  ffi::RemainingArgs buffers_;
  ffi::Span<const int64_t> views_;
  size_t operand_ = 0, view_ = 0;
};

Value FromTensor(Tensor tensor) { return reinterpret_cast<Value>(tensor); }

Value FromOptional(Value value) {
  Value* box = nullptr;
  if (torch.new_value == nullptr || torch.new_value(&box)) box = new Value;
  *box = value;
  return reinterpret_cast<Value>(box);
}

// The value inside an optional, which is freed; 0 for None.
Value TakeOptional(Value optional) {
  if (optional == 0) return 0;
  Value* box = reinterpret_cast<Value*>(optional);
  const Value value = *box;
  if (torch.delete_value == nullptr || torch.delete_value(box)) delete box;
  return value;
}

// Frees the handles of a stack that the dispatcher has not got.
void Drop(std::string_view codes, const std::vector<Value>& stack) {
  for (size_t i = 0; i < stack.size(); ++i) {
    const Value value = codes[i] == 'O' ? TakeOptional(stack[i]) : codes[i] == 'T' ? stack[i] : 0;
    if (value != 0) torch.delete_tensor(reinterpret_cast<Tensor>(value));
  }
}

// What the operator takes: torch's dispatcher takes ownership of every handle on the stack.
ffi::Error FillStack(const Attributes& call, ffi::RemainingArgs args, const Device& device, std::vector<Value>& stack) {
  Operands operands(args, call.views);
  size_t next_int = 0, next_float = 0;
  for (char code : call.arguments) {
    Value value = 0;
    if (code == 'T' || code == 'O') {
      Tensor tensor;
      if (auto error = operands.Next(device, &tensor); error.failure()) {
        Drop(call.arguments, stack);
        return error;
      }
      value = code == 'T' ? FromTensor(tensor) : FromOptional(FromTensor(tensor));
    } else if (code == 'i') {
      value = static_cast<Value>(call.ints[next_int++]);
    } else if (code == 'f') {
      std::memcpy(&value, &call.floats[next_float++], sizeof(value));
    }
    stack.push_back(value);
  }
  return ffi::Error::Success();
}

// The tensors that an operator returned, lists flattened; null where it returned None. Frees them.
class Returned {
 public:
  ~Returned() {
    for (Tensor tensor : tensors_) {
      if (tensor != nullptr) torch.delete_tensor(tensor);
    }
  }

  void Take(char code, Value value) {
    if (code == 'T' || code == 'O') return Push(code == 'O', value);
    List list = reinterpret_cast<List>(value);
    size_t size = 0;
    torch.list_size(list, &size);
    for (size_t i = 0; i < size; ++i) {
      Value item = 0;
      torch.list_get_item(list, i, &item);
      Push(code == 'M', item);
    }
    torch.delete_list(list);
  }

  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  void Push(bool optional, Value value) {
    tensors_.push_back(reinterpret_cast<Tensor>(optional ? TakeOptional(value) : value));
  }

  std::vector<Tensor> tensors_;
};

ffi::Error CopyOut(std::string_view op, Tensor tensor, ffi::AnyBuffer result, const Device& device) {
  if (tensor == nullptr) return Invalid(std::string(op) + " returned None where a result is wanted");
  void* from = nullptr;
  int64_t numel = 0;
  int32_t dtype = 0;
  bool contiguous = false;
  if (torch.get_data_ptr(tensor, &from) || torch.get_numel(tensor, &numel) || torch.get_dtype(tensor, &dtype) ||
      torch.is_contiguous(tensor, &contiguous)) {
    return Failed(op, "reading a returned tensor");
  }
  const auto sizes = result.dimensions();
  const int64_t count = static_cast<int64_t>(result.element_count());
  if (count == 0) return ffi::Error::Success();
  const int64_t rows = sizes.size() == 0 ? 1 : sizes.front();
  if (dtype != TorchDtype(result.element_type()) || !contiguous || numel % rows != 0 || numel < count) {
    return Invalid(std::string(op) + " returned a tensor of another dtype, layout or size than its result");
  }
  const size_t item = result.size_bytes() / count;
  const size_t width = count / rows * item, pitch = numel / rows * item;
  if (device.stream != nullptr) {
    constexpr int kDeviceToDevice = 3;
    // A copy in two dimensions takes no more than 2 GiB as a row's length.
    const int code = width == pitch ? torch.memcpy_async(result.untyped_data(), from, result.size_bytes(),
                                                         kDeviceToDevice, device.stream)
                                    : torch.memcpy_2d_async(result.untyped_data(), width, from, pitch, width, rows,
                                                            kDeviceToDevice, device.stream);
    if (code != 0) {
      return ffi::Error::Internal("torch_call: " + std::string(op) + ": copying a result failed with CUDA error " +
                                  std::to_string(code));
    }
    return ffi::Error::Success();
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(static_cast<char*>(result.untyped_data()) + row * width, static_cast<char*>(from) + row * pitch, width);
  }
  return ffi::Error::Success();
}

ffi::Error Run(const Attributes& call, ffi::RemainingArgs args, ffi::RemainingRets rets, const Device& device) {
  std::vector<Value> stack;
  stack.reserve(call.arguments.size() + call.returns.size());
  if (auto error = FillStack(call, args, device, stack); error.failure()) return error;
  if (stack.size() < call.returns.size()) stack.resize(call.returns.size());
  if (torch.call_dispatcher(std::string(call.op).c_str(), "", stack.data())) return Failed(call.op, "the operator");

  Returned returned;
  for (size_t i = 0; i < call.returns.size(); ++i) returned.Take(call.returns[i], stack[i]);
  if (returned.tensors().size() < rets.size()) return Invalid(std::string(call.op) + " returned too few tensors");
  for (size_t i = 0; i < rets.size(); ++i) {
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return Invalid("a result is not an array");
    if (auto error = CopyOut(call.op, returned.tensors()[i], **result, device); error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error RunOnHost(std::string_view op, std::string_view arguments, std::string_view returns,
                     ffi::Span<const int64_t> views, ffi::Span<const int64_t> ints, ffi::Span<const double> floats,
                     ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Run({op, arguments, returns, views, ints, floats}, args, rets, {torch.device_type_cpu(), 0, nullptr});
}

ffi::Error RunOnCuda(void* stream, int32_t ordinal, std::string_view op, std::string_view arguments,
                     std::string_view returns, ffi::Span<const int64_t> views, ffi::Span<const int64_t> ints,
                     ffi::Span<const double> floats, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (torch.create_stream_guard == nullptr) {
    return ffi::Error::InvalidArgument("torch_call: this torch has no CUDA");
  }
  // Launches, and the allocator's reuse of freed memory, then follow XLA's stream.
  Guard guard;
  if (torch.create_stream_guard(stream, ordinal, &guard)) return Failed(op, "taking XLA's stream");
  auto error = Run({op, arguments, returns, views, ints, floats}, args, rets,
                   {torch.device_type_cuda(), ordinal, stream});
  torch.delete_stream_guard(guard);
  return error;
}

}  // namespace

// Looks up torch's functions in libtorch_cpu and, where torch has CUDA, in libtorch_cuda, whose dependencies
// dlsym searches too. Returns null, or the name of a function that is missing.
extern "C" const char* jax_sparse_mla_bind_torch(void* cpu, void* cuda) {
#define REQUIRE(library, name, field) \
  if (!Find(library, name, torch.field)) return name
  REQUIRE(cpu, "aoti_torch_create_tensor_from_blob", create_tensor_from_blob);
  REQUIRE(cpu, "aoti_torch_call_dispatcher", call_dispatcher);
  REQUIRE(cpu, "aoti_torch_delete_tensor_object", delete_tensor);
  REQUIRE(cpu, "aoti_torch_get_data_ptr", get_data_ptr);
  REQUIRE(cpu, "aoti_torch_get_numel", get_numel);
  REQUIRE(cpu, "aoti_torch_get_dtype", get_dtype);
  REQUIRE(cpu, "aoti_torch_is_contiguous", is_contiguous);
  REQUIRE(cpu, "torch_list_size", list_size);
  REQUIRE(cpu, "torch_list_get_item", list_get_item);
  REQUIRE(cpu, "torch_delete_list", delete_list);
  REQUIRE(cpu, "aoti_torch_device_type_cpu", device_type_cpu);
  REQUIRE(cpu, "aoti_torch_device_type_cuda", device_type_cuda);
  REQUIRE(cpu, "aoti_torch_dtype_uint8", dtype_uint8);
  REQUIRE(cpu, "aoti_torch_dtype_int32", dtype_int32);
  REQUIRE(cpu, "aoti_torch_dtype_bfloat16", dtype_bfloat16);
  REQUIRE(cpu, "aoti_torch_dtype_float32", dtype_float32);
  Find(cpu, "torch_new_stable_ivalue", torch.new_value);
  Find(cpu, "torch_delete_stable_ivalue", torch.delete_value);
  Find(cpu, "torch_exception_get_what_without_backtrace", torch.exception_what);
  if (cuda != nullptr) {
    REQUIRE(cuda, "aoti_torch_create_cuda_stream_guard", create_stream_guard);
    REQUIRE(cuda, "aoti_torch_delete_cuda_stream_guard", delete_stream_guard);
    REQUIRE(cuda, "cudaMemcpyAsync", memcpy_async);
    REQUIRE(cuda, "cudaMemcpy2DAsync", memcpy_2d_async);
  }
#undef REQUIRE
  return nullptr;
}

#define WITH_CALL(binding)                   \
  binding.Attr<std::string_view>("op")       \
      .Attr<std::string_view>("arguments")   \
      .Attr<std::string_view>("returns")     \
      .Attr<ffi::Span<const int64_t>>("views") \
      .Attr<ffi::Span<const int64_t>>("ints")  \
      .Attr<ffi::Span<const double>>("floats") \
      .RemainingArgs()                       \
      .RemainingRets()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_sparse_mla_torch_call_host, RunOnHost, WITH_CALL(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_sparse_mla_torch_call_cuda, RunOnCuda,
                              WITH_CALL(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>()));
