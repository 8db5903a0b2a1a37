#include "launch.cuh"

namespace expert_tiles {

template void launch<Shape<false>>(Call, Operand, int, cudaStream_t, std::string&);

}  // namespace expert_tiles
