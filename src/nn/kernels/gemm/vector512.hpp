// The vectors of vector_tiles.hpp that have 512 bits, for sets with AVX-512. All code is in an unnamed
// namespace, as in blocked.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace weft::kernels::gemm {
namespace {

struct Vector512 {
  using Vector = __m512;
  static constexpr std::int64_t kLanes = 16;

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static Vector load_aligned(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
  static void stream(float* to, Vector x) { _mm512_stream_ps(to, x); }
  static Vector fill(float x) { return _mm512_set1_ps(x); }
  static Vector multiply_add(Vector x, Vector y, Vector z) { return _mm512_fmadd_ps(x, y, z); }
  static Vector multiply(Vector x, Vector y) { return _mm512_mul_ps(x, y); }
};

}  // namespace
}  // namespace weft::kernels::gemm
