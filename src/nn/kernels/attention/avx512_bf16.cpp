// products.hpp in bf16 for AVX-512 with BF16. This file is compiled for these instructions, and its code is
// called only if the CPU has them.
#include "base/cpu/isa.hpp"
#include "nn/kernels/attention/tiles.hpp"

namespace weft::kernels::blocks {
namespace {

struct Pairs {
  static constexpr std::int64_t kSteps = 2;

  static __m512 multiply_add(__m512 a, __m512 b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static __m512 along(const float* from, std::int64_t left) {
    return (__m512)_mm512_cvtne2ps_pbh(
        left > kLanes ? load_first(from + kLanes, left - kLanes) : _mm512_setzero_ps(),
        load_first(from, left));
  }
  static __m512 down(__m512 first, __m512 second) {
    // Interleaves the halves of one register.
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
  }
};

}  // namespace

const Kernel* avx512_bf16() noexcept {
  return cpu_isa() >= CpuIsa::avx512_bf16 ? &Tiles<Pairs>::kernel : nullptr;
}

}  // namespace weft::kernels::blocks
