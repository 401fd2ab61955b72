// The products of gemm.hpp for AVX-512 with BF16. This file is compiled for these instructions, and its code
// is called only if the CPU has them.
#include "base/cpu/isa.hpp"
#include "nn/kernels/gemm/blocked.hpp"
#include "nn/kernels/gemm/pack_pairs.hpp"
#include "nn/kernels/gemm/vector512.hpp"
#include "nn/kernels/gemm/vector_tiles.hpp"

namespace weft::kernels::gemm {
namespace {

struct Avx512Bf16 : Pairs<1>, Vector512 {
  static constexpr const char* kName = "avx512_bf16";
  // A panel of b, 96 KB, and a block of a, 384 KB, stay in the second-level cache, a block of b, 8 MB, in the
  // third-level cache.
  static constexpr std::int64_t kBlockUnits = 512, kTileRows = 8, kTileVectors = 3, kBlockRows = 192,
                                kBlockColumns = 86 * 48;

  static Vector add_product(Vector x, Vector y, Vector sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
  }
};

}  // namespace

const Kernel* avx512_bf16() noexcept {
  return cpu_isa() >= CpuIsa::avx512_bf16 ? &Blocked<VectorTiles<Avx512Bf16>>::kernel : nullptr;
}

}  // namespace weft::kernels::gemm
