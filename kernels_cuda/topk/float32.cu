#include "launch.cuh"

namespace topk_kernels {

template cudaError_t launch<float>(Call, int, int, cudaStream_t);

}  // namespace topk_kernels
