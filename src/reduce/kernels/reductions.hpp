// Reductions: a number and a kind. A reduction can load a chunk, combine two chunks and finish a chunk. Part
// of reduce_kernels.hpp, which explains the design.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "reduce/kernels/numbers.hpp"

namespace weft {
namespace {

enum class KernelKind {  // the first twelve values of ReduceOp::Kind
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

// A chunk of accumulators. It is one vector, or two vectors if the number is paired or if an accumulator has
// two words.
template <class T, int W, bool paired>
struct ChunkOf {
  using type = Vec<T, W>;
};
template <class T, int W>
struct ChunkOf<T, W, true> {
  using type = PairOf<T, W>;
};
template <class T, int W>
struct ChunkOf<PairOf<T, 2>, W, false> {
  using type = PairOf<T, 2 * W>;
};

// Moves chunks of accumulators to and from memory. g++ copies a pair of vectors through the stack, unless
// each vector is copied separately.
template <class Acc, class V>
WEFT_INLINE void put_chunk(V x, Acc* to) {
  __builtin_memcpy(to, &x, sizeof x);
}
template <class Acc, class T, int W>
WEFT_INLINE void put_chunk(PairOf<T, W> x, Acc* to) {
  __builtin_memcpy(to, &x.even, sizeof x.even);
  __builtin_memcpy(reinterpret_cast<std::byte*>(to) + sizeof x.even, &x.odd, sizeof x.odd);
}
template <class Acc, class V>
WEFT_INLINE void take_chunk(V& x, const Acc* from) {
  __builtin_memcpy(&x, from, sizeof x);
}
template <class Acc, class T, int W>
WEFT_INLINE void take_chunk(PairOf<T, W>& x, const Acc* from) {
  __builtin_memcpy(&x.even, from, sizeof x.even);
  __builtin_memcpy(&x.odd, reinterpret_cast<const std::byte*>(from) + sizeof x.even, sizeof x.odd);
}

template <class Number, KernelKind kind>
struct Reduction {
  static constexpr bool kOrders = kind == KernelKind::min || kind == KernelKind::max;
  static constexpr bool kScales = kind == KernelKind::premul_sum;
  static constexpr bool kTruths =
      kind == KernelKind::logical_and || kind == KernelKind::logical_or || kind == KernelKind::logical_xor;
  using Stored = typename Number::Stored;
  static constexpr bool kAverages = kind == KernelKind::avg;
  using Acc =
      typename Either<kOrders, typename Number::Order,
                      typename Either<kAverages, typename Number::Total, typename Number::Sum>::type>::type;
  using Bits = typename Number::Bits;
  using Quotient = typename Number::Quotient;
  template <int W>
  using Chunk = typename ChunkOf<Acc, W, Number::kPaired && (W > 1)>::type;
  // A chunk fills one vector of accumulators, or two vectors.
  static constexpr bool kTwoWords = sizeof(Acc) > 8;
  static constexpr int kLanes =
      (Number::kPaired || kTwoWords ? 2 : 1) * kVectorBytes / static_cast<int>(sizeof(Acc));
  static constexpr int kBlock = 2048 / sizeof(Acc);  // elements of a block of accumulators
  // Whether there are separate loops for 2 inputs, and for 3 and 4 inputs of floats and of wide accumulators,
  // with one output or as many outputs as inputs. Other reductions have no such loops, to save compile time.
  static constexpr bool kFewShapes = kind == KernelKind::sum || kind == KernelKind::avg || kOrders;
  static constexpr bool kManyShapes = kFewShapes && (Number::kFloating || (kAverages && sizeof(Acc) >= 8));
  // Whether the sum of an average may be infinite although the average is finite. Such elements are summed
  // again: see rescued().
  static constexpr bool kRescues = kAverages && Number::kSumsOverflow;

  static Divisor<Quotient> divisor(int n) {
    const auto value = static_cast<Quotient>(n);
    return {value, static_cast<Quotient>(Quotient{1} / value), n, (n & (n - 1)) == 0};
  }

  // Returns the scale of premul_sum as an accumulator. For integers it is a whole number.
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
    if constexpr (Number::kPaired && W > 1) {
      return Number::template load_pair<W>(from);
    } else if constexpr (Number::kPaired) {
      return Number::load_one(from);
    } else {
      Vec<Stored, W> x;
      __builtin_memcpy(&x, from, sizeof x);
      if constexpr (kTruths && W == 1) {
        return x != 0;
      } else if constexpr (kTruths) {
        return bits_as<Vec<Acc, W>>(x != Vec<Stored, W>{}) & 1;
      } else if constexpr (kAverages && !Number::kFloating) {
        return Number::template to_total<W>(x);
      } else {
        return bits_as<Vec<Acc, W>>(Number::template widen<W>(x));
      }
    }
  }

  template <int W>
  static WEFT_INLINE Chunk<W> combine(Chunk<W> a, Chunk<W> b) {
    return combine_lanes(a, b);
  }

  // b: a vector like a, or one number for all lanes. (A product of two plain 16-bit integers would be a
  // product of ints, and could overflow.)
  template <class V, class B>
  static WEFT_INLINE V multiplied(V a, B b) {
    if constexpr (!Number::kFloating && sizeof(V) == sizeof(Acc)) {
      return static_cast<V>(1u * a * b);
    } else {
      return a * b;
    }
  }

  template <class T, int W>
  static WEFT_INLINE PairOf<T, W> combine_lanes(PairOf<T, W> a, PairOf<T, W> b) {
    return {combine_lanes(a.even, b.even), combine_lanes(a.odd, b.odd)};
  }
  template <class V>
  static WEFT_INLINE V combine_lanes(V a, V b) {
    if constexpr (kind == KernelKind::prod) {
      return multiplied(a, b);
    } else if constexpr (kind == KernelKind::bit_and || kind == KernelKind::logical_and) {
      return static_cast<V>(a & b);
    } else if constexpr (kind == KernelKind::bit_or || kind == KernelKind::logical_or) {
      return static_cast<V>(a | b);
    } else if constexpr (kind == KernelKind::bit_xor || kind == KernelKind::logical_xor) {
      return static_cast<V>(a ^ b);
    } else if constexpr (!kOrders) {
      return static_cast<V>(a + b);
    } else if constexpr (!Number::kFloating) {
      return (kind == KernelKind::min ? a < b : b < a) ? a : b;
    } else {
      // Equal values have equal bits or are zeros of two signs. min sets the sign bit if one of the values
      // has it, max only if both have it.
      using BitsOfV = Vec<Bits, sizeof(V) / sizeof(Bits)>;
      const auto bits_a = bits_as<BitsOfV>(a), bits_b = bits_as<BitsOfV>(b);
      if constexpr (kind == KernelKind::min) {
        const V least = a < b ? a : b, equal = bits_as<V>(bits_a | bits_b), r = a == b ? equal : least;
        return a != a ? a : r;
      } else {
        const V greatest = a > b ? a : b, equal = bits_as<V>(bits_a & bits_b), r = a == b ? equal : greatest;
        return a != a ? a : r;
      }
    }
  }

  // For floats: divides, and makes every NaN the canonical NaN.
  template <class V>
  static WEFT_INLINE V divided(V x, const Divisor<Quotient>& by) {
    if constexpr (kAverages) {
      return by.power_of_two ? x * by.reciprocal : x / by.value;
    }
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

  // Chunks that the hardware rounds to bf16.
#if defined(__AVX512BF16__)
  template <int W>
  static constexpr bool kByHardware = Number::kPaired && sizeof(Stored) == 2 && sizeof(Chunk<W>) == 128;
#else
  template <int W>
  static constexpr bool kByHardware = false;
#endif

  // The bytes of W stored elements.
  template <int W>
  static WEFT_INLINE auto finish(Chunk<W> x, const Divisor<Quotient>& by) {
    if constexpr (Number::kPaired && W > 1) {
      if constexpr (sizeof(Acc) == 8 && kAverages && kFuses<decltype(x.even)>) {  // f32
        if (!by.power_of_two) {
          const auto even = above_f64(x.even, by.value, by.reciprocal),
                     odd = above_f64(x.odd, by.value, by.reciprocal);
          if (!may_hold_nan<Acc>(even, odd)) [[likely]]
            return Number::template narrow_pair<W>(
                {quotient_f64(x.even, even, by.reciprocal), quotient_f64(x.odd, odd, by.reciprocal)});
        }
      }
      auto y = divided_chunk<W>(x, by);
#if defined(__AVX512BF16__)
      if constexpr (kByHardware<W>) {
        if (!special<false>(y.even, y.odd)) [[likely]]
          return rounded<W>(y);
      }
#endif
      if (may_hold_nan<Acc>(y.even, y.odd)) [[unlikely]]  // usually one comparison is enough for both
        y = {with_one_nan(y.even), with_one_nan(y.odd)};
      return Number::template narrow_pair<W>(y);
    } else if constexpr (Number::kFloating) {
      return rounded<W>(finish_lanes(x, by));
    } else if constexpr (kAverages) {
      return Number::template quotient<W>(x, by);
    } else {
      return bits_as<Vec<Stored, W>>(x);
    }
  }

  // For averages that may have to be rescued. An average is finite if its sum is finite.
  template <int W>
  static WEFT_INLINE Chunk<W> divided_chunk(Chunk<W> x, const Divisor<Quotient>& by) {
    if constexpr (Number::kPaired && W > 1) {
      return {divided(x.even, by), divided(x.odd, by)};
    } else {
      return divided(x, by);
    }
  }
  // Returns false if all sums are finite.
  template <int W>
  static WEFT_INLINE bool may_be_infinite(Chunk<W> x) {
    if constexpr (Number::kPaired && W > 1) {
      return may_hold_nan<Acc>(x.even - x.even, x.odd - x.odd);
    } else {
      return may_hold_nan<Acc>(x - x, x - x);
    }
  }
  // Returns true if all sums are finite; rounded() then gives the same bits as finish().
  template <int W>
  static WEFT_INLINE bool plain(Chunk<W> x) {
#if defined(__AVX512BF16__)
    if constexpr (kByHardware<W>) return !special<true>(x.even, x.odd);
#endif
    return !may_be_infinite<W>(x);
  }
  template <int W>
  static WEFT_INLINE auto rounded(Chunk<W> x) {
#if defined(__AVX512BF16__)
    if constexpr (kByHardware<W>) return bits_as<Vec<Bits, W / 2>>(rounded_by_hardware(x.even, x.odd));
#endif
    if constexpr (Number::kPaired && W > 1) {
      return Number::template narrow_pair<W>(x);
    } else if constexpr (Number::kPaired) {
      return Number::narrow_one(x);
    } else {
      return Number::template narrow<W>(x);
    }
  }

  // The average of element i alone, computed from numbers that are smaller by a power of two, so that their
  // sum is finite if the numbers are. The result is then limited to the magnitude of the largest number,
  // which the rounding of a sum could exceed.
  static Stored rescued(const std::byte* const* in, int n, std::int64_t i) {
    Acc smaller = 1;
    for (std::int64_t least = 1; least < n; least *= 2) smaller /= 2;
    const Acc total = sum_of_one(in, n, i, smaller), by = static_cast<Acc>(n) * smaller;
    Acc average = total / by;
    if (total - total == 0 && average - average != 0)
      average = total < 0 ? -Number::kLargest : Number::kLargest;
    return finish<1>(average, divisor(1));
  }

  // Computes the canonical tree for element i.
  static Acc sum_of_one(const std::byte* const* in, int n, std::int64_t i, Acc factor) {
    if (n == 1) return load<1>(in[0], i) * factor;
    int left = 1;
    while (left * 2 < n) left *= 2;
    return sum_of_one(in, left, i, factor) + sum_of_one(in + left, n - left, i, factor);
  }
};

// The average of two integers in their own width: the bits that both have, plus half of the bits that only
// one has. This is the floor of the average. Signed integers are first converted to unsigned integers by
// adding half the range; if their average is negative and no integer, one is added. Wraps: the number type of
// the unsigned twin.
template <class Number, class Wraps>
struct AverageOfTwo : Reduction<Wraps, KernelKind::sum> {
  template <int W>
  static WEFT_INLINE Vec<typename Wraps::Stored, W> combine(Vec<typename Wraps::Stored, W> a,
                                                            Vec<typename Wraps::Stored, W> b) {
    using U = typename Wraps::Stored;
    using V = Vec<U, W>;
    constexpr int kTop = 8 * sizeof(U) - 1;
    constexpr U kRaised = Number::kSigned ? U{1} << kTop : 0;
    const V one_has = static_cast<V>(a ^ b);
    const V floor = static_cast<V>(((a ^ kRaised) & (b ^ kRaised)) + (one_has >> 1));
    if constexpr (!Number::kSigned) return floor;
    return static_cast<V>((floor ^ kRaised) + (one_has & (static_cast<V>(~floor) >> kTop)));
  }
};

// The product of complex numbers: (a + bi)(c + di) = (ac - bd) + (ad + bc)i, each operation rounded. A chunk
// is W complex numbers as they lie in memory, with alternating real and imaginary parts. A difference has the
// same bits as the sum with a changed sign.
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
  static constexpr bool kRescues = false;
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
    return Reduction<Part, KernelKind::prod>::finish_lanes(x, by);
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
