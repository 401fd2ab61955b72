// The products of gemm.hpp for AVX2 and FMA. This file is compiled for these instructions, and its code is
// called only if the CPU has them.
#include "base/cpu/isa.hpp"
#include "nn/kernels/gemm/blocked.hpp"
#include "nn/kernels/gemm/pack.hpp"
#include "nn/kernels/gemm/vector_tiles.hpp"

namespace weft::kernels::gemm {
namespace {

struct Avx2 : Floats {
  static constexpr const char* kName = "avx2";
  using Vector = __m256;
  // A panel of b, 24 KB, stays in the first-level cache, a block of a, 192 KB, in the second-level cache, a
  // block of b, 4 MB, in the third-level cache.
  static constexpr std::int64_t kLanes = 8, kTileRows = 4, kTileVectors = 3, kBlockRows = 192,
                                kBlockColumns = 172 * 24;

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static Vector load_aligned(const float* from) { return _mm256_load_ps(from); }
  static void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
  static void stream(float* to, Vector x) { _mm256_stream_ps(to, x); }
  static Vector fill(float x) { return _mm256_set1_ps(x); }
  static Vector multiply_add(Vector x, Vector y, Vector z) { return _mm256_fmadd_ps(x, y, z); }
  static Vector multiply(Vector x, Vector y) { return _mm256_mul_ps(x, y); }
  static Vector add_product(Vector x, Vector y, Vector sum) { return multiply_add(x, y, sum); }
};

}  // namespace

const Kernel* avx2() noexcept {
  return cpu_isa() >= CpuIsa::avx2 ? &Blocked<VectorTiles<Avx2>>::kernel : nullptr;
}

}  // namespace weft::kernels::gemm
