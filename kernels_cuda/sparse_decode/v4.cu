#include "kernel.cuh"

namespace sparse_decode {

SPARSE_DECODE_KERNELS(sparse_decode_v4, kV4)

}  // namespace sparse_decode
