// Stands for CUDA's header: a tensor of up to five axes, the first one of bytes, and the box of it that a copy takes.

#pragma once

#include <cstdint>

struct CUtensorMap {
  const uint8_t* data;
  int axes;
  int64_t sizes[5], strides[5];
  int box[5];
};
