#include "kernel.cuh"

namespace sparse_decode {

SPARSE_DECODE_KERNELS(sparse_decode_v4_bf16, kV4Bf16)

}  // namespace sparse_decode
