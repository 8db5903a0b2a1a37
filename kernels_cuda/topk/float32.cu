#include "launch.cuh"

template cudaError_t topk::launch<float>(topk::Call, int, int, cudaStream_t);
