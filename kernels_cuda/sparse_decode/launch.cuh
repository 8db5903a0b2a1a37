// The kernels as the host knows them.

#pragma once

#include "shared.cuh"

namespace sparse_decode {

struct Launch {
  void (*kernel)(Call);
  int bytes;  // of shared memory
};

// The kernels of a format: for many rows, without and with lengths; for few rows with 16 or 32 heads; the wide one; for
// short rows, which a format without it has empty.
struct Kernels {
  Launch many, by_lengths, few_16, few_32, wide, window;
};

template <Format kFormat>
Kernels kernels_of();

}  // namespace sparse_decode
