#include "kernel.cuh"

namespace sparse_decode {

SPARSE_DECODE_KERNELS(sparse_decode_v32_bf16, kV32Bf16)

}  // namespace sparse_decode
