// Top-k of each row of logits and what its positions become, as jax_sparse_mla.indices.topk defines them.
//
// A row's logits compete as 64-bit entries: their key, an unsigned integer in the order of the floats (-0.0 is +0.0,
// NaN below every number), and below it the complement of their place, so that ties go to the lower place and no two
// entries are equal. A row that fits shared memory is loaded as entries; of a longer one only those that reach a
// threshold, which a sample of the row gives, are collected in a single pass. Where the sample misled (too few or too
// many: ties) the selection reads the row itself. Selection: a radix select, 11 bits a round. Few long rows are read by
// clusters of thread blocks, which append to the shared memory of the first of them.

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ffi = tvm::ffi;

namespace {

using Entry = unsigned long long;

constexpr int kBins = 2048;
constexpr int kSample = 4096;  // logits of a row that its threshold is chosen from
constexpr int kPiece = 8;      // of them stand side by side: a sector of 32 bytes
constexpr int kIntMax = 2147483647;

enum Method { kPositions, kPaged, kRagged };

struct Call {
  const void* logits;         // float32 or bfloat16 [rows, columns]
  const int* lengths;         // [rows]
  const int* row_starts;      // [rows] or null
  const int* page_table;      // [num_requests, num_pages], if PAGED
  const int* row_to_request;  // [rows] or null
  const int* offsets;         // [rows], if RAGGED
  int* out;                   // [rows, topk]
  int columns, topk, method, page_size, num_requests, num_pages;
  int page_shift;              // log2 of page_size, or -1
  int last_page, last_offset;  // where the slot INT_MAX lies
  int capacity;  // entries that fit shared memory
};

struct Shared {
  unsigned bins[kBins];
  unsigned warp_sums[32];
  unsigned bin, above, in_bin;  // the bin that holds the k-th entry, how many lie above it and in it
  int found, written;
  float threshold;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ unsigned key_of(float value) {
  int bits = __float_as_int(value);
  int magnitude = bits & 0x7FFFFFFF;
  int key = bits < 0 ? -magnitude : magnitude;
  if (magnitude > 0x7F800000) key = -kIntMax;
  return static_cast<unsigned>(key) ^ 0x80000000u;
}

__device__ __forceinline__ float float_of(unsigned key) {
  int ordered = static_cast<int>(key ^ 0x80000000u);
  return __int_as_float(ordered < 0 ? -ordered | 0x80000000 : ordered);
}

__device__ __forceinline__ Entry entry_of(float value, unsigned place) {
  return static_cast<Entry>(key_of(value)) << 32 | ~place;
}

template <typename T>
struct RowEntries {
  const T* values;
  __device__ __forceinline__ Entry operator()(int i) const { return entry_of(to_float(values[i]), i); }
};

struct ListEntries {
  const Entry* list;
  __device__ __forceinline__ Entry operator()(int i) const { return list[i]; }
};

// Where a bin lies: find_bin's threads read runs of neighbours, and of any run the i-th lie in banks of their own.
__device__ __forceinline__ unsigned at_bin(unsigned bin) { return bin ^ (bin >> 5 & 31); }

// Sets shared.bin, above, in_bin to the bin where the count from the largest on reaches k, and zeroes the bins.
__device__ void find_bin(Shared& shared, int num_bins, unsigned k) {
  int each = num_bins / blockDim.x > 0 ? num_bins / blockDim.x : 1;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int top = num_bins - 1 - static_cast<int>(threadIdx.x) * each;
  unsigned mine = 0;
  if (top >= 0)
    for (int i = 0; i < each; i++) mine += shared.bins[at_bin(top - i)];
  unsigned through = mine;
  for (int step = 1; step < 32; step *= 2) {
    unsigned other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) shared.warp_sums[warp] = through;
  __syncthreads();
  unsigned sum = lane < warp ? shared.warp_sums[lane] : 0;
  unsigned before = __reduce_add_sync(~0u, sum) + through - mine;
  if (top >= 0) {
    bool here = before < k && k <= before + mine;
    for (int i = 0; i < each; i++) {
      unsigned count = shared.bins[at_bin(top - i)];
      shared.bins[at_bin(top - i)] = 0;
      if (here && before < k && k <= before + count) {
        shared.bin = top - i;
        shared.above = before;
        shared.in_bin = count;
      }
      before += count;
    }
  }
  __syncthreads();
}

// Narrows an entry's upper bits, `prefix`, by the kWidth ones from bit kLow on: the entries that share them are those
// around the need-th largest. True if at most `slack` more than needed reach what is known of it.
template <int kLow, int kWidth, typename Source>
__device__ bool narrow(Shared& shared, Source source, int n, int slack, Entry& prefix, int& need) {
  constexpr unsigned kMask = (1u << kWidth) - 1;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    Entry entry = source(i) >> kLow;
    if (kLow + kWidth == 64 || entry >> kWidth == prefix)
      atomicAdd(&shared.bins[at_bin(static_cast<unsigned>(entry) & kMask)], 1u);
  }
  __syncthreads();
  find_bin(shared, 1 << kWidth, need);
  prefix = prefix << kWidth | shared.bin;
  int surplus = static_cast<int>(shared.above + shared.in_bin) - need;
  need -= shared.above;
  return surplus <= slack || kLow == 0;
}

// An entry that at least k and at most k + slack of the n entries reach. shared.bins are zero before and after.
template <typename Source>
__device__ Entry select(Shared& shared, Source source, int n, int k, int slack) {
  Entry prefix = 0;
  if (narrow<53, 11>(shared, source, n, slack, prefix, k)) return prefix << 53;
  if (narrow<42, 11>(shared, source, n, slack, prefix, k)) return prefix << 42;
  if (narrow<32, 10>(shared, source, n, slack, prefix, k)) return prefix << 32;
  // The rest is ties.
  if (narrow<21, 11>(shared, source, n, slack, prefix, k)) return prefix << 21;
  if (narrow<10, 11>(shared, source, n, slack, prefix, k)) return prefix << 10;
  narrow<0, 10>(shared, source, n, slack, prefix, k);
  return prefix;
}

__device__ int index_of(const Call& call, int row, int position) {
  if (call.method == kPaged) {
    int request = call.row_to_request ? call.row_to_request[row] : row;
    // Page sizes are powers of two as a rule.
    int page_at = call.page_shift >= 0 ? position >> call.page_shift : position / call.page_size;
    int offset = position - page_at * call.page_size;
    if (request < 0 || request >= call.num_requests || page_at >= call.num_pages) return -1;
    int page = call.page_table[static_cast<int64_t>(request) * call.num_pages + page_at];
    if (page < 0 || page > call.last_page || (page == call.last_page && offset > call.last_offset)) return -1;
    return page * call.page_size + offset;
  }
  if (call.method == kRagged) {
    int base = call.offsets[row];
    return base < 0 || position > kIntMax - base ? -1 : position + base;
  }
  return position;
}

// Writes the indices of the entries from `least` on; their order is that of arrival. shared.bins are not zero after.
template <typename Source>
__device__ void write_chosen(const Call& call, Shared& shared, Source source, int n, Entry least, int row, int shift) {
  int* out = call.out + static_cast<int64_t>(row) * call.topk;
  int lane = threadIdx.x % 32;
  // Gathered in shared memory first, if they fit, the positions are mapped side by side: one wait for the page table.
  bool gathered = call.topk <= kBins;
#pragma unroll 4
  for (int begin = threadIdx.x - lane; begin < n; begin += blockDim.x) {
    int i = begin + lane;
    Entry entry = i < n ? source(i) : 0;
    bool chosen = i < n && entry >= least;
    unsigned all = __ballot_sync(~0u, chosen);
    int slot = 0;
    if (lane == 0 && all) slot = atomicAdd(&shared.written, __popc(all));
    slot = __shfl_sync(~0u, slot, 0) + __popc(all & ((1u << lane) - 1));
    int position = shift + static_cast<int>(~static_cast<unsigned>(entry));
    if (chosen && gathered) shared.bins[slot] = position;
    if (chosen && !gathered) out[slot] = index_of(call, row, position);
  }
  if (!gathered) return;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < call.topk; i += blockDim.x) out[i] = index_of(call, row, shared.bins[i]);
}

// A float that somewhat more than topk of the n logits reach, by a sample of them, one piece from each of as many equal
// parts. Of a random sample, topk · kSample / n of the topk largest are expected, give or take the root of that: four
// roots more make fewer than topk candidates a matter of one row in tens of thousands.
template <typename T>
__device__ float sample_threshold(Shared& shared, Entry* list, const T* values, int n, int topk) {
  int part = n / (kSample / kPiece);
  for (int i = threadIdx.x; i < kSample; i += blockDim.x) {
    int piece = i / kPiece;
    int jitter = ((piece * 40503 & 0xFFFF) >> 4) % max(part - (kPiece - 1), 1);  // follows no period of the logits
    list[i] = entry_of(to_float(values[piece * part + jitter + i % kPiece]), i);
  }
  __syncthreads();
  float expected = static_cast<float>(topk) * kSample / n;
  int rank = min(static_cast<int>(expected + 4 * sqrtf(expected) + 4), kSample);
  Entry least = select(shared, ListEntries{list}, kSample, rank, rank / 16);
  return float_of(static_cast<unsigned>(least >> 32));
}

template <typename T>
struct Four;
template <>
struct Four<float> {
  float4 x;
  __device__ __forceinline__ float at(int i) const { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
};
template <>
struct Four<__nv_bfloat16> {
  uint2 x;
  __device__ __forceinline__ float at(int i) const {
    unsigned pair = i < 2 ? x.x : x.y;
    return __uint_as_float(i % 2 ? pair & 0xFFFF0000u : pair << 16);
  }
};

// Appends the entries of a warp's hits, bit i of each lane's mask standing for place + i.
template <typename T>
__device__ __forceinline__ void append(unsigned hits, const T* values, int place, int* found, Entry* list,
                                       int capacity) {
  if (!__any_sync(~0u, hits != 0)) return;
  int lane = threadIdx.x % 32;
  int mine = __popc(hits), through = mine;
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  int slot = 0;
  if (lane == 31) slot = atomicAdd(found, through);
  slot = __shfl_sync(~0u, slot, 31) + through - mine;
  for (; hits; hits &= hits - 1, slot++) {
    int i = place + __ffs(hits) - 1;
    if (slot < capacity) list[slot] = entry_of(to_float(values[i]), i);  // in L1
  }
}

// Appends the entries of the places begin ... end - 1 that reach the threshold.
template <typename T>
__device__ void filter(const T* values, int begin, int end, float threshold, int* found, Entry* list, int capacity) {
  constexpr int kUnroll = 4;
  int lane = threadIdx.x % 32;
  // The loads are of four: up to three places before the first whole four, and after the last, go alone.
  int head = (-(reinterpret_cast<uintptr_t>(values + begin) / sizeof(T))) % 4;
  int body = min(begin + head, end);
  int fours = (end - body) / 4, tail = body + 4 * fours;
  if (threadIdx.x < 32) {
    int place = lane < 4 ? begin + lane : tail + lane - 4;
    bool inside = lane < 4 ? place < body : lane < 8 && place < end;
    append(inside && to_float(values[place]) >= threshold ? 1u : 0u, values, place, found, list, capacity);
  }
  const Four<T>* source = reinterpret_cast<const Four<T>*>(values + body);
  int stride = blockDim.x * kUnroll;
  for (int base = (threadIdx.x - lane) * kUnroll; base < fours; base += stride) {
    Four<T> loaded[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; j++)
      if (base + j * 32 + lane < fours) loaded[j] = source[base + j * 32 + lane];
#pragma unroll
    for (int j = 0; j < kUnroll; j++) {
      int four = base + j * 32 + lane;
      unsigned hits = 0;
      if (four < fours) {
#pragma unroll
        for (int i = 0; i < 4; i++) hits |= loaded[j].at(i) >= threshold ? 1u << i : 0u;
      }
      append(hits, values, body + 4 * four, found, list, capacity);
    }
  }
}

// Each thread asks for a line of 128 bytes, the first of them `skip` threads later.
template <typename T>
__device__ void prefetch(const T* from, int count, int skip) {
  int at = (static_cast<int>(threadIdx.x) - skip) * static_cast<int>(128 / sizeof(T));
  if (at >= 0 && at < count) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

template <typename T>
__global__ void __launch_bounds__(1024) topk_kernel(const Call call) {
  extern __shared__ Entry list[];
  __shared__ Shared shared;
  int blocks = 1, block = 0;
#if __CUDA_ARCH__ >= 900
  auto cluster = cooperative_groups::this_cluster();
  blocks = cluster.num_blocks();
  block = cluster.block_rank();
#endif
  int row = blockIdx.x / blocks;

  // Rows and page tables come from memory as a rule, each after a wait for what says where it lies: do not wait.
  prefetch(static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns,
           min(call.columns, call.capacity), 0);
  if (call.method == kPaged && !call.row_to_request && block == 0)
    prefetch(call.page_table + static_cast<int64_t>(row) * call.num_pages, call.num_pages, blockDim.x / 2);

  // The window: n logits from column `first` on, the first of them position `shift`.
  int length = max(call.lengths[row], 0);
  int64_t start = call.row_starts ? call.row_starts[row] : 0;
  int64_t first = max(start, int64_t{0});
  int n = static_cast<int>(max(min(start + length, static_cast<int64_t>(call.columns)) - first, int64_t{0}));
  int shift = static_cast<int>(first - start);
  if (length <= call.topk || n <= call.topk) {  // every position, in order, without a look at the logits
    if (length <= call.topk) shift = 0, n = length;
    for (int i = block * blockDim.x + threadIdx.x; i < call.topk; i += blocks * blockDim.x)
      call.out[static_cast<int64_t>(row) * call.topk + i] = i < n ? index_of(call, row, shift + i) : -1;
    return;
  }
  const T* values = static_cast<const T*>(call.logits) + static_cast<int64_t>(row) * call.columns + first;
  bool fits = n <= call.capacity;
  if (fits && block > 0) return;

  for (int i = threadIdx.x; i < kBins; i += blockDim.x) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.found = shared.written = 0;
  int count = n;
  if (fits) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) list[i] = entry_of(to_float(values[i]), i);
    __syncthreads();
  } else {
    __syncthreads();
    int* found = &shared.found;
    Entry* all = list;
    if (block == 0) {
      float threshold = sample_threshold(shared, list, values, n, call.topk);
      if (threadIdx.x == 0) shared.threshold = threshold;
      __syncthreads();  // and the sample is read
    }
    float threshold;
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      cluster.sync();
      found = cluster.map_shared_rank(found, 0);
      all = cluster.map_shared_rank(all, 0);
      threshold = *cluster.map_shared_rank(&shared.threshold, 0);
    } else
#endif
      threshold = shared.threshold;
    int begin = static_cast<int>(static_cast<int64_t>(n) * block / blocks);
    int end = static_cast<int>(static_cast<int64_t>(n) * (block + 1) / blocks);
    filter(values, begin, end, threshold, found, all, call.capacity);
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) cluster.sync();
#endif
    if (block > 0) return;
    __syncthreads();
    count = shared.found;
  }
  if (count >= call.topk && count <= call.capacity) {
    ListEntries source{list};
    write_chosen(call, shared, source, count, select(shared, source, count, call.topk, 0), row, shift);
  } else {
    RowEntries<T> source{values};
    write_chosen(call, shared, source, n, select(shared, source, n, call.topk, 0), row, shift);
  }
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

// How many logits of a row of so many columns reach its threshold, at most, as a rule.
int expected_candidates(int columns, int topk) {
  double expected = static_cast<double>(topk) * kSample / columns;
  double rank = (expected + 4 * std::sqrt(expected) + 4) * 17 / 16;
  return static_cast<int>(std::min((rank + 3 * std::sqrt(rank)) * columns / kSample, 1e9));
}

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "topk: " << cudaGetErrorString(error);
}

template <typename T>
void launch(Call call, int rows, int device, cudaStream_t stream) {
  int sms = attribute(cudaDevAttrMultiProcessorCount, device);
  int most = (attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - static_cast<int>(sizeof(Shared)) - 1024) / 8;
  // Many rows: several blocks on each multiprocessor, so that one computes while another loads.
  bool few = rows <= sms;
  int capacity = !few ? 5632 : call.columns <= 16384 ? call.columns : 8192;
  capacity = std::max(capacity, expected_candidates(call.columns, call.topk));
  call.capacity = std::max(std::min({capacity, call.columns, most}), 1);
  int cluster = 1;
  if (call.columns > call.capacity && attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9)
    while (cluster < 8 && rows * cluster * 2 <= sms) cluster *= 2;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows * cluster);
  config.blockDim = dim3(rows * cluster <= sms ? 1024 : rows * cluster <= 2 * sms ? 512 : 256);
  config.dynamicSmemBytes = call.capacity * sizeof(Entry);
  config.stream = stream;
  cudaLaunchAttribute shape;
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = cluster;
  shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  config.attrs = &shape;
  config.numAttrs = cluster > 1 ? 1 : 0;
  check_cuda(cudaFuncSetAttribute(topk_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, config.dynamicSmemBytes));
  check_cuda(cudaLaunchKernelEx(&config, topk_kernel<T>, call));
}

const int* data(const ffi::Optional<ffi::TensorView>& x) {
  return x.has_value() ? static_cast<const int*>(x.value().data_ptr()) : nullptr;
}

// `out` int32 [rows, topk] is written; the other tensors are as in Call. Sizes and dtypes are the caller's to check.
void Topk(ffi::TensorView logits, ffi::TensorView lengths, ffi::Optional<ffi::TensorView> row_starts,
          ffi::Optional<ffi::TensorView> page_table, ffi::Optional<ffi::TensorView> row_to_request,
          ffi::Optional<ffi::TensorView> offsets, int64_t page_size, ffi::TensorView out) {
  Call call = {};
  call.logits = logits.data_ptr();
  call.lengths = static_cast<const int*>(lengths.data_ptr());
  call.row_starts = data(row_starts);
  call.page_table = data(page_table);
  call.row_to_request = data(row_to_request);
  call.offsets = data(offsets);
  call.out = static_cast<int*>(out.data_ptr());
  call.columns = static_cast<int>(logits.size(1));
  call.topk = static_cast<int>(out.size(1));
  call.page_size = static_cast<int>(page_size);
  call.page_shift = page_size & (page_size - 1) ? -1 : static_cast<int>(std::log2(page_size));
  call.last_page = kIntMax / call.page_size;
  call.last_offset = kIntMax % call.page_size;
  if (page_table.has_value()) {
    call.method = kPaged;
    call.num_requests = static_cast<int>(page_table.value().size(0));
    call.num_pages = static_cast<int>(page_table.value().size(1));
  } else {
    call.method = offsets.has_value() ? kRagged : kPositions;
  }
  int rows = static_cast<int>(logits.size(0)), device = logits.device().device_id;
  if (!rows) return;
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(logits.device().device_type, device));
  if (logits.dtype().code == kDLBfloat)
    launch<__nv_bfloat16>(call, rows, device, stream);
  else
    launch<float>(call, rows, device, stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk, Topk);
