// Numbers: how a dtype is stored in memory (Stored), what sum and avg accumulate in (Sum), what min and max
// compare in (Order). Part of reduce_kernels.hpp, which tells the story.
#pragma once

#include <cstdint>

#include "reduce/kernels/vectors.hpp"

namespace weft {
namespace {

template <class T, class B, B nan>
struct Float {  // f32, f64
  using Stored = T;
  using Sum = T;
  using Order = T;
  using Bits = B;
  static constexpr bool kFloating = true;
  static constexpr bool kPaired = false;
  static constexpr Bits kNan = nan;
  template <int W>
  static WEFT_INLINE Vec<T, W> widen(Vec<T, W> x) {
    return x;
  }
  template <int W>
  static WEFT_INLINE Vec<T, W> narrow(Vec<T, W> x) {
    return x;
  }
};
using F32 = Float<float, std::uint32_t, 0x7fc00000u>;
using F64 = Float<double, std::uint64_t, 0x7ff8000000000000u>;

// Two neighbours lie in one 32-bit lane: shifted up the even one is a float, masked the odd one is. So a
// chunk is widened and narrowed without moving anything between lanes.
struct Bf16 {
  using Stored = std::uint16_t;
  using Sum = float;
  using Order = float;
  using Bits = std::uint32_t;
  static constexpr bool kFloating = true;
  static constexpr bool kPaired = true;
  static constexpr Bits kNan = F32::kNan;
  template <class V>
  static WEFT_INLINE V widen_low(V lanes) {
    return lanes << 16;
  }
  template <class V>
  static WEFT_INLINE V widen_high(V lanes) {
    return lanes & 0xffff0000u;
  }
  // To nearest, ties to even, in the upper half. x is no NaN but the canonical one, which keeps its upper
  // half.
  template <class V>
  static WEFT_INLINE V rounded(V x) {
    return x + 0x7fffu + ((x >> 16) & 1u);
  }
};

struct F16 {
  using Stored = std::uint16_t;
  using Sum = float;
  using Order = float;
  using Bits = std::uint32_t;
  static constexpr bool kFloating = true;
  static constexpr bool kPaired = false;
  static constexpr Bits kNan = F32::kNan;

  // Exponents move up by 112 (infinities by twice that); a subnormal is an integer times 2^-24, which the
  // difference of two floats of exponent -14 gives exactly. (The masked forms of the intrinsics are there
  // because g++ 12 warns about the others.)
  template <int W>
  static WEFT_INLINE Vec<float, W> widen(Vec<std::uint16_t, W> x) {
#if defined(__F16C__)
    if constexpr (W == 1) return _cvtsh_ss(x);
    if constexpr (W == 4)
      return bits_as<Vec<float, W>>(_mm_cvtph_ps(_mm_cvtsi64_si128(bits_as<long long>(x))));
    if constexpr (W == 8) return bits_as<Vec<float, W>>(_mm256_cvtph_ps(bits_as<__m128i>(x)));
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16) return bits_as<Vec<float, W>>(_mm512_maskz_cvtph_ps(0xffff, bits_as<__m256i>(x)));
#endif
    using Int = Vec<std::int32_t, W>;
    const auto u = convert<std::int32_t, W>(x);
    const Int magnitude = (u & 0x7fff) << 13, zero{};
    const Int normal = magnitude + (112 << 23), infinite = zero + (112 << 23);
    const Int subnormal = bits_as<Int>(bits_as<Vec<float, W>>(magnitude + (113 << 23)) - 0x1p-14f);
    const Int finite = magnitude < (1 << 23) ? subnormal : normal;
    const Int sign = bits_as<Int>((bits_as<Vec<std::uint32_t, W>>(u) & 0x8000u) << 16);
    return bits_as<Vec<float, W>>(sign | (finite + (magnitude >= (31 << 23) ? infinite : zero)));
  }

  // Gives the bits of f16(float): normal results round by adding half a unit less the tie; subnormal ones by adding 0.5,
  // whose last place is 2^-24.
  template <int W>
  static WEFT_INLINE Vec<std::uint16_t, W> narrow(Vec<float, W> x) {
#if defined(__F16C__)
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    using Halves = Vec<std::uint16_t, W>;
    if constexpr (W == 1) return _cvtss_sh(x, kNearest);
    if constexpr (W == 4)
      return bits_as<Halves>(_mm_cvtsi128_si64(_mm_cvtps_ph(bits_as<__m128>(x), kNearest)));
    if constexpr (W == 8) return bits_as<Halves>(_mm256_cvtps_ph(bits_as<__m256>(x), kNearest));
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16)
      return bits_as<Halves>(_mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(x), kNearest));
#endif
    using Int = Vec<std::int32_t, W>;
    const auto u = bits_as<Int>(x);
    const Int magnitude = u & 0x7fffffff, zero{};
    const Int normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Int subnormal = bits_as<Int>(bits_as<Vec<float, W>>(magnitude) + 0.5f) - 0x3f000000;
    const Int infinity = zero + 0x7c00, nan = zero + 0x7e00;
    const Int finite = magnitude < 0x38800000 ? subnormal : normal;
    const Int special = magnitude > 0x7f800000 ? nan : infinity;
    const Int half = magnitude >= 0x477ff000 ? special : finite;
    return convert<std::uint16_t, W>(half | ((u >> 16) & 0x8000));
  }
};

// Integers. The quotient of avg is exact in `Q`, a float wide enough that truncating gives the integer
// quotient: two different quotients a/n and an integer differ by at least 1/n, more than half a unit in the
// last place while |a| is below 2^24 (float) or 2^53 (double). 64-bit integers divide as they are.
template <class T, class U, class Q>
struct Int {
  using Stored = T;
  using Sum = U;
  using Order = T;
  using Quotient = Q;
  using Bits = U;
  static constexpr bool kFloating = false;
  static constexpr bool kPaired = false;
  template <int W, class V>
  static WEFT_INLINE V widen(V x) {
    return x;
  }
};
using I8 = Int<std::int8_t, std::uint8_t, float>;
using I16 = Int<std::int16_t, std::uint16_t, float>;
using I32 = Int<std::int32_t, std::uint32_t, double>;
using I64 = Int<std::int64_t, std::uint64_t, std::int64_t>;
using U8 = Int<std::uint8_t, std::uint8_t, float>;
using U16 = Int<std::uint16_t, std::uint16_t, float>;
using U32 = Int<std::uint32_t, std::uint32_t, double>;
using U64 = Int<std::uint64_t, std::uint64_t, std::uint64_t>;

}  // namespace
}  // namespace weft
