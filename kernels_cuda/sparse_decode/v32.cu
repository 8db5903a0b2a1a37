#include "kernel.cuh"

namespace sparse_decode {

SPARSE_DECODE_KERNELS(sparse_decode_v32, kV32)

}  // namespace sparse_decode
