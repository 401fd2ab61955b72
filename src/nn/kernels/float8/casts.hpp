// Casts to and from eight bits, of one thread: one table of functions for each kind of instructions. All
// tables give the same bits.
#pragma once

#include <bit>
#include <cstdint>

#include "weft/base/dtype.hpp"

namespace weft::float8 {

/// A format as casts see it. Magnitudes are bits of f32 without sign, as signed numbers, because AVX2
/// compares only these. All codes below the smallest normal magnitude are multiples of one step, the value of
/// code 1.
struct Float8Format {
  std::int32_t dropped;       ///< mantissa bits of f32 that the format lacks
  std::int32_t rebias;        ///< (bias of f32 - bias of the format) << 23
  std::int32_t least_normal;  ///< the smallest normal magnitude
  std::int32_t largest;       ///< the largest finite magnitude
  std::int32_t largest_code;
  float magic;  ///< the power of two whose last bit is the step: adding it rounds to multiples of the step
  float step;
};
constexpr std::int32_t bits_of(float f) { return std::bit_cast<std::int32_t>(f); }
inline constexpr Float8Format kE4m3{20, 120 << 23, bits_of(0x1p-6F), bits_of(448.0F), 0x7e, 0x1p14F, 0x1p-9F};
inline constexpr Float8Format kE5m2{21,   112 << 23, bits_of(0x1p-14F), bits_of(57344.0F),
                                    0x7b, 0x1p7F,    0x1p-16F};

inline constexpr std::int32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000, kNaN = 0x7fc00000;

/// The scales of rows of n elements: one for all, or one for each column.
struct CastScales {
  const float* scales;
  bool each;
};

/// The functions of weft/nn/float8.hpp on elements that stand one after the other: `rows` times n of them.
struct Casts {
  template <class In, class Out>
  using Cast = void (*)(const In* x, CastScales scales, const Float8Format& format, Out* out,
                        std::int64_t rows, std::int64_t n);
  template <class Out>
  using Widen = void (*)(const std::uint8_t* codes, const Float8Format& format, Out* out, std::int64_t n);

  Cast<float, std::uint8_t> f32_to_codes;
  Cast<float, bf16> f32_to_values;
  Cast<bf16, std::uint8_t> bf16_to_codes;
  Cast<bf16, bf16> bf16_to_values;
  Widen<bf16> codes_to_bf16;
  Widen<float> codes_to_f32;
};

/// Plain loops, which the compiler vectorises as it can. For every CPU.
const Casts& plain_casts() noexcept;
/// For AVX2, AVX-512 (F, BW, VL, DQ) or NEON. Null: this build has none, for an architecture without them.
const Casts* avx2_casts() noexcept;
const Casts* avx512_casts() noexcept;
const Casts* neon_casts() noexcept;

}  // namespace weft::float8
