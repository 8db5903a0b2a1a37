// The kernels as the host knows them.

#pragma once

#include <algorithm>

#include "kernel.cuh"

namespace expert_tiles {

struct Operand {
  const void *x, *values;
};

// Launches the kernel of a shape on so many multiprocessors; `why` is what hinders it, or stays empty.
template <typename Shape>
void launch(Call call, Operand given, int sms, cudaStream_t stream, std::string& why) {
  set_maps<Shape>(call, given.x, given.values, [&](const Tiles<2>& tiles) { return tensor_map::of(tiles, why); });
  if (!why.empty()) return;
  int64_t tiles = int64_t{divided_up(call.n, kOut)} * call.rows;  // at most
  int blocks = static_cast<int>(std::min<int64_t>(tiles, sms));
  auto kernel = expert_tiles_kernel<Shape>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Shape>);
  if (error == cudaSuccess) {
    kernel<<<blocks, Shape::kThreads, kSharedBytes<Shape>, stream>>>(call);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) why = cudaGetErrorString(error);
}

}  // namespace expert_tiles
