// The products of gemm.hpp for AVX-512. This file is compiled for AVX-512, and its code is called only if the
// CPU has it.
#include "base/cpu/isa.hpp"
#include "nn/kernels/gemm/blocked.hpp"
#include "nn/kernels/gemm/pack.hpp"
#include "nn/kernels/gemm/vector512.hpp"
#include "nn/kernels/gemm/vector_tiles.hpp"

namespace weft::kernels::gemm {
namespace {

struct Avx512 : Floats, Vector512 {
  static constexpr const char* kName = "avx512";
  // A panel of b, 48 KB, and a block of a, 192 KB, stay in the second-level cache, a block of b, 4 MB, in the
  // third-level cache. 24 sums, three vectors of b and one of a are in registers.
  static constexpr std::int64_t kTileRows = 8, kTileVectors = 3, kBlockRows = 192, kBlockColumns = 86 * 48;

  static Vector add_product(Vector x, Vector y, Vector sum) { return multiply_add(x, y, sum); }
};

}  // namespace

const Kernel* avx512() noexcept {
  return cpu_isa() >= CpuIsa::avx512 ? &Blocked<VectorTiles<Avx512>>::kernel : nullptr;
}

}  // namespace weft::kernels::gemm
