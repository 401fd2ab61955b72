// Numbers: how memory stores a dtype (Stored), in which type sum accumulates (Sum) and avg accumulates
// (Total), and in which type min and max compare (Order). Part of reduce_kernels.hpp, which explains the
// design.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/kernels/vectors.hpp"

namespace weft {
namespace {

template <bool first, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

template <class T, class B, B nan, B largest>
struct Float {  // f32, f64
  using Stored = T;
  using Sum = T;
  using Total = T;
  using Quotient = T;
  using Order = T;
  using Bits = B;
  static constexpr bool kFloating = true;
  static constexpr bool kPaired = false;
  static constexpr bool kSumsOverflow = true;
  static constexpr Bits kNan = nan;
  static constexpr T kLargest = __builtin_bit_cast(T, largest);
  template <int W>
  static WEFT_INLINE Vec<T, W> widen(Vec<T, W> x) {
    return x;
  }
  template <int W>
  static WEFT_INLINE Vec<T, W> narrow(Vec<T, W> x) {
    return x;
  }
};
using F32 = Float<float, std::uint32_t, 0x7fc00000u, 0x7f7fffffu>;
using F64 = Float<double, std::uint64_t, 0x7ff8000000000000u, 0x7fefffffffffffffu>;

// A chunk of accumulators in two vectors: the even and the odd elements, the lower and the upper half, or the
// high and the low words of each element.
template <class T, int W>
struct PairOf {
  Vec<T, W / 2> even, odd;
};

// f32 in the form in which avg sums it. A chunk is two vectors: its lower and its upper half.
struct F32InF64 {
  using Stored = float;
  using Sum = double;
  using Total = double;
  using Quotient = double;
  using Order = double;
  using Bits = std::uint64_t;
  static constexpr bool kFloating = true;
  static constexpr bool kPaired = true;
  static constexpr bool kSumsOverflow = false;
  static constexpr Bits kNan = F64::kNan;
  template <int W>
  static WEFT_INLINE PairOf<double, W> load_pair(const std::byte* from) {
    Vec<float, W / 2> low, high;
    __builtin_memcpy(&low, from, sizeof low);
    __builtin_memcpy(&high, from + sizeof low, sizeof high);
    return {to_f64<W / 2>(low), to_f64<W / 2>(high)};
  }
  static WEFT_INLINE double load_one(const std::byte* from) {
    float x;
    __builtin_memcpy(&x, from, sizeof x);
    return static_cast<double>(x);
  }
  template <int W>
  static WEFT_INLINE Vec<float, W> narrow_pair(PairOf<double, W> x) {
    return joined<float, W>(to_f32<W / 2>(x.even), to_f32<W / 2>(x.odd));
  }
  static WEFT_INLINE float narrow_one(double x) { return static_cast<float>(x); }
};

// Two neighbouring elements share one 32-bit lane. If the lane is shifted up, it is the even element as a
// float. If it is masked, it is the odd element. So a chunk is widened and narrowed without moving elements
// between lanes.
struct Bf16 {
  using Stored = std::uint16_t;
  using Sum = float;
  using Total = float;
  using Quotient = float;
  using Order = float;
  using Bits = std::uint32_t;
  static constexpr bool kFloating = true;
  static constexpr bool kPaired = true;
  static constexpr bool kSumsOverflow = true;
  static constexpr Bits kNan = F32::kNan;
  static constexpr float kLargest = F32::kLargest;
  template <int W>
  static WEFT_INLINE PairOf<float, W> load_pair(const std::byte* from) {
    Vec<Bits, W / 2> x;
    __builtin_memcpy(&x, from, sizeof x);
    using Floats = Vec<float, W / 2>;
    return {bits_as<Floats>(x << 16), bits_as<Floats>(x & 0xffff0000u)};
  }
  static WEFT_INLINE float load_one(const std::byte* from) {
    Stored x;
    __builtin_memcpy(&x, from, sizeof x);
    return bits_as<float>(Bits{x} << 16);
  }
  template <int W>
  static WEFT_INLINE Vec<Bits, W / 2> narrow_pair(PairOf<float, W> x) {
    using Lanes = Vec<Bits, W / 2>;
    return (rounded(bits_as<Lanes>(x.even)) >> 16) | (rounded(bits_as<Lanes>(x.odd)) & 0xffff0000u);
  }
  static WEFT_INLINE Stored narrow_one(float x) {
    return static_cast<Stored>(rounded(bits_as<Bits>(x)) >> 16);
  }
  // Rounds to nearest, ties to even, in the upper half. x may be the canonical NaN, which keeps its upper
  // half, but no other NaN.
  template <class V>
  static WEFT_INLINE V rounded(V x) {
    return x + 0x7fffu + ((x >> 16) & 1u);
  }
};

struct F16 {
  using Stored = std::uint16_t;
  using Sum = float;
  using Total = float;
  using Quotient = float;
  using Order = float;
  using Bits = std::uint32_t;
  static constexpr bool kFloating = true;
  static constexpr bool kPaired = false;
  static constexpr bool kSumsOverflow = false;  // at least 2^111 numbers would be needed
  static constexpr Bits kNan = F32::kNan;

  // Exponents are raised by 112 (exponents of infinities by twice that). A subnormal is an integer times
  // 2^-24, which the difference of two floats with exponent -14 gives exactly. (The masked forms of the
  // intrinsics are used because g++ 12 warns about the other forms.)
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

  // Returns the bits of f16(float). Normal results round by adding half a unit minus the tie. Subnormal
  // results round by adding 0.5, whose last place is 2^-24.
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

// The divisor of avg: the number of inputs, n >= 1. Multiplying by the reciprocal of a power of two rounds
// exactly as the division does.
template <class T>
struct Divisor {
  T value;
  T reciprocal;
  int n;
  bool power_of_two;
};

// Integers, for which avg sums T in `A`: at least twice as wide, and exact.
template <class T, class U, class A, class Q>
struct Int {
  using Stored = T;
  using Sum = U;
  using Total = A;
  using Order = T;
  using Quotient = Q;
  using Bits = U;
  static constexpr bool kFloating = false;
  static constexpr bool kPaired = false;
  static constexpr bool kSumsOverflow = false;
  static constexpr bool kSigned = static_cast<T>(-1) < 0;
  template <int W, class V>
  static WEFT_INLINE V widen(V x) {
    return x;
  }
};

// Integers of 8 and 16 bits, summed in 32 bits: sums of up to 65,536 inputs fit. As a float, a quotient
// truncates to the integer quotient while the total is below 2^24: a quotient a/n and a different integer
// differ by at least 1/n, more than half a unit in the last place. Larger totals are divided as integers.
template <class T, class U, class A>
struct ShortInt : Int<T, U, A, float> {
  static constexpr int kFewInputs = 256;
  template <int W>
  static WEFT_INLINE Vec<A, W> to_total(Vec<T, W> x) {
    return bits_as<Vec<A, W>>(to_i32<W, T>(x));
  }
  template <int W>
  static WEFT_INLINE Vec<T, W> quotient(Vec<A, W> total, const Divisor<float>& by) {
    using Ints = Vec<std::int32_t, W>;  // the hardware converts this type
    const auto shortened = [](Ints x) { return bits_as<Vec<T, W>>(low_bits<U, W>(x)); };
    if (by.n <= kFewInputs) [[likely]]
      return shortened(convert<std::int32_t, W>(convert<float, W>(bits_as<Ints>(total)) / by.value));
    return shortened(bits_as<Ints>(total / static_cast<A>(by.n)));
  }
};

// Integers of 32 bits, summed in the 53 bits of an f64: sums of up to 2^21 inputs fit, and a quotient
// truncates to the integer quotient as above.
template <class T, class U>
struct MiddleInt : Int<T, U, double, double> {
  template <int W>
  static WEFT_INLINE Vec<double, W> to_total(Vec<T, W> x) {
    if constexpr (MiddleInt::kSigned) {
      return to_f64<W>(x);
    } else {  // the hardware converts only signed integers
      constexpr std::uint32_t kTop = std::uint32_t{1} << 31;
      return to_f64<W>(bits_as<Vec<std::int32_t, W>>(x ^ kTop)) + 0x1p31;
    }
  }
  template <int W>
  static WEFT_INLINE Vec<T, W> quotient(Vec<double, W> total, const Divisor<double>& by) {
    if constexpr (kFuses<Vec<double, W>>)
      return convert<T, W>(quotient_f64(total, above_f64(total, by.value, by.reciprocal), by.reciprocal));
    return convert<T, W>(total / by.value);
  }
};

// Integers of 64 bits, summed in 128 bits: the high words of 32 bits are summed separately from the low
// words, for at most 2^20 inputs, so that all following steps are exact in f64. Signed integers are summed as
// unsigned integers that are larger by 2^63, so their average is also larger by 2^63. The floor of the
// average is one too low if the average is negative and no integer.
template <class T>
struct LongInt : Int<T, std::uint64_t, PairOf<std::uint64_t, 2>, double> {
  static constexpr std::uint64_t kRaised = LongInt::kSigned ? std::uint64_t{1} << 63 : 0;
  template <int W>
  using Words = Vec<std::uint64_t, W>;
  template <int W>
  static WEFT_INLINE PairOf<std::uint64_t, 2 * W> to_total(Vec<T, W> x) {
    const auto raised = bits_as<Words<W>>(x) ^ kRaised;
    return {raised >> 32, raised & 0xffffffffu};
  }
  template <int W>
  static WEFT_INLINE Vec<T, W> quotient(PairOf<std::uint64_t, 2 * W> total, const Divisor<double>& by) {
    const auto high = total.even, low = total.odd;
    Words<W> floor, rest;
    if (by.power_of_two) {
      const int shift = __builtin_ctz(static_cast<unsigned>(by.n));
      floor = (high << (32 - shift)) + (low >> shift);
      rest = low & static_cast<std::uint64_t>(by.n - 1);
    } else {  // divides digit by digit
      const auto first = divided<W>(whole_f64(high), by);
      const auto second = divided<W>(first.odd * 0x1p32 + whole_f64(low), by);
      floor = (whole_u64<W>(first.even) << 32) + whole_u64<W>(second.even);
      rest = bits_as<Words<W>>(second.odd);
    }
    if constexpr (LongInt::kSigned) {
      const Words<W> negative = ~floor >> 63, none{};
      floor += rest != none ? negative : none;
    }
    return bits_as<Vec<T, W>>(floor ^ kRaised);
  }

 private:
  // Converts whole numbers below 2^52 to f64, and back.
  static constexpr std::uint64_t kBitsOfTwo52 = 0x4330000000000000u;
  template <class V>
  static WEFT_INLINE auto whole_f64(V x) {
    return bits_as<Vec<double, sizeof(V) / 8>>(x | kBitsOfTwo52) - 0x1p52;
  }
  template <int W>
  static WEFT_INLINE Words<W> whole_u64(Vec<double, W> x) {
    return bits_as<Words<W>>(x + 0x1p52) ^ kBitsOfTwo52;
  }
  // Computes quotient and remainder of a whole number below 2^53, if the quotient is below 2^34. The product
  // with the reciprocal is off by less than a half: the nearest whole number is the quotient or the quotient
  // plus one.
  template <int W>
  static WEFT_INLINE PairOf<double, 2 * W> divided(Vec<double, W> x, const Divisor<double>& by) {
    constexpr double kRounds = 0x1.8p52;
    const Vec<double, W> q = (x * by.reciprocal + kRounds) - kRounds, rest = x - q * by.value;
    return {rest < 0 ? q - 1 : q, rest < 0 ? rest + by.value : rest};
  }
};

using I8 = ShortInt<std::int8_t, std::uint8_t, std::int32_t>;
using I16 = ShortInt<std::int16_t, std::uint16_t, std::int32_t>;
using I32 = MiddleInt<std::int32_t, std::uint32_t>;
using I64 = LongInt<std::int64_t>;
using U8 = ShortInt<std::uint8_t, std::uint8_t, std::uint32_t>;
using U16 = ShortInt<std::uint16_t, std::uint16_t, std::uint32_t>;
using U32 = MiddleInt<std::uint32_t, std::uint32_t>;
using U64 = LongInt<std::uint64_t>;

}  // namespace
}  // namespace weft
