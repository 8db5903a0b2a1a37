#include "kernel.cuh"

namespace sparse_decode {

SPARSE_DECODE_KERNELS(sparse_decode_v41_fp4, kV41Fp4)

}  // namespace sparse_decode
