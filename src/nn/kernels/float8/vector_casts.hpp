// The casts of casts.hpp in vectors, for a set of instructions V: avx2.cpp, avx512.cpp and neon.cpp have one.
//
// One addition rounds, for normal and subnormal codes alike. A magnitude m in [2^e, 2^(e+1)) is added to the
// power of two `anchor` = 2^(e + dropped), or to `magic` if that is larger: the last bit of the sum is the
// last bit that the format keeps, and the hardware rounds to nearest, ties to even. The difference of the
// bits of sum and anchor is then m in units of that last bit, and the code is
//
//   bits(sum) - bits(anchor) + (bits(anchor) >> dropped) - (bits(magic) >> dropped).
//
// Four vectors of 32-bit words are narrowed to one of bytes with signed saturation. A NaN has large bits, so
// that it becomes 0x7f, the code of NaN, by itself; and narrowing the bits of a float keeps its sign bit.
//
// Codes are widened to bf16 in bytes. The upper and the lower byte of a normal value are shifts of the code;
// subnormal codes and those of infinity and NaN are looked up by their last four bits.
#pragma once

#include <cstring>
#include <type_traits>

#include "nn/kernels/float8/widened.hpp"

namespace weft::float8 {

/// How the elements of a block are distributed over its four vectors: as in memory, or in the order of V's
/// cheapest way to widen bf16. V stores either in the order of memory.
struct MemoryOrder {};
struct PairOrder {};

template <class V>
class VectorCasts {
  using Floats = typename V::Floats;  // kLanes f32
  using Ints = typename V::Ints;      // kLanes i32
  using Words = typename V::Words;    // 2 kLanes i16
  using Bytes = typename V::Bytes;    // 4 kLanes u8
  static constexpr std::int64_t kBlock = 4 * V::kLanes;
  static constexpr auto kCount = static_cast<std::size_t>(kBlock);

  struct Constants {
    explicit Constants(const Float8Format& f)
        : largest(V::fill(std::bit_cast<float>(f.largest))),
          infinite(V::fill_ints(kInfinite)),
          to_anchor(V::fill_ints(f.dropped << 23)),
          magic(V::fill_ints(bits_of(f.magic))),
          base(V::fill_words(static_cast<std::int16_t>(bits_of(f.magic) >> f.dropped))),
          nan(V::fill_words(static_cast<std::int16_t>(kNaN >> 16))),
          dropped(V::shift(f.dropped)) {}
    Floats largest;
    Ints infinite, to_anchor, magic;
    Words base, nan;
    typename V::Shift dropped;
  };
  struct Rounded {
    Ints anchor;
    Floats sum;
  };
  static Rounded rounded(Floats v, const Constants& c) {
    const Floats m = V::least_floats(c.largest, V::magnitude(v));  // m if it is a NaN
    const Ints anchor = V::most_ints(V::add_ints(V::bits_and(V::bits(m), c.infinite), c.to_anchor), c.magic);
    return {anchor, V::add(m, V::floats(anchor))};
  }

  template <class Order>
  static void store(const Floats (&v)[4], const Constants& c, std::uint8_t* out) {
    Ints words[4];
    for (int i = 0; i < 4; ++i) {
      const Rounded r = rounded(v[i], c);
      words[i] =
          V::add_ints(V::bits(r.sum), V::subtract_ints(V::ints_shifted_right(r.anchor, c.dropped), r.anchor));
    }
    const Bytes codes = V::to_bytes(V::subtract_words(V::to_words(words[0], words[1]), c.base),
                                    V::subtract_words(V::to_words(words[2], words[3]), c.base));
    const Bytes signs =
        V::to_bytes(V::to_words(V::bits(v[0]), V::bits(v[1])), V::to_words(V::bits(v[2]), V::bits(v[3])));
    V::store_bytes(out, V::with_signs_of_bytes(codes, signs), Order{});
  }
  template <class Order>
  static void store(const Floats (&v)[4], const Constants& c, bf16* out) {
    for (int i = 0; i < 4; i += 2) {
      const Rounded a = rounded(v[i], c), b = rounded(v[i + 1], c);
      const Words values = V::upper_halves(V::bits(V::subtract(a.sum, V::floats(a.anchor))),
                                           V::bits(V::subtract(b.sum, V::floats(b.anchor))));
      const Words signs = V::to_words(V::bits(v[i]), V::bits(v[i + 1]));
      V::store_words(out + i * V::kLanes, V::with_signs_of_words(V::least_words(values, c.nan), signs),
                     Order{});
    }
  }

  template <bool kEach, class In, class Out>
  static void block(const In* x, const float* scales, Floats scale, const Constants& c, Out* out) {
    // Pairs are cheaper to load, but scales stand in the order of memory.
    using Order = std::conditional_t<std::is_same_v<In, bf16> && !kEach, PairOrder, MemoryOrder>;
    Floats v[4];
    V::load(x, v, Order{});
    for (int i = 0; i < 4; ++i) v[i] = V::multiply(v[i], kEach ? V::load(scales + i * V::kLanes) : scale);
    store<Order>(v, c, out);
  }
  // Asks for the block that stands two pages further: the core's own prefetchers stop at the end of a page.
  template <class In>
  static void fetch_ahead(const In* x) {
    constexpr std::int64_t kLine = 64 / sizeof(In), kAhead = 8192 / sizeof(In);
    for (std::int64_t at = 0; at < kBlock; at += kLine) __builtin_prefetch(x + kAhead + at);
  }
  template <bool kEach, class In, class Out>
  static void cast_all(const In* x, const float* scales, const Float8Format& format, Out* out,
                       std::int64_t n) {
    const Constants c(format);
    const Floats scale = V::fill(kEach ? 0.0F : *scales);
    std::int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
      fetch_ahead(x + i);
      block<kEach>(x + i, scales + (kEach ? i : 0), scale, c, out + i);
    }
    if (i == n) return;
    In last[kCount] = {};
    float of_last[kCount] = {};
    Out results[kCount];
    const auto rest = static_cast<std::size_t>(n - i);
    std::memcpy(last, x + i, rest * sizeof(In));
    if (kEach) std::memcpy(of_last, scales + i, rest * sizeof(float));
    block<kEach>(last, of_last, scale, c, results);
    std::memcpy(out + i, results, rest * sizeof(Out));
  }
  template <class In, class Out>
  static void cast(const In* x, CastScales s, const Float8Format& format, Out* out, std::int64_t rows,
                   std::int64_t n) {
    if (!s.each) return cast_all<false>(x, s.scales, format, out, rows * n);
    for (std::int64_t r = 0; r < rows; ++r) cast_all<true>(x + r * n, s.scales, format, out + r * n, n);
  }

  struct WideningConstants {
    explicit WideningConstants(const Float8Format& f)
        : magnitude(V::fill_bytes(0x7f)),
          sign(V::fill_bytes(0x80)),
          first_normal(V::fill_bytes(1 << (23 - f.dropped))),
          largest(V::fill_bytes(f.largest_code)),
          upper_bits(V::fill_bytes(0xff >> (24 - f.dropped))),
          lower_bits(V::fill_bytes((0xff << (f.dropped - 16)) & 0xff)),
          rebias(V::fill_bytes(f.rebias >> 24)),
          down(V::shift(24 - f.dropped)),
          up(V::shift(f.dropped - 16)) {
      std::uint8_t uppers[16], lowers[16];
      for (int i = 0; i < 16; ++i) {
        const auto code = static_cast<std::uint8_t>(i < 8 ? i : 0x70 | i);
        uppers[i] = static_cast<std::uint8_t>(widened(code, f) >> 24);
        lowers[i] = static_cast<std::uint8_t>(widened(code, f) >> 16);
      }
      upper_of = V::table(uppers);
      lower_of = V::table(lowers);
    }
    Bytes magnitude, sign, first_normal, largest, upper_bits, lower_bits, rebias, upper_of, lower_of;
    typename V::Shift down, up;
  };
  template <class Out>
  static void widen_block(const std::uint8_t* codes, const WideningConstants& c, Out* out) {
    const Bytes all = V::load_for_pairs(codes), m = V::bits_and(all, c.magnitude);
    const auto special = V::either(V::less(m, c.first_normal), V::less(c.largest, m));
    const Bytes upper =
        V::select(special, V::lookup(c.upper_of, m),
                  V::add_bytes(V::bits_and(V::words_shifted_right(m, c.down), c.upper_bits), c.rebias));
    const Bytes lower = V::select(special, V::lookup(c.lower_of, m),
                                  V::bits_and(V::words_shifted_left(m, c.up), c.lower_bits));
    V::store_pairs(out, lower, V::bits_or(upper, V::bits_and(all, c.sign)));
  }
  template <class Out>
  static void widen(const std::uint8_t* codes, const Float8Format& format, Out* out, std::int64_t n) {
    const WideningConstants c(format);
    std::int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) widen_block(codes + i, c, out + i);
    if (i == n) return;
    std::uint8_t last[kCount] = {};
    Out results[kCount];
    const auto rest = static_cast<std::size_t>(n - i);
    std::memcpy(last, codes + i, rest);
    widen_block(last, c, results);
    std::memcpy(out + i, results, rest * sizeof(Out));
  }

 public:
  static constexpr Casts kCasts{cast<float, std::uint8_t>, cast<float, bf16>, cast<bf16, std::uint8_t>,
                                cast<bf16, bf16>,          widen<bf16>,       widen<float>};
};

}  // namespace weft::float8
