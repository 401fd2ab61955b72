// emulated_tiles.hpp for CPUs that are no x86.
#include "nn/emulated_tiles.hpp"

namespace weft::kernels::test {

const gemm::Kernel* emulated_matrix_tiles() noexcept { return nullptr; }

}  // namespace weft::kernels::test
