// Chooses and launches the kernels for logits of one type.

#pragma once

#include <algorithm>
#include <cmath>

#include "held.cuh"

namespace topk_kernels {

inline int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

// An upper estimate of how many logits of a row of so many columns reach its threshold.
inline int expected_candidates(int columns, int topk) {
  double size = sample_size(columns), expected = topk * size / columns;
  double rank = (expected + 4 * std::sqrt(expected) + 4) * 17 / 16;
  return static_cast<int>(std::min((rank + 3 * std::sqrt(rank)) * columns / size, 1e9));
}

// Whether the kernel that holds keys is the sooner one. Where topk is a large share of a row, most keys are candidates.
inline bool keys_pay(const Call& call, bool at_once) {  // at_once: all rows are worked on at the same time
  return call.columns >= (at_once ? std::max(8 * call.topk, 6144) : 3 * call.topk);
}

inline cudaError_t launch_clusters(void (*kernel)(Call), const Call& call, int rows, int cluster, int threads,
                                   int bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows * cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute shape;
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = cluster;
  shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  config.attrs = &shape;
  config.numAttrs = cluster > 1 ? 1 : 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return error == cudaSuccess ? cudaLaunchKernelEx(&config, kernel, call) : error;
}

template <typename T>
cudaError_t launch(Call call, int rows, int device, cudaStream_t stream) {
  int sms = attribute(cudaDevAttrMultiProcessorCount, device);
  int most = (attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - static_cast<int>(sizeof(Shared)) - 1024) / 8;
  bool at_once = rows <= 2 * sms;
  if (call.columns <= kShort && call.topk <= kBins) {
    if (at_once)
      topk_short_kernel<T, kFewThreads><<<rows, kFewThreads, 0, stream>>>(call);
    else
      topk_short_kernel<T, kManyThreads><<<rows, kManyThreads, 0, stream>>>(call);
    return cudaGetLastError();
  }
  bool clusters = attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
  auto cluster_above = [&](int columns) {  // how many blocks share a row that has more
    int cluster = 1;
    while (clusters && call.columns > columns && cluster < 8 && rows * cluster * 2 <= sms) cluster *= 2;
    return cluster;
  };
  int cluster = cluster_above(kAlone);
  bool holds = call.topk <= kBins && keys_pay(call, at_once) && call.columns <= kMostHeld * cluster;
  int held = holds ? held_bytes(call.columns, cluster) : 0;
  if (holds && held <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    int together = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / (held + 1024);
    if (rows * cluster <= sms) together = 1;
    int threads = together >= 4 ? 256 : together >= 2 ? 512 : 1024;
    return launch_clusters(topk_held_kernel<T>, call, rows, cluster, threads, held, stream);
  }

  // Many rows run in several blocks on each multiprocessor, so that one computes while another loads.
  bool few = rows <= sms;
  int capacity = !few ? 5504 : call.columns <= 16384 ? call.columns : 8192;
  capacity = std::max(capacity, expected_candidates(call.columns, call.topk));
  int segments = (call.columns + 2) / kSegment + 1;
  if (segments > most / 8) segments = 0;
  call.capacity = std::max(std::min({capacity, call.columns, (most - segments) / 33 * 32}), 1);
  call.segments = call.columns > call.capacity ? segments : 0;
  cluster = cluster_above(call.capacity);
  int entries = shared_entries(call);
  bool one = rows * cluster <= sms || most < 2 * entries;  // thread block on a multiprocessor
  bool two = rows * cluster <= 2 * sms || most < 4 * entries;
  int bytes = entries * static_cast<int>(sizeof(Entry));
  return launch_clusters(topk_kernel<T>, call, rows, cluster, one ? 1024 : two ? 512 : 256, bytes, stream);
}

}  // namespace topk
