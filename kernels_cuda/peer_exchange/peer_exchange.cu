// Launches the kernels of kernel.cuh; TVM FFI calls it.
//
// `prepare` gives groups of devices of one process the memory that they write into, once, outside of XLA: when a program
// is traced. A launch only looks it up, so it may be captured into a CUDA graph.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel.cuh"

namespace ffi = tvm::ffi;

namespace {

constexpr uint64_t kPatience = 10'000'000'000;  // nanoseconds; the assertion in system.cuh names it
constexpr int64_t kMostBytes = peer::kPieces * 16, kLeastBytes = peer::kLeastPieces * 16;  // of a head of a row

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  TVM_FFI_THROW(RuntimeError) << "peer_exchange: " << what << ": " << cudaGetErrorString(error);
}

using Kernel = void (*)(peer::Call);

template <typename T>
Kernel of_parts(int size) {
  if (size <= 2) return peer::peer_exchange_kernel<T, 2>;
  if (size <= 4) return peer::peer_exchange_kernel<T, 4>;
  return peer::peer_exchange_kernel<T, 8>;
}
const void* kernel_of(bool half, int size) {
  return reinterpret_cast<const void*>(half ? of_parts<uint16_t>(size) : of_parts<float>(size));
}

struct OfDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct OfHost {
  void operator()(int* memory) const { cudaFreeHost(memory); }
};
template <typename T>
using Memory = std::unique_ptr<T[], OfDevice>;

template <typename T>
Memory<T> zeros(int64_t count) {
  T* memory = nullptr;
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&memory), count * sizeof(T)), "cudaMalloc");
  Memory<T> owned(memory);
  check_cuda(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return owned;
}

// What a device has in its group.
struct Share {
  int rank = 0;
  std::vector<int> ordinals;  // of its group, by rank
  Memory<uint8_t> received;
  Memory<uint32_t> flags, epochs;
};

// Groups of devices that one program runs over.
struct Domain {
  int size = 0, most_blocks = 0;  // devices of a group; blocks of a launch that run at once
  std::unique_ptr<int, OfHost> trouble;
  std::map<int, Share> shares;  // by the device's ordinal
};

// By name. They stay: programs hold their addresses.
std::mutex mutex;
std::map<std::string, Domain>& domains() {
  static auto& all = *new std::map<std::string, Domain>();
  return all;
}

class DeviceGuard {
 public:
  DeviceGuard() { cudaGetDevice(&before_); }
  ~DeviceGuard() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// How many blocks of any of the kernels run at once on the current device. It loads them too: loading one later may wait
// for a launch that waits.
int blocks_at_once(int device, int size) {
  int sms = 0, least = std::numeric_limits<int>::max();
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  for (bool half : {false, true}) {
    cudaFuncAttributes facts;
    int blocks = 0;
    const void* kernel = kernel_of(half, size);
    check_cuda(cudaFuncGetAttributes(&facts, kernel), "cudaFuncGetAttributes");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, peer::kThreads, 0), "occupancy");
    least = std::min(least, blocks * sms);
  }
  return least;
}

// The current device may write to the other one.
void give_access(int device, int other) {
  int possible = 0;
  check_cuda(cudaDeviceCanAccessPeer(&possible, device, other), "cudaDeviceCanAccessPeer");
  TVM_FFI_CHECK(possible, RuntimeError) << "GPU " << device << " cannot access the memory of GPU " << other;
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else
    check_cuda(error, "cudaDeviceEnablePeerAccess");
}

// Memory for groups of `size` devices each, whose ordinals follow each other, under this name; the bytes on each device,
// 0 where the name is there already.
int64_t Prepare(ffi::String name, ffi::Array<int64_t> devices, int64_t size) {
  const std::vector<int> ordinals(devices.begin(), devices.end());
  TVM_FFI_CHECK(size >= 2 && size <= peer::kMostDevices && !ordinals.empty() && ordinals.size() % size == 0, ValueError)
      << "groups of " << size << " of " << ordinals.size() << " devices";
  // Launches take only the mutex of the domains: one may be what a GPU waits for while this thread waits for the GPU.
  static std::mutex preparing;
  const std::lock_guard<std::mutex> one_at_a_time(preparing);
  const std::string key(name.data(), name.size());
  if (const std::lock_guard<std::mutex> lock(mutex); domains().count(key)) return 0;
  const DeviceGuard guard;
  Domain domain;
  domain.size = size;
  domain.most_blocks = std::numeric_limits<int>::max();
  for (int ordinal : ordinals) {
    check_cuda(cudaSetDevice(ordinal), "cudaSetDevice");
    domain.most_blocks = std::min(domain.most_blocks, blocks_at_once(ordinal, size));
  }
  const int64_t slots = int64_t{2} * size * domain.most_blocks * peer::kSlotBytes, flags = size * domain.most_blocks;
  for (size_t i = 0; i < ordinals.size(); i++) {
    const auto first = ordinals.begin() + i / size * size;
    Share& share = domain.shares[ordinals[i]];
    share.rank = i % size;
    share.ordinals.assign(first, first + size);
    check_cuda(cudaSetDevice(ordinals[i]), "cudaSetDevice");
    for (int other : share.ordinals)
      if (other != ordinals[i]) give_access(ordinals[i], other);
    share.received = zeros<uint8_t>(slots);
    share.flags = zeros<uint32_t>(flags);
    share.epochs = zeros<uint32_t>(domain.most_blocks);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  int* trouble = nullptr;
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&trouble), 64, cudaHostAllocPortable | cudaHostAllocMapped),
             "cudaHostAlloc");
  domain.trouble.reset(trouble);
  std::fill(trouble, trouble + 16, 0);
  const std::lock_guard<std::mutex> lock(mutex);
  domains().emplace(key, std::move(domain));
  return slots + (flags + domain.most_blocks) * 4;
}

const Domain& domain_of(const ffi::String& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = domains().find(std::string(name.data(), name.size()));
  TVM_FFI_CHECK(found != domains().end(), RuntimeError) << "peer_exchange: nothing is prepared for the GPUs " << name;
  return found->second;  // stays where it is
}

// An earlier launch has given up: says who waited for whom.
void check_trouble(const Domain& domain) {
  const volatile int* trouble = domain.trouble.get();
  TVM_FFI_CHECK(!trouble[0], RuntimeError)
      << "context parallel decode: device " << trouble[1] << " of the axis waited 10 seconds for device " << trouble[2]
      << ", which did not come to the exchange (thread block " << trouble[3] << ", its chunk number "
      << static_cast<uint32_t>(trouble[4]) << "). All devices must run the same exchanges in the same order";
}

// out [rows, heads, v_dim] bfloat16 or float32, lse float32 [rows, heads], sink float32 [heads / size]; merged
// [rows, heads / size, v_dim] and merged_lse. The caller validates dtypes. All devices of a group must launch, in one
// order, and no two launches of a device at once.
void PeerExchange(ffi::TensorView out, ffi::TensorView lse, ffi::Optional<ffi::TensorView> sink, ffi::String name,
                  ffi::TensorView merged, ffi::TensorView merged_lse) {
  const Domain& domain = domain_of(name);
  const int device = out.device().device_id, size = domain.size;
  const auto found = domain.shares.find(device);
  TVM_FFI_CHECK(found != domain.shares.end(), RuntimeError) << "peer_exchange: GPU " << device << " is not among " << name;
  check_trouble(domain);
  const Share& share = found->second;
  const bool half = out.dtype().bits == 16;
  const int64_t rows = out.size(0), heads = out.size(1), bytes = out.size(2) * (half ? 2 : 4), own = heads / size;
  TVM_FFI_CHECK(heads % size == 0 && std::has_single_bit(static_cast<uint64_t>(bytes)) && bytes >= kLeastBytes &&
                    bytes <= kMostBytes,
                ValueError)
      << "peer_exchange: " << heads << " heads of " << bytes << " bytes";
  TVM_FFI_CHECK(rows * heads < int64_t{1} << 31, ValueError) << "peer_exchange: " << rows << " rows";
  if (rows * own == 0) return;
  peer::Call call = {};
  call.out = static_cast<const uint4*>(out.data_ptr());
  call.lse = static_cast<const float*>(lse.data_ptr());
  call.sink = sink.has_value() ? static_cast<const float*>(sink.value().data_ptr()) : nullptr;
  call.merged = static_cast<uint4*>(merged.data_ptr());
  call.merged_lse = static_cast<float*>(merged_lse.data_ptr());
  call.items = rows * own;
  call.heads = heads;
  call.own = own;
  call.piece_shift = std::countr_zero(static_cast<uint64_t>(bytes / 16));
  const int each = peer::kPieces >> call.piece_shift;
  call.chunks = (call.items + each - 1) / each;
  call.rank = share.rank;
  call.size = size;
  call.most_blocks = domain.most_blocks;
  call.patience = kPatience;
  for (int i = 0; i < size; i++) {
    const Share& other = domain.shares.at(share.ordinals[i]);
    call.received[i] = other.received.get();
    call.flags[i] = other.flags.get();
  }
  call.epochs = share.epochs.get();
  call.trouble = domain.trouble.get();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(out.device().device_type, device));
  void* arguments[] = {&call};
  const dim3 grid(std::min(call.chunks, domain.most_blocks));
  check_cuda(cudaLaunchKernel(kernel_of(half, size), grid, dim3(peer::kThreads), arguments, 0, stream), "launch");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, Prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_exchange, PeerExchange);
