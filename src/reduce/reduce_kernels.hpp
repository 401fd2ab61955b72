// The reduction kernels, written once and included by one file per instruction set. See reduce_isa.hpp for
// why all of it lies in an unnamed namespace and why it calls nothing of the C++ library.
//
// The story: a *number* says how a dtype is stored and in what it is accumulated (16-bit floats in f32,
// integers that are summed in their unsigned twin, so that they wrap). A *reduction* of a number and a kind
// can load a chunk of W elements into an accumulator, combine two accumulators and finish one: divide for
// avg, make NaNs canonical, round to the stored form. The *tree* over n inputs is unrolled in registers for n
// <= 4 (a leaf); larger n recurse over blocks of accumulators that stay in the first-level cache, halves
// split at the largest power of two below n. A chunk is one vector, the remainder of a count is done in
// chunks of half the width, a quarter, … one element.
//
// Sums, averages, minima and maxima are what is reduced most: they have loops of their own for few inputs.
// All else goes through one shape, blocks of accumulators; what is rarer shares what can be shared: a
// bit operation on any type is one on bytes, a logical one starts with 0 and 1, a sum of complex numbers is a
// sum of twice as many reals.
//
// Element i is loaded from all inputs before it is stored to any output, so outputs may be inputs.
//
// Same bits everywhere: each operation below is one IEEE operation per element, whatever the width. What
// hardware leaves open is the sign and payload of a NaN, so every NaN result, also of sum and avg, becomes
// the one quiet NaN (positive, no payload). Conversions of 16-bit floats equal those in weft/base/dtype.hpp
// on all that is not NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "reduce/reduce_isa.hpp"

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

// ---- Numbers: Stored in memory, Sum is what sum and avg accumulate in, Order what min and max compare in.

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

  // As f16(float): normal results round by adding half a unit less the tie; subnormal ones by adding 0.5,
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

// ---- Reductions

enum class Kind {  // the first twelve of ReduceOp::Kind
  sum,
  avg,
  min,
  max,
  prod,
  premul_sum,
  bit_and,
  bit_or,
  bit_xor,
  logical_and,
  logical_or,
  logical_xor,
};

// What avg divides by. Multiplying by the reciprocal of a power of two rounds exactly as the division does.
template <class T>
struct Divisor {
  T value;
  T reciprocal;
  bool power_of_two;
};

template <bool first, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

template <class T>
struct QuotientOf {
  using type = typename T::Sum;
};
template <class T, class U, class Q>
struct QuotientOf<Int<T, U, Q>> {
  using type = Q;
};

// A chunk of accumulators: one vector, or, of a paired number, one for the even and one for the odd elements.
template <class T, int W>
struct PairOf {
  Vec<T, W / 2> even, odd;
};
template <class T, int W, bool paired>
struct ChunkOf {
  using type = Vec<T, W>;
};
template <class T, int W>
struct ChunkOf<T, W, true> {
  using type = PairOf<T, W>;
};

template <class Number, Kind kind>
struct Reduction {
  static constexpr bool kOrders = kind == Kind::min || kind == Kind::max;
  static constexpr bool kScales = kind == Kind::premul_sum;
  static constexpr bool kTruths =
      kind == Kind::logical_and || kind == Kind::logical_or || kind == Kind::logical_xor;
  using Stored = typename Number::Stored;
  using Acc = typename Either<kOrders, typename Number::Order, typename Number::Sum>::type;
  using Bits = typename Number::Bits;
  using Quotient = typename QuotientOf<Number>::type;
  template <int W>
  using Chunk = typename ChunkOf<Acc, W, Number::kPaired && (W > 1)>::type;
  // A chunk fills a vector of the widest type on its way; 64-bit quotients have no vector instruction.
  static constexpr int kWidest = kind == Kind::avg && sizeof(Quotient) > sizeof(Acc) ? sizeof(Quotient)
                                                                                     : sizeof(Acc);
  static constexpr int kLanes = kind == Kind::avg && !Number::kFloating && sizeof(Acc) == 8
                                    ? 1
                                    : (Number::kPaired ? 2 : 1) * kVectorBytes / kWidest;
  static constexpr int kBlock = 2048 / sizeof(Acc);  // elements of a block of accumulators
  // Loops of their own for 2 inputs, and for 3 and 4 of floats; the others save compile time.
  static constexpr bool kFewShapes = kind == Kind::sum || kind == Kind::avg || kOrders;
  static constexpr bool kManyShapes = kFewShapes && Number::kFloating;

  static Divisor<Quotient> divisor(int n) {
    const auto value = static_cast<Quotient>(n);
    return {value, static_cast<Quotient>(Quotient{1} / value), (n & (n - 1)) == 0};
  }

  // premul_sum's scale as an accumulator; of integers it is a whole number.
  static Acc factor(double scale) {
    if constexpr (Number::kFloating) {
      return static_cast<Acc>(scale);
    } else {
      return static_cast<Acc>(static_cast<std::int64_t>(scale));
    }
  }

  template <int W>
  static WEFT_INLINE Chunk<W> scaled(Chunk<W> x, Acc by) {
    if constexpr (Number::kPaired && W > 1) {
      return {x.even * by, x.odd * by};
    } else {
      return multiplied(x, by);
    }
  }

  template <int W>
  static WEFT_INLINE Chunk<W> load(const std::byte* from, std::int64_t i) {
    from += i * static_cast<std::int64_t>(sizeof(Stored));
    if constexpr (Number::kPaired) {
      constexpr int lanes = W > 1 ? W / 2 : 1;
      using Floats = Vec<Acc, lanes>;
      Vec<Bits, lanes> x{};
      __builtin_memcpy(&x, from, sizeof(Stored) * W);
      if constexpr (W > 1) {
        return {bits_as<Floats>(Number::widen_low(x)), bits_as<Floats>(Number::widen_high(x))};
      } else {
        return bits_as<Floats>(Number::widen_low(x));
      }
    } else {
      Vec<Stored, W> x;
      __builtin_memcpy(&x, from, sizeof x);
      if constexpr (kTruths && W == 1) {
        return x != 0;
      } else if constexpr (kTruths) {
        return bits_as<Vec<Acc, W>>(x != Vec<Stored, W>{}) & 1;
      } else {
        return bits_as<Vec<Acc, W>>(Number::template widen<W>(x));
      }
    }
  }

  template <int W>
  static WEFT_INLINE Chunk<W> combine(Chunk<W> a, Chunk<W> b) {
    if constexpr (Number::kPaired && W > 1) {
      return {combine_lanes(a.even, b.even), combine_lanes(a.odd, b.odd)};
    } else {
      return combine_lanes(a, b);
    }
  }

  // b: like a, or one number for all lanes. A product of two plain 16-bit integers would be one of ints,
  // which must not overflow.
  template <class V, class B>
  static WEFT_INLINE V multiplied(V a, B b) {
    if constexpr (!Number::kFloating && sizeof(V) == sizeof(Acc)) {
      return static_cast<V>(1u * a * b);
    } else {
      return a * b;
    }
  }

  template <class V>
  static WEFT_INLINE V combine_lanes(V a, V b) {
    if constexpr (kind == Kind::prod) {
      return multiplied(a, b);
    } else if constexpr (kind == Kind::bit_and || kind == Kind::logical_and) {
      return static_cast<V>(a & b);
    } else if constexpr (kind == Kind::bit_or || kind == Kind::logical_or) {
      return static_cast<V>(a | b);
    } else if constexpr (kind == Kind::bit_xor || kind == Kind::logical_xor) {
      return static_cast<V>(a ^ b);
    } else if constexpr (!kOrders) {
      return static_cast<V>(a + b);
    } else if constexpr (!Number::kFloating) {
      return (kind == Kind::min ? a < b : b < a) ? a : b;
    } else {
      // Equal values are the same bits or zeros of two signs: min keeps a sign that either has, max one that
      // both have.
      using BitsOfV = Vec<Bits, sizeof(V) / sizeof(Bits)>;
      const auto bits_a = bits_as<BitsOfV>(a), bits_b = bits_as<BitsOfV>(b);
      if constexpr (kind == Kind::min) {
        const V least = a < b ? a : b, equal = bits_as<V>(bits_a | bits_b), r = a == b ? equal : least;
        return a != a ? a : r;
      } else {
        const V greatest = a > b ? a : b, equal = bits_as<V>(bits_a & bits_b), r = a == b ? equal : greatest;
        return a != a ? a : r;
      }
    }
  }

  // Floats: divided, and NaNs made the one.
  template <class V>
  static WEFT_INLINE V divided(V x, const Divisor<Quotient>& by) {
    if constexpr (kind == Kind::avg) x = by.power_of_two ? x * by.reciprocal : x / by.value;
    return x;
  }
  template <class V>
  static WEFT_INLINE V with_one_nan(V x) {
    const V nan = bits_as<V>(Vec<Bits, sizeof(V) / sizeof(Bits)>{} + Number::kNan);
    return x != x ? nan : x;
  }
  template <class V>
  static WEFT_INLINE V finish_lanes(V x, const Divisor<Quotient>& by) {
    return with_one_nan(divided(x, by));
  }

  // The bytes of W stored elements.
  template <int W>
  static WEFT_INLINE auto finish(Chunk<W> x, const Divisor<Quotient>& by) {
    if constexpr (Number::kPaired && W > 1) {
      using Lanes = Vec<Bits, W / 2>;
      auto even = divided(x.even, by), odd = divided(x.odd, by);
#if defined(__AVX512BF16__)
      if constexpr (sizeof even == 64) {
        if (!special(even, odd)) [[likely]]
          return bits_as<Lanes>(rounded_by_hardware(even, odd));
      }
#endif
      if (may_hold_nan(even, odd)) [[unlikely]] {  // one comparison for both, most of the time
        even = with_one_nan(even);
        odd = with_one_nan(odd);
      }
      return (Number::rounded(bits_as<Lanes>(even)) >> 16) |
             (Number::rounded(bits_as<Lanes>(odd)) & 0xffff0000u);
    } else if constexpr (Number::kPaired) {
      return static_cast<Stored>(Number::rounded(bits_as<Bits>(finish_lanes(x, by))) >> 16);
    } else if constexpr (Number::kFloating) {
      return Number::template narrow<W>(finish_lanes(x, by));
    } else if constexpr (kind == Kind::avg) {
      if constexpr (sizeof(Stored) < sizeof(std::int32_t)) {
        // By way of 32-bit integers, which is what the hardware converts; the stored ones unsigned, since g++
        // has no vector form of widening and narrowing signed bytes.
        constexpr std::int32_t kTop = std::int32_t{1} << (8 * sizeof(Stored) - 1);
        auto wide = convert<std::int32_t, W>(bits_as<Vec<Bits, W>>(x));
        if constexpr (static_cast<Stored>(-1) < 0) wide = (wide ^ kTop) - kTop;
        wide = convert<std::int32_t, W>(convert<Quotient, W>(wide) / by.value);
        return bits_as<Vec<Stored, W>>(convert<Bits, W>(wide));
      } else {
        const auto total = bits_as<Vec<Stored, W>>(x);
        return convert<Stored, W>(convert<Quotient, W>(total) / by.value);
      }
    } else {
      return bits_as<Vec<Stored, W>>(x);
    }
  }
};

// The product of complex numbers: (a + bi)(c + di) = (ac - bd) + (ad + bc)i, each operation rounded. A chunk
// is W of them as they lie in memory, real and imaginary parts by turns. A difference is the sum with a
// changed sign, bit for bit.
template <class Part>
struct ComplexProduct {
  using Real = typename Part::Stored;
  struct Stored {
    Real re, im;
  };
  using Acc = Stored;
  using Quotient = Real;
  template <int W>
  using Chunk = Vec<Real, 2 * W>;
  static constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Stored));
  static constexpr int kBlock = 2048 / sizeof(Acc);
  static constexpr bool kFewShapes = false;
  static constexpr bool kManyShapes = false;
  static constexpr bool kScales = false;
  static Divisor<Quotient> divisor(int) { return {}; }

  template <int W>
  static WEFT_INLINE Chunk<W> load(const std::byte* from, std::int64_t i) {
    Chunk<W> x;
    __builtin_memcpy(&x, from + i * static_cast<std::int64_t>(sizeof(Stored)), sizeof x);
    return x;
  }
  template <int W>
  static WEFT_INLINE Chunk<W> combine(Chunk<W> a, Chunk<W> b) {
    return product<W>(a, b, std::make_integer_sequence<int, 2 * W>());
  }
  template <int W>
  static WEFT_INLINE Chunk<W> finish(Chunk<W> x, const Divisor<Quotient>& by) {
    return Reduction<Part, Kind::prod>::finish_lanes(x, by);
  }

 private:
  template <int W, int... lane>
  static WEFT_INLINE Chunk<W> product(Chunk<W> a, Chunk<W> b, std::integer_sequence<int, lane...>) {
    using Bits = typename Part::Bits;
    constexpr Bits kSign = Bits{1} << (8 * sizeof(Real) - 1);
    constexpr Vec<Bits, 2 * W> even = {(lane % 2 == 0 ? kSign : Bits{0})...};
    const Chunk<W> straight = a * __builtin_shufflevector(b, b, (lane & ~1)...);
    const Chunk<W> crossed =
        __builtin_shufflevector(a, a, (lane ^ 1)...) * __builtin_shufflevector(b, b, (lane | 1)...);
    return straight + bits_as<Chunk<W>>(bits_as<Vec<Bits, 2 * W>>(crossed) ^ even);
  }
};

// ---- Loops

// f.at<W>(i) for every chunk: full width first, then the remainder by quarters of it.
template <int W, class F>
WEFT_INLINE void chunks(std::int64_t count, const F& f, std::int64_t i = 0) {
  for (; i + W <= count; i += W) f.template at<W>(i);
  if constexpr (W > 1) chunks<(W > 4 ? W / 4 : 1)>(count, f, i);
}

// Inputs are asked for so many bytes before they are read, which spares a page's first lines their latency;
// but not beyond the last element: what follows there is another rank's part, and in its cache.
// From chrt -f 10 weft bench all_reduce --memory shared --dtype f32,bf16: smaller ones lie in the first-level
// cache and gain nothing, f32 of 128 KB to 512 KB gains an eighth, bf16 of 32 MB a sixth.
constexpr std::int64_t kAheadBytes = 2048;
constexpr std::int64_t kAheadFrom = 32 << 10;

// As far as is asked ahead; returns where the others go on.
template <class R, class F>
WEFT_INLINE std::int64_t chunks_ahead(const std::byte* const* in, int n, std::int64_t count, const F& f) {
  constexpr std::int64_t kElement = sizeof(typename R::Stored), kAhead = kAheadBytes / kElement;
  std::int64_t i = 0;
  if (count * kElement < kAheadFrom) return i;
  for (; i + R::kLanes + kAhead <= count; i += R::kLanes) {
    for (int k = 0; k < n; ++k) __builtin_prefetch(in[k] + (i + kAhead) * kElement);
    f.template at<R::kLanes>(i);
  }
  return i;
}

// The tree over n <= 4 inputs, in registers.
template <class R, int n, int W>
WEFT_INLINE auto leaf(const std::byte* const* in, std::int64_t i) {
  if constexpr (n == 1) {
    return R::template load<W>(in[0], i);
  } else {
    constexpr int left = n > 2 ? 2 : 1;
    return R::template combine<W>(leaf<R, left, W>(in, i), leaf<R, n - left, W>(in + left, i));
  }
}

template <class R, class V>
WEFT_INLINE void store(V x, std::byte* to, std::int64_t i) {
  __builtin_memcpy(to + i * static_cast<std::int64_t>(sizeof(typename R::Stored)), &x, sizeof x);
}

// n <= 4 inputs straight to all outputs; kOuts 0 means any number of them. The pointers are copied so that
// stores cannot be thought to change them.
template <class R, int n, int kOuts>
struct Direct {
  const std::byte* in[n];
  std::byte* known_out[kOuts ? kOuts : 1];
  std::byte* const* out;
  int outs;
  Divisor<typename R::Quotient> by;

  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    const auto x = R::template finish<W>(leaf<R, n, W>(in, i), by);
    if constexpr (kOuts == 0) {
      for (int j = 0; j < outs; ++j) store<R>(x, out[j], i);
    } else {
      for (int j = 0; j < kOuts; ++j) store<R>(x, known_out[j], i);
    }
  }

  static void run(const std::byte* const* in, std::byte* const* out, int outs, std::int64_t count) {
    Direct d{};
    for (int k = 0; k < n; ++k) d.in[k] = in[k];
    for (int j = 0; j < kOuts; ++j) d.known_out[j] = out[j];
    d.out = out;
    d.outs = outs;
    d.by = R::divisor(n);
    chunks<R::kLanes>(count, d, chunks_ahead<R>(d.in, n, count, d));
  }
};

template <class R, int n>
struct LeafToBlock {
  const std::byte* in[n];
  std::int64_t first;
  typename R::Acc* to;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    const auto x = leaf<R, n, W>(in, first + i);
    __builtin_memcpy(to + i, &x, sizeof x);
  }
  static void run(const std::byte* const* in, std::int64_t first, int count, typename R::Acc* to) {
    LeafToBlock b{};
    for (int k = 0; k < n; ++k) b.in[k] = in[k];
    b.first = first;
    b.to = to;
    chunks<R::kLanes>(count, b);
  }
};

// One input, each element multiplied.
template <class R>
struct ScaledToBlock {
  const std::byte* in;
  std::int64_t first;
  typename R::Acc factor;
  typename R::Acc* to;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    const auto x = R::template scaled<W>(R::template load<W>(in, first + i), factor);
    __builtin_memcpy(to + i, &x, sizeof x);
  }
};

template <class R>
struct CombineBlocks {
  typename R::Acc* left;  // becomes left ⊕ right
  const typename R::Acc* right;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    typename R::template Chunk<W> a, b;
    __builtin_memcpy(&a, left + i, sizeof a);
    __builtin_memcpy(&b, right + i, sizeof b);
    a = R::template combine<W>(a, b);
    __builtin_memcpy(left + i, &a, sizeof a);
  }
};

template <class R>
struct FinishBlock {
  const typename R::Acc* block;
  std::byte* const* out;
  int outs;
  std::int64_t first;
  Divisor<typename R::Quotient> by;
  template <int W>
  WEFT_INLINE void at(std::int64_t i) const {
    typename R::template Chunk<W> a;
    __builtin_memcpy(&a, block + i, sizeof a);
    const auto x = R::template finish<W>(a, by);
    for (int j = 0; j < outs; ++j) store<R>(x, out[j], first + i);
  }
};

// The tree over any number of inputs, for `count` <= kBlock elements from `first` on. Uses one block of stack
// for each doubling of n.
template <class R>
void tree(const std::byte* const* in, int n, std::int64_t first, int count, typename R::Acc* to,
          double scale) noexcept {
  if constexpr (R::kScales) {
    if (n == 1) return chunks<R::kLanes>(count, ScaledToBlock<R>{in[0], first, R::factor(scale), to});
  } else {
    if (n == 1) return LeafToBlock<R, 1>::run(in, first, count, to);
  }
  if constexpr (R::kFewShapes) {
    if (n == 2) return LeafToBlock<R, 2>::run(in, first, count, to);
  }
  if constexpr (R::kManyShapes) {
    if (n == 4) return LeafToBlock<R, 4>::run(in, first, count, to);
  }
  int left = 1;
  while (left * 2 < n) left *= 2;
  alignas(kVectorBytes) typename R::Acc right[R::kBlock];
  tree<R>(in, left, first, count, to, scale);
  tree<R>(in + left, n - left, first, count, right, scale);
  chunks<R::kLanes>(count, CombineBlocks<R>{to, right});
}

template <class R>
void kernel(const std::byte* const* in, int n, std::byte* const* out, int outs, std::int64_t count,
            double scale) noexcept {
  if constexpr (R::kFewShapes) {
    if (n == 2 && outs == 1) return Direct<R, 2, 1>::run(in, out, outs, count);
    if (n == 2 && outs == 2) return Direct<R, 2, 2>::run(in, out, outs, count);
  }
  if constexpr (R::kManyShapes) {
    if (n == 3) return Direct<R, 3, 0>::run(in, out, outs, count);
    if (n == 4) return Direct<R, 4, 0>::run(in, out, outs, count);
  }
  alignas(kVectorBytes) typename R::Acc block[R::kBlock];
  for (std::int64_t first = 0; first < count; first += R::kBlock) {
    const int here = count - first < R::kBlock ? static_cast<int>(count - first) : R::kBlock;
    tree<R>(in, n, first, here, block, scale);
    chunks<R::kLanes>(here, FinishBlock<R>{block, out, outs, first, R::divisor(n)});
  }
}

// Elements that are `parts` others side by side.
template <class R, int parts>
void kernel_of_parts(const std::byte* const* in, int n, std::byte* const* out, int outs, std::int64_t count,
                     double scale) noexcept {
  kernel<R>(in, n, out, outs, count * parts, scale);
}

// Non-temporal stores need an aligned target; the ragged ends go through the caches.
void stream_copy(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept {
  std::int64_t head = -reinterpret_cast<std::intptr_t>(to) & (kVectorBytes - 1);
  if (head > bytes) head = bytes;
  __builtin_memcpy(to, from, static_cast<std::size_t>(head));
  std::int64_t i = head;
#if defined(__x86_64__)
  for (; i + kVectorBytes <= bytes; i += kVectorBytes) {
    Vec<long long, kVectorBytes / 8> x;
    __builtin_memcpy(&x, from + i, sizeof x);
    if constexpr (kVectorBytes == 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), bits_as<__m128i>(x));
#if defined(__AVX2__)
    if constexpr (kVectorBytes == 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), bits_as<__m256i>(x));
#endif
#if defined(__AVX512F__)
    if constexpr (kVectorBytes == 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), bits_as<__m512i>(x));
#endif
  }
#endif
  __builtin_memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

template <Kind kind, int bytes>
constexpr ReduceKernel kBits = kernel_of_parts<Reduction<U8, kind>, bytes>;

// One row for each DType, in its order; in each row one kernel for each Kind, in its order. A sum or product
// that wraps is the same for both signs. f8 is never combined.
#define WEFT_REDUCE_FLOAT(Number)                                                          \
  {                                                                                        \
    kernel<Reduction<Number, Kind::sum>>, kernel<Reduction<Number, Kind::avg>>,            \
        kernel<Reduction<Number, Kind::min>>, kernel<Reduction<Number, Kind::max>>,        \
        kernel<Reduction<Number, Kind::prod>>, kernel<Reduction<Number, Kind::premul_sum>> \
  }
#define WEFT_REDUCE_COMPLEX(Part, product)                                                                   \
  {                                                                                                          \
    kernel_of_parts<Reduction<Part, Kind::sum>, 2>, kernel_of_parts<Reduction<Part, Kind::avg>, 2>, nullptr, \
        nullptr, product                                                                                     \
  }
#define WEFT_REDUCE_COMMON_INT(Number, Wraps)                                \
  kernel<Reduction<Wraps, Kind::sum>>, kernel<Reduction<Number, Kind::avg>>, \
      kernel<Reduction<Number, Kind::min>>, kernel<Reduction<Number, Kind::max>>
#define WEFT_REDUCE_TRUTHS(Wraps, bytes)                                                       \
  kBits<Kind::bit_and, bytes>, kBits<Kind::bit_or, bytes>, kBits<Kind::bit_xor, bytes>,        \
      kernel<Reduction<Wraps, Kind::logical_and>>, kernel<Reduction<Wraps, Kind::logical_or>>, \
      kernel<Reduction<Wraps, Kind::logical_xor>>

#define WEFT_REDUCE_INT(Number, Wraps, bytes)                                        \
  {                                                                                  \
    WEFT_REDUCE_COMMON_INT(Number, Wraps), kernel<Reduction<Wraps, Kind::prod>>,     \
        kernel<Reduction<Wraps, Kind::premul_sum>>, WEFT_REDUCE_TRUTHS(Wraps, bytes) \
  }
#define WEFT_REDUCE_BOOL                                                                                    \
  {                                                                                                         \
    nullptr, nullptr, kernel<Reduction<U8, Kind::min>>, kernel<Reduction<U8, Kind::max>>, nullptr, nullptr, \
        WEFT_REDUCE_TRUTHS(U8, 1)                                                                           \
  }

#define WEFT_REDUCE_TABLE(name)                                  \
  {                                                              \
    name,                                                        \
        {WEFT_REDUCE_FLOAT(F64),                                 \
         WEFT_REDUCE_FLOAT(F32),                                 \
         WEFT_REDUCE_FLOAT(F16),                                 \
         WEFT_REDUCE_FLOAT(Bf16),                                \
         WEFT_REDUCE_INT(I8, U8, 1),                             \
         WEFT_REDUCE_INT(I16, U16, 2),                           \
         WEFT_REDUCE_INT(I32, U32, 4),                           \
         WEFT_REDUCE_INT(I64, U64, 8),                           \
         WEFT_REDUCE_INT(U8, U8, 1),                             \
         WEFT_REDUCE_INT(U16, U16, 2),                           \
         WEFT_REDUCE_INT(U32, U32, 4),                           \
         WEFT_REDUCE_INT(U64, U64, 8),                           \
         WEFT_REDUCE_BOOL,                                       \
         {},                                                     \
         {},                                                     \
         WEFT_REDUCE_COMPLEX(F32, kernel<ComplexProduct<F32>>),  \
         WEFT_REDUCE_COMPLEX(F64, kernel<ComplexProduct<F64>>)}, \
        stream_copy                                              \
  }

}  // namespace
}  // namespace weft
