#include "launch.cuh"

namespace expert_tiles {

template void launch<Shape<true, 2, 128>>(Call, Operand, int, cudaStream_t, std::string&);

}  // namespace expert_tiles
