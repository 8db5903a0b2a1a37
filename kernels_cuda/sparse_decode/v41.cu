#include "kernel.cuh"

namespace sparse_decode {

SPARSE_DECODE_KERNELS(sparse_decode_v41, kV41)

}  // namespace sparse_decode
