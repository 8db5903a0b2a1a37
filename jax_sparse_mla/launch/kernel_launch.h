// Launches of compiled Triton kernels on XLA's buffers, through the CUDA driver, which is opened where it is needed.
//
// jaxlib's own launcher looks a kernel up by its whole text before every execution of a program.

#pragma once

#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kernel_launch {

namespace ffi = tvm::ffi;

// What is called of libcuda, with the types of cuda.h.
struct Driver {
  using Status = int;
  Status (*load)(void** library, const void* image, void*, void*, unsigned, void*, void*, unsigned);
  Status (*get_kernel)(void** kernel, void* library, const char* name);
  Status (*set_attribute)(int attribute, int value, void* kernel, int device);
  Status (*get_device)(int* device);
  Status (*fill)(unsigned long long address, unsigned char value, size_t bytes, void* stream);
  Status (*launch)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                   void* stream, void** parameters, void** extra);
  Status (*error_name)(Status, const char**);

  explicit Driver(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW);
    TVM_FFI_CHECK(library != nullptr, RuntimeError) << "no CUDA driver: " << dlerror();
    Find(library, "cuLibraryLoadData", load);
    Find(library, "cuLibraryGetKernel", get_kernel);
    Find(library, "cuKernelSetAttribute", set_attribute);
    Find(library, "cuCtxGetDevice", get_device);
    Find(library, "cuMemsetD8Async", fill);
    Find(library, "cuLaunchKernel", launch);
    Find(library, "cuGetErrorName", error_name);
  }

  void Check(Status status, const char* what) const {
    if (status == 0) return;
    const char* name = nullptr;
    error_name(status, &name);
    TVM_FFI_THROW(RuntimeError) << what << ": " << (name ? name : "an unknown CUDA error") << " (" << status << ")";
  }

 private:
  template <typename Function>
  static void Find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    TVM_FFI_CHECK(function != nullptr, RuntimeError) << "the CUDA driver has no " << name << ": it is older than 12.0";
  }
};

// A parameter of a kernel: the address of a buffer, or the bytes of a number.
struct Parameter {
  int64_t buffer, bytes;
};

constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kSharedBytesOfAnyKernel = 48 << 10;

// A kernel of a library: one for all launches of its machine code, so that the GPU's caches hold it once.
struct Loaded {
  Driver driver;
  void* kernel = nullptr;
  std::atomic<uint64_t> allowed{0};  // by device: whether it may have more shared memory than every kernel has

  Loaded(const std::string& path, const ffi::Bytes& image, const std::string& name) : driver(path) {
    void* library = nullptr;
    driver.Check(driver.load(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
    driver.Check(driver.get_kernel(&kernel, library, name.c_str()), "cuLibraryGetKernel");
  }

  static std::shared_ptr<Loaded> Get(const std::string& path, const ffi::Bytes& image, const std::string& name) {
    static std::mutex mutex;
    static auto& loaded = *new std::map<std::array<std::string, 3>, std::shared_ptr<Loaded>>();
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Loaded>& found = loaded[{path, name, std::string(image.data(), image.size())}];
    if (!found) found = std::make_shared<Loaded>(path, image, name);
    return found;
  }
};

class Kernel {
 public:
  Kernel(const ffi::Bytes& image, const std::string& name, const ffi::Array<int64_t>& shape,
         const ffi::Array<int64_t>& parameters, const ffi::Array<int64_t>& zeroed, const std::string& driver)
      : loaded_(Loaded::Get(driver, image, name)),
        shape_(shape.begin(), shape.end()),
        zeroed_(zeroed.begin(), zeroed.end()) {
    TVM_FFI_CHECK(shape_.size() == 5 && parameters.size() % 2 == 0, ValueError) << "a kernel's shape has five numbers";
    for (size_t i = 0; i < parameters.size(); i += 2) parameters_.push_back({parameters[i], parameters[i + 1]});
  }

  void operator()(const ffi::AnyView* buffers, int32_t count) {
    TVM_FFI_CHECK(count > 0, ValueError) << "a kernel needs a buffer";
    const auto tensor = [&](int64_t i) {
      TVM_FFI_CHECK(i < count, IndexError) << "no buffer " << i << " of " << count;
      return buffers[i].cast<DLTensor*>();
    };
    const Driver& driver = loaded_->driver;
    const DLDevice device = tensor(0)->device;
    void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
    for (int64_t i : zeroed_) driver.Check(driver.fill(Address(tensor(i)), 0, Bytes(tensor(i)), stream), "memset");
    std::vector<int64_t> values(parameters_.size());
    std::vector<void*> addresses(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = parameters_[i];
      values[i] = parameter.buffer < 0 ? parameter.bytes : static_cast<int64_t>(Address(tensor(parameter.buffer)));
      addresses[i] = &values[i];
    }
    AllowShared();
    driver.Check(driver.launch(loaded_->kernel, shape_[0], shape_[1], shape_[2], shape_[3], 1, 1, shape_[4], stream,
                                 addresses.data(), nullptr),
                  "cuLaunchKernel");
  }

 private:
  static unsigned long long Address(const DLTensor* x) {
    return reinterpret_cast<unsigned long long>(x->data) + x->byte_offset;
  }

  static size_t Bytes(const DLTensor* x) {
    size_t bytes = (x->dtype.bits * x->dtype.lanes + 7) / 8;
    for (int i = 0; i < x->ndim; ++i) bytes *= x->shape[i];
    return bytes;
  }

  // Once for each device: more shared memory than every kernel may have.
  void AllowShared() {
    if (shape_[4] <= kSharedBytesOfAnyKernel) return;
    const Driver& driver = loaded_->driver;
    int device = 0;
    driver.Check(driver.get_device(&device), "cuCtxGetDevice");
    const uint64_t bit = uint64_t{1} << (device % 64);
    if (loaded_->allowed.load() & bit) return;
    const int bytes = static_cast<int>(shape_[4]);
    driver.Check(driver.set_attribute(kMaxDynamicSharedBytes, bytes, loaded_->kernel, device), "cuKernelSetAttribute");
    loaded_->allowed |= bit;
  }

  std::shared_ptr<Loaded> loaded_;
  std::vector<int64_t> shape_, zeroed_;  // the grid's three numbers, threads, bytes of shared memory
  std::vector<Parameter> parameters_;
};

// A function of XLA's buffers that launches the kernel; `parameters` are pairs of a buffer's number, or -1, and the
// bytes of a number.
inline ffi::Function Bind(ffi::Bytes image, ffi::String name, ffi::Array<int64_t> shape,
                          ffi::Array<int64_t> parameters, ffi::Array<int64_t> zeroed, ffi::String driver) {
  auto kernel = std::make_shared<Kernel>(image, name, shape, parameters, zeroed, driver);
  return ffi::Function::FromPacked(
      [kernel](const ffi::AnyView* buffers, int32_t count, ffi::Any*) { (*kernel)(buffers, count); });
}

}  // namespace kernel_launch
