// gemm.hpp where the compiler's target has no AVX2.
#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::gemm {

bool has_avx2() noexcept { return false; }
std::int64_t avx2_scratch(std::int64_t, std::int64_t) noexcept { return 0; }
void avx2(const Product&, float*) noexcept {}

}  // namespace weft::kernels::gemm
