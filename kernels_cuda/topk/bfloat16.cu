#include "launch.cuh"

namespace topk_kernels {

template cudaError_t launch<__nv_bfloat16>(Call, int, int, cudaStream_t);

}  // namespace topk_kernels
