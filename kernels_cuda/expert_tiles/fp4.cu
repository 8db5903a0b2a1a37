#include "launch.cuh"

namespace expert_tiles {

template void launch<Shape<true>>(Call, Operand, int, cudaStream_t, std::string&);

}  // namespace expert_tiles
