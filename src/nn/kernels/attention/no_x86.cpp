// products.hpp for CPUs that are no x86.
#include "nn/kernels/attention/products.hpp"

namespace weft::kernels::blocks {

const Kernel* avx512() noexcept { return nullptr; }
const Kernel* avx512_bf16() noexcept { return nullptr; }

}  // namespace weft::kernels::blocks
