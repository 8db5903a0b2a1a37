#include "launch.cuh"

namespace expert_tiles {

template void launch<Shape<false, 1, 128>>(Call, Operand, int, cudaStream_t, std::string&);

}  // namespace expert_tiles
