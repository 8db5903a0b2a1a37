// Tensor maps, which `copy_box` copies tiles by.

#pragma once

#ifndef SM90_DEVICE
#include <cuda.h>

#include <cstdint>
#include <string>
#endif

namespace tensor_map {

constexpr int kLine = 128;  // bytes of a line of a tile

// How tiles of some lines of 128 bytes are copied: sizes and strides, in bytes, of the axes after a line's bytes, and how
// much of each a tile has.
template <int kAxes>
struct Tiles {
  const void* data;
  int64_t sizes[kAxes], strides[kAxes];
  int tile[kAxes];
};

#ifndef SM90_DEVICE  // tests have maps of their own

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The map, whose places in shared memory are permuted as matrix products read them; or `why` not.
template <int kAxes>
CUtensorMap of(const Tiles<kAxes>& tiles, std::string& why) {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  CUtensorMap map = {};
  if (!encode) {
    why = "the driver has no cuTensorMapEncodeTiled";
    return map;
  }
  cuuint64_t sizes[kAxes + 1] = {kLine}, strides[kAxes];
  cuuint32_t box[kAxes + 1] = {kLine}, steps[kAxes + 1] = {1};
  for (int i = 0; i < kAxes; i++) {
    sizes[i + 1] = tiles.sizes[i], strides[i] = tiles.strides[i];
    box[i + 1] = tiles.tile[i], steps[i + 1] = 1;
  }
  CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kAxes + 1, const_cast<void*>(tiles.data), sizes, strides,
                           box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) why = "no tensor map, error " + std::to_string(static_cast<int>(result));
  return map;
}

#endif

}  // namespace tensor_map
