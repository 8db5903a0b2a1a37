#include "launch.cuh"

template cudaError_t topk::launch<__nv_bfloat16>(topk::Call, int, int, cudaStream_t);
