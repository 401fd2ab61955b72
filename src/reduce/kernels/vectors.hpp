// Vectors of the widest kind that the instruction set has, and what the hardware tells of floats. Part of
// reduce_kernels.hpp, which tells the story.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define WEFT_INLINE inline __attribute__((always_inline))

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a pair's even element is the low half");

namespace weft {
namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// W elements in compiler vectors; one element is the plain type, so that the same expressions serve both.
template <class T, int W>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * W)));
};
template <class T>
struct VectorOf<T, 1> {
  using type = T;
};
template <class T, int W>
using Vec = typename VectorOf<T, W>::type;

template <class To, int W, class From>
WEFT_INLINE Vec<To, W> convert(From x) {
  if constexpr (W == 1) {
    return static_cast<To>(x);
  } else {
    return __builtin_convertvector(x, Vec<To, W>);
  }
}

template <class To, class From>
WEFT_INLINE To bits_as(From x) {
  return __builtin_bit_cast(To, x);
}

// False: none of these floats is a NaN.
template <class V>
WEFT_INLINE bool may_hold_nan([[maybe_unused]] V a, [[maybe_unused]] V b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64)
    return _mm512_cmp_ps_mask(bits_as<__m512>(a), bits_as<__m512>(b), _CMP_UNORD_Q) != 0;
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) == 32)
    return _mm256_movemask_ps(_mm256_cmp_ps(bits_as<__m256>(a), bits_as<__m256>(b), _CMP_UNORD_Q)) != 0;
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16)
    return _mm_movemask_ps(_mm_cmpunord_ps(bits_as<__m128>(a), bits_as<__m128>(b))) != 0;
#endif
#if defined(__aarch64__)
  if constexpr (sizeof(V) == 16) {
    const auto x = bits_as<float32x4_t>(a), y = bits_as<float32x4_t>(b);
    return vminvq_u32(vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y))) == 0;
  }
#endif
  return true;
}

#if defined(__AVX512BF16__)
// False: the hardware rounds these floats to bf16 as the code below does. It takes subnormals for zeros.
template <class V>
WEFT_INLINE bool special(V a, V b) {
  constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80;
  constexpr int kSpecial = kQuietNan | kSubnormal | kSignallingNan;
  return _kortestz_mask16_u8(_mm512_fpclass_ps_mask(bits_as<__m512>(a), kSpecial),
                             _mm512_fpclass_ps_mask(bits_as<__m512>(b), kSpecial)) == 0;
}

// The even elements in one vector and the odd ones in another become pairs of neighbours.
template <class V>
WEFT_INLINE __m512i rounded_by_hardware(V even, V odd) {
  using Halves = Vec<std::uint16_t, 32>;
  constexpr Halves kByTurns = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto apart = bits_as<__m512i>(_mm512_cvtne2ps_pbh(bits_as<__m512>(odd), bits_as<__m512>(even)));
  return _mm512_maskz_permutexvar_epi16(~__mmask32{0}, bits_as<__m512i>(kByTurns), apart);
}
#endif

}  // namespace
}  // namespace weft
