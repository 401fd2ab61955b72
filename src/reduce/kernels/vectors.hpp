// Vectors of the widest kind that the instruction set has, and what the hardware reports about floats. Part
// of reduce_kernels.hpp, which explains the design.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

// A compiler vector of W elements. For one element it is the plain type, so that one expression works for
// both.
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

// Conversions that g++ 12 makes by splitting vectors into halves and joining them, or without vectors at all.
// (The masked forms of the intrinsics are used because g++ 12 warns about the other forms.)
template <int W>
WEFT_INLINE Vec<double, W> to_f64(Vec<float, W> x) {
#if defined(__AVX512F__)
  if constexpr (W == 8) return bits_as<Vec<double, W>>(_mm512_maskz_cvtps_pd(0xff, bits_as<__m256>(x)));
#endif
#if defined(__AVX__)
  if constexpr (W == 4) return bits_as<Vec<double, W>>(_mm256_cvtps_pd(bits_as<__m128>(x)));
#endif
  return convert<double, W>(x);
}
template <int W>
WEFT_INLINE Vec<double, W> to_f64(Vec<std::int32_t, W> x) {
#if defined(__AVX512F__)
  if constexpr (W == 8) return bits_as<Vec<double, W>>(_mm512_maskz_cvtepi32_pd(0xff, bits_as<__m256i>(x)));
#endif
#if defined(__AVX__)
  if constexpr (W == 4) return bits_as<Vec<double, W>>(_mm256_cvtepi32_pd(bits_as<__m128i>(x)));
#endif
  return convert<double, W>(x);
}
template <int W>
WEFT_INLINE Vec<float, W> to_f32(Vec<double, W> x) {
#if defined(__AVX512F__)
  if constexpr (W == 8) return bits_as<Vec<float, W>>(_mm512_maskz_cvtpd_ps(0xff, bits_as<__m512d>(x)));
#endif
#if defined(__AVX__)
  if constexpr (W == 4) return bits_as<Vec<float, W>>(_mm256_cvtpd_ps(bits_as<__m256d>(x)));
#endif
  return convert<float, W>(x);
}

// Widens integers of 8 and 16 bits to 32 bits, with their sign.
template <int W, class T>
WEFT_INLINE Vec<std::int32_t, W> to_i32(Vec<T, W> x) {
  constexpr bool kSigned = static_cast<T>(-1) < 0, kByte = sizeof(T) == 1;
  using Ints [[maybe_unused]] = Vec<std::int32_t, W>;
#if defined(__AVX512F__)
  if constexpr (W == 16 && kByte) {
    const auto bytes = bits_as<__m128i>(x);
    return bits_as<Ints>(kSigned ? _mm512_maskz_cvtepi8_epi32(0xffff, bytes)
                                 : _mm512_maskz_cvtepu8_epi32(0xffff, bytes));
  }
  if constexpr (W == 16 && !kByte) {
    const auto shorts = bits_as<__m256i>(x);
    return bits_as<Ints>(kSigned ? _mm512_maskz_cvtepi16_epi32(0xffff, shorts)
                                 : _mm512_maskz_cvtepu16_epi32(0xffff, shorts));
  }
#elif defined(__AVX2__)
  if constexpr (W == 8 && kByte) {
    const auto bytes = _mm_cvtsi64_si128(bits_as<long long>(x));
    return bits_as<Ints>(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
  }
  if constexpr (W == 8 && !kByte) {
    const auto shorts = bits_as<__m128i>(x);
    return bits_as<Ints>(kSigned ? _mm256_cvtepi16_epi32(shorts) : _mm256_cvtepu16_epi32(shorts));
  }
#endif
  if constexpr (!kSigned) {
    return convert<std::int32_t, W>(x);
  } else {  // widened as unsigned, because g++ has no vector code for signed bytes
    using U = std::conditional_t<kByte, std::uint8_t, std::uint16_t>;
    constexpr std::int32_t kTop = std::int32_t{1} << (8 * sizeof(T) - 1);
    return (convert<std::int32_t, W>(bits_as<Vec<U, W>>(x)) ^ kTop) - kTop;
  }
}
// Returns the low 8 or 16 bits of each integer.
template <class U, int W>
WEFT_INLINE Vec<U, W> low_bits(Vec<std::int32_t, W> x) {
#if defined(__AVX512F__)
  if constexpr (W == 16 && sizeof(U) == 1)
    return bits_as<Vec<U, W>>(_mm512_maskz_cvtepi32_epi8(0xffff, bits_as<__m512i>(x)));
  if constexpr (W == 16 && sizeof(U) == 2)
    return bits_as<Vec<U, W>>(_mm512_maskz_cvtepi32_epi16(0xffff, bits_as<__m512i>(x)));
#endif
  return convert<U, W>(x);
}

// Joins two halves, the lower first.
template <class T, int W>
WEFT_INLINE Vec<T, W> joined(Vec<T, W / 2> low, Vec<T, W / 2> high) {
#if defined(__AVX512F__)
  if constexpr (sizeof low == 32)
    return bits_as<Vec<T, W>>(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(bits_as<__m256i>(low)),
                                                       bits_as<__m256i>(high), 1));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof low == 16)
    return bits_as<Vec<T, W>>(_mm256_set_m128i(bits_as<__m128i>(high), bits_as<__m128i>(low)));
#endif
  Vec<T, W> both;
  __builtin_memcpy(&both, &low, sizeof low);
  __builtin_memcpy(reinterpret_cast<char*>(&both) + sizeof low, &high, sizeof high);
  return both;
}

// Returns false if none of these floats, of type T, is a NaN.
template <class T, class V>
WEFT_INLINE bool may_hold_nan([[maybe_unused]] V a, [[maybe_unused]] V b) {
  if constexpr (sizeof(V) == sizeof(T)) return a != a || b != b;
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && sizeof(T) == 8)
    return _mm512_cmp_pd_mask(bits_as<__m512d>(a), bits_as<__m512d>(b), _CMP_UNORD_Q) != 0;
  if constexpr (sizeof(V) == 64)
    return _mm512_cmp_ps_mask(bits_as<__m512>(a), bits_as<__m512>(b), _CMP_UNORD_Q) != 0;
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) == 32 && sizeof(T) == 8)
    return _mm256_movemask_pd(_mm256_cmp_pd(bits_as<__m256d>(a), bits_as<__m256d>(b), _CMP_UNORD_Q)) != 0;
  if constexpr (sizeof(V) == 32)
    return _mm256_movemask_ps(_mm256_cmp_ps(bits_as<__m256>(a), bits_as<__m256>(b), _CMP_UNORD_Q)) != 0;
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16 && sizeof(T) == 8)
    return _mm_movemask_pd(_mm_cmpunord_pd(bits_as<__m128d>(a), bits_as<__m128d>(b))) != 0;
  if constexpr (sizeof(V) == 16)
    return _mm_movemask_ps(_mm_cmpunord_ps(bits_as<__m128>(a), bits_as<__m128>(b))) != 0;
#endif
#if defined(__aarch64__)
  if constexpr (sizeof(V) == 16 && sizeof(T) == 8) {
    const auto x = bits_as<float64x2_t>(a), y = bits_as<float64x2_t>(b);
    return vminvq_u32(vreinterpretq_u32_u64(vandq_u64(vceqq_f64(x, x), vceqq_f64(y, y)))) == 0;
  }
  if constexpr (sizeof(V) == 16) {
    const auto x = bits_as<float32x4_t>(a), y = bits_as<float32x4_t>(b);
    return vminvq_u32(vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y))) == 0;
  }
#endif
  return true;
}

// Whether the hardware has a fused multiply-add for f64 in vectors like V.
#if defined(__AVX512F__)
template <class V>
constexpr bool kFuses = sizeof(V) == 64;
#elif defined(__AVX__) && defined(__FMA__)
template <class V>
constexpr bool kFuses = sizeof(V) == 32;
#else
template <class V>
constexpr bool kFuses = false;
#endif

// If kFuses: x y - z and z - x y, rounded once.
template <class V>
WEFT_INLINE V product_minus(V x, V y, V z) {
#if defined(__AVX512F__)
  return bits_as<V>(_mm512_fmsub_pd(bits_as<__m512d>(x), bits_as<__m512d>(y), bits_as<__m512d>(z)));
#elif defined(__AVX__) && defined(__FMA__)
  return bits_as<V>(_mm256_fmsub_pd(bits_as<__m256d>(x), bits_as<__m256d>(y), bits_as<__m256d>(z)));
#else
  return x * y - z;
#endif
}
template <class V>
WEFT_INLINE V minus_product(V z, V x, V y) {
#if defined(__AVX512F__)
  return bits_as<V>(_mm512_fnmadd_pd(bits_as<__m512d>(x), bits_as<__m512d>(y), bits_as<__m512d>(z)));
#elif defined(__AVX__) && defined(__FMA__)
  return bits_as<V>(_mm256_fnmadd_pd(bits_as<__m256d>(x), bits_as<__m256d>(y), bits_as<__m256d>(z)));
#else
  return z - x * y;
#endif
}

// For kFuses: division by n, rounded once like a true division, in a fifth of its time. With y = 1 / n,
// rounded, q = x y is off by two roundings. The excess of q n over x, e = q n - x, is exact, so q - e y
// differs from x / n by at most 2^-105 of x / n, and no quotient of a 53-bit x by an n < 2^50 is that near to
// the middle between two numbers: P. Markstein, "Computation of Elementary Functions on the IBM RISC
// System/6000 Processor", 1990. The e of a zero is +0, so that q keeps its sign. The magnitude of x must be
// from 2^-149 to 2^200, or 0; e is a NaN if x is an infinity or a NaN.
template <class V>
WEFT_INLINE V above_f64(V x, double n, double y) {  // e
  return product_minus(x * y, V{} + n, x);
}
template <class V>
WEFT_INLINE V quotient_f64(V x, V e, double y) {
  return minus_product(x * y, e, V{} + y);
}

#if defined(__AVX512BF16__)
// The hardware treats subnormals as zeros. Returns false if it rounds these floats to bf16 like the code
// below and, with `finite`, if all of them are finite.
template <bool finite, class V>
WEFT_INLINE bool special(V a, V b) {
  constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80, kInfinities = 0x08 | 0x10;
  constexpr int kSpecial = kQuietNan | kSubnormal | kSignallingNan | (finite ? kInfinities : 0);
  return _kortestz_mask16_u8(_mm512_fpclass_ps_mask(bits_as<__m512>(a), kSpecial),
                             _mm512_fpclass_ps_mask(bits_as<__m512>(b), kSpecial)) == 0;
}

// Interleaves two vectors, which hold the even and the odd elements.
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
