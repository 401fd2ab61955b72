// This file is compiled for AVX-512, which the packing needs.
#include "nn/emulated_tiles.hpp"

#include <immintrin.h>

#include <cstring>

#include "base/cpu/isa.hpp"
#include "nn/kernels/gemm/blocked.hpp"
#include "nn/kernels/gemm/matrix_tiles.hpp"

namespace weft::kernels::gemm {
namespace {

struct Emulated {
  static constexpr const char* kName = "emulated";

  struct Register {
    std::uint32_t row[16][16];
  };
  static inline thread_local Register registers[8];

  static void configure() { std::memset(registers, 0xff, sizeof registers); }  // NaN
  static void release() {}

  template <int c>
  static void zero() {
    std::memset(&registers[c], 0, sizeof registers[c]);
  }
  template <int a>
  static void load(const float* from, std::int64_t step) {
    for (int i = 0; i < 16; ++i)
      std::memcpy(registers[a].row[i], reinterpret_cast<const char*>(from) + i * step, 64);
  }
  template <int c>
  static void store(float* to, std::int64_t step) {
    for (int i = 0; i < 16; ++i) std::memcpy(reinterpret_cast<char*>(to) + i * step, registers[c].row[i], 64);
  }

  static float as_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  // While this object exists, the CPU takes and gives numbers below 2^-126 as 0.
  struct WithoutSubnormals {
    WithoutSubnormals() {
      _mm_setcsr(before | 0x8040u);
      __asm__ volatile("" : : : "memory");
    }
    ~WithoutSubnormals() {
      __asm__ volatile("" : : : "memory");
      _mm_setcsr(before);
    }
    unsigned before = _mm_getcsr();
  };
  // TDPBF16PS, as Intel's manual describes it.
  template <int c, int a, int b>
  static void multiply() {
    const WithoutSubnormals rounding;
    for (int i = 0; i < 16; ++i) {
      float even[16] = {}, odd[16] = {};
      for (int q = 0; q < 16; ++q) {
        const std::uint32_t x = registers[a].row[i][q];
        for (int j = 0; j < 16; ++j) {
          const std::uint32_t y = registers[b].row[q][j];
          even[j] = __builtin_fmaf(as_float(x << 16), as_float(y << 16), even[j]);
          odd[j] = __builtin_fmaf(as_float(x & 0xffff0000u), as_float(y & 0xffff0000u), odd[j]);
        }
      }
      for (int j = 0; j < 16; ++j) {
        const float sum = as_float(registers[c].row[i][j]) + (even[j] + odd[j]);
        std::memcpy(&registers[c].row[i][j], &sum, sizeof sum);
      }
    }
  }
};

}  // namespace
}  // namespace weft::kernels::gemm

namespace weft::kernels::test {

const gemm::Kernel* emulated_matrix_tiles() noexcept {
  return cpu_isa() >= CpuIsa::avx512 ? &gemm::Blocked<gemm::MatrixTiles<gemm::Emulated>>::kernel : nullptr;
}

}  // namespace weft::kernels::test
