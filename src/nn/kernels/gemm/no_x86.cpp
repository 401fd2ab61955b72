// gemm.hpp for CPUs that are no x86.
#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::gemm {

const Kernel* avx2() noexcept { return nullptr; }
const Kernel* avx512() noexcept { return nullptr; }
const Kernel* avx512_bf16() noexcept { return nullptr; }
const Kernel* amx() noexcept { return nullptr; }

}  // namespace weft::kernels::gemm
