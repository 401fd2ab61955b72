// Element types and their conversions.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

/// The element type of a view. `boolean` is one byte, 0 or 1. f8e4m3 (finite, one NaN per sign) and f8e5m2
/// are the types of the OCP 8-bit floating point specification; weft moves them, but does not combine them.
/// c64 and c128 are pairs of f32 and f64: real part, imaginary part.
enum class DType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  i8,
  i16,
  i32,
  i64,
  u8,
  u16,
  u32,
  u64,
  boolean,
  f8e4m3,
  f8e5m2,
  c64,
  c128,
};
inline constexpr int kDTypeCount = 17;

/// Bytes per element.
constexpr int size_bytes(DType t) noexcept {
  switch (t) {
    case DType::c128: return 16;
    case DType::f64:
    case DType::i64:
    case DType::u64:
    case DType::c64: return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32: return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16: return 2;
    case DType::i8:
    case DType::u8:
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2: return 1;
  }
  return 0;
}

/// "f32", "bf16", …; `boolean` is "bool".
std::string_view name(DType t) noexcept;

/// The type of that name. Throws bad_argument if there is none. The text lists the known names.
DType dtype_from_name(std::string_view name);

/// Whether weft computes with this type as a floating-point type. False for f8 and complex types.
constexpr bool is_floating(DType t) noexcept {
  return t == DType::f64 || t == DType::f32 || t == DType::f16 || t == DType::bf16;
}

/// bfloat16: the upper half of an IEEE binary32. A type for storage only: arithmetic is in float.
struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  /// Rounds to nearest, ties to even. A NaN stays a NaN (quiet).
  explicit constexpr bf16(float f) noexcept {
    const auto u = std::bit_cast<std::uint32_t>(f);
    bits = (u & 0x7fffffffu) > 0x7f800000u
               ? static_cast<std::uint16_t>((u >> 16) | 0x40u)
               : static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit constexpr operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static constexpr bf16 from_bits(std::uint16_t b) noexcept {
    bf16 x;
    x.bits = b;
    return x;
  }
};

/// IEEE binary16. A type for storage only: arithmetic is in float.
struct f16 {
  std::uint16_t bits = 0;
  f16() = default;
  /// Rounds to nearest, ties to even. Overflow gives infinity. A NaN stays a NaN (quiet).
  explicit f16(float f) noexcept;
  explicit operator float() const noexcept;
  static constexpr f16 from_bits(std::uint16_t b) noexcept {
    f16 x;
    x.bits = b;
    return x;
  }
};

/// OCP E4M3 (also called e4m3fn): 4 bits of exponent, 3 of mantissa, values up to 448, no infinity. If all
/// bits of exponent and mantissa are 1, the value is a NaN. Storage only.
struct f8e4m3 {
  std::uint8_t bits = 0;
  f8e4m3() = default;
  /// Rounds to nearest, ties to even. Does not saturate: an infinity, or a value that rounds to more than
  /// 448, becomes a NaN.
  explicit f8e4m3(float f) noexcept;
  explicit operator float() const noexcept;
  static constexpr f8e4m3 from_bits(std::uint8_t b) noexcept {
    f8e4m3 x;
    x.bits = b;
    return x;
  }
};

/// OCP E5M2: 5 bits of exponent, 2 of mantissa, values up to 57344, infinities and NaNs as in binary16. An
/// f8e5m2 is the upper half of a binary16. Storage only.
struct f8e5m2 {
  std::uint8_t bits = 0;
  f8e5m2() = default;
  /// Rounds to nearest, ties to even. Does not saturate: overflow gives infinity. A NaN stays a NaN (quiet).
  explicit f8e5m2(float f) noexcept;
  explicit operator float() const noexcept;
  static constexpr f8e5m2 from_bits(std::uint8_t b) noexcept {
    f8e5m2 x;
    x.bits = b;
    return x;
  }
};

/// A complex number of two `Part`s: std::complex<Part>, or a type of the same form, such as one of a device.
/// (This header does not include `<complex>`, which takes as long to compile as a third of weft/group.hpp.)
template <class T, class Part>
concept ComplexOf = std::same_as<typename T::value_type, Part> && sizeof(T) == 2 * sizeof(Part) &&
                    requires(const T& z) {
  { z.real() } -> std::convertible_to<Part>;
  { z.imag() } -> std::convertible_to<Part>;
};

/// The DType of a C++ type: `dtype_of<float> == DType::f32`.
template <class T>
inline constexpr DType dtype_of = T::weft_has_no_dtype_for_this_type;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<f16> = DType::f16;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<std::int8_t> = DType::i8;
template <>
inline constexpr DType dtype_of<std::int16_t> = DType::i16;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <>
inline constexpr DType dtype_of<std::uint16_t> = DType::u16;
template <>
inline constexpr DType dtype_of<std::uint32_t> = DType::u32;
template <>
inline constexpr DType dtype_of<std::uint64_t> = DType::u64;
template <>
inline constexpr DType dtype_of<bool> = DType::boolean;
template <>
inline constexpr DType dtype_of<f8e4m3> = DType::f8e4m3;
template <>
inline constexpr DType dtype_of<f8e5m2> = DType::f8e5m2;
template <class T>
requires ComplexOf<T, float>
inline constexpr DType dtype_of<T> = DType::c64;
template <class T>
requires ComplexOf<T, double>
inline constexpr DType dtype_of<T> = DType::c128;
// If std::int64_t is `long`, `long long` and `unsigned long long` are different types from it and need their
// own rows.
template <class T>
requires(std::same_as<T, long long> &&
         !std::same_as<T, std::int64_t>) inline constexpr DType dtype_of<T> = DType::i64;
template <class T>
requires(std::same_as<T, unsigned long long> &&
         !std::same_as<T, std::uint64_t>) inline constexpr DType dtype_of<T> = DType::u64;

}  // namespace weft
