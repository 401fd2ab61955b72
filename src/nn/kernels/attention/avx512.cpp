// products.hpp in f32 for AVX-512. This file is compiled for AVX-512, and its code is called only if the CPU
// has it.
#include "base/cpu/isa.hpp"
#include "nn/kernels/attention/tiles.hpp"

namespace weft::kernels::blocks {
namespace {

struct Floats {
  static constexpr std::int64_t kSteps = 1;

  static __m512 multiply_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
  static __m512 along(const float* from, std::int64_t left) { return load_first(from, left); }
};

}  // namespace

const Kernel* avx512() noexcept { return cpu_isa() >= CpuIsa::avx512 ? &Tiles<Floats>::kernel : nullptr; }

}  // namespace weft::kernels::blocks
