// The products of gemm.hpp for AMX with BF16. This file is compiled for AVX-512, and its code is called only
// if the CPU has that and AMX, and the operating system lets this process use AMX (base/cpu/isa.cpp).
#include "base/cpu/isa.hpp"
#include "nn/kernels/gemm/blocked.hpp"
#include "nn/kernels/gemm/matrix_tiles.hpp"

namespace weft::kernels::gemm {
namespace {

// The instructions are in assembly language. The intrinsics of the compiler's header take numbers of
// registers only as literals, and need a flag for the whole file.
struct Amx {
  static constexpr const char* kName = "amx";

  // The operand of LDTILECFG.
  struct Configuration {
    std::uint8_t palette = 1, first_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Configuration) == 64);

  static void configure() {
    alignas(64) static constexpr Configuration configuration{};
    __asm__ volatile("ldtilecfg %0" : : "m"(configuration));
  }
  static void release() { __asm__ volatile("tilerelease" : :); }
  template <int c>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(c));
  }
  template <int a>
  static void load(const float* from, std::int64_t step) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(step), "i"(a) : "memory");
  }
  template <int c>
  static void store(float* to, std::int64_t step) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(step), "i"(c) : "memory");
  }
  template <int c, int a, int b>
  static void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

}  // namespace

const Kernel* amx() noexcept {
  return cpu_isa() >= CpuIsa::amx ? &Blocked<MatrixTiles<Amx>>::kernel : nullptr;
}

}  // namespace weft::kernels::gemm
