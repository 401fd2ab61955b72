// Reductions: a number and a kind. Load a chunk, combine two, finish one. Part of reduce_kernels.hpp, which
// tells the story.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "reduce/kernels/numbers.hpp"

namespace weft {
namespace {

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
        // Goes through 32-bit integers, which the hardware can convert. Stored integers are widened and narrowed as
        // unsigned, since g++ has no vector code for signed bytes.
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

}  // namespace
}  // namespace weft
