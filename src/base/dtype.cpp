#include "weft/base/dtype.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "weft/base/error.hpp"

namespace weft {

std::string_view name(DType t) noexcept {
  switch (t) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i8: return "i8";
    case DType::i16: return "i16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
    case DType::u16: return "u16";
    case DType::u32: return "u32";
    case DType::u64: return "u64";
    case DType::boolean: return "bool";
    case DType::f8e4m3: return "f8e4m3";
    case DType::f8e5m2: return "f8e5m2";
    case DType::c64: return "c64";
    case DType::c128: return "c128";
  }
  return "?";
}

DType dtype_from_name(std::string_view text) {
  std::string known;
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto t = static_cast<DType>(i);
    if (name(t) == text) return t;
    known += fmt::format("{}{}", i ? ", " : "", name(t));
  }
  throw Error(ErrorCode::bad_argument,
              fmt::format("dtype: \"{}\" is not known; expected one of {}", text, known));
}

namespace {

// A small format with one sign bit, some exponent bits and kMantissa mantissa bits. Conversions use integer
// arithmetic on magnitudes. They shift the mantissa to its new width and round to nearest even on the bits
// that are shifted out. Subnormal results are shifted further.
template <int kMantissaBits, int kBias>
struct Small {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias) << 23;

  // Rounds as if exponents were unbounded; the caller must check for overflow. Not valid for NaNs.
  static std::uint32_t narrow(std::uint32_t magnitude) noexcept {
    if (magnitude >= kRebias + (1u << 23)) {  // normal
      constexpr std::uint32_t kBelowHalf = (1u << (kDropped - 1)) - 1u;
      return (magnitude - kRebias + kBelowHalf + ((magnitude >> kDropped) & 1u)) >> kDropped;
    }
    const std::uint32_t shift = kDropped + 128u - kBias - (magnitude >> 23);
    if (shift > 24) return 0;  // below half the smallest subnormal
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u, kept = mantissa >> shift,
                        rest = mantissa & ((1u << shift) - 1u), tie = 1u << (shift - 1);
    return kept + ((rest > tie || (rest == tie && (kept & 1u))) ? 1u : 0u);
  }

  // The float of a finite number.
  static float widen(std::uint32_t magnitude) noexcept {
    if (magnitude >> kMantissa == 0) return static_cast<float>(magnitude) * kSmallest;
    return std::bit_cast<float>((magnitude << kDropped) + kRebias);
  }
  static constexpr float kSmallest =
      std::bit_cast<float>(static_cast<std::uint32_t>(128 - kBias - kMantissa) << 23);
};
using Binary16 = Small<10, 15>;
using E4m3 = Small<3, 7>;
using E5m2 = Small<2, 15>;

constexpr std::uint32_t kInfinity = 0x7f800000u;

std::uint32_t magnitude_of(float f) noexcept { return std::bit_cast<std::uint32_t>(f) & 0x7fffffffu; }
std::uint32_t sign_of(float f) noexcept { return std::bit_cast<std::uint32_t>(f) >> 31; }
float with_sign(float magnitude, bool negative) noexcept { return negative ? -magnitude : magnitude; }

// For formats with the infinities and NaNs of IEEE 754: binary16 and E5M2.
template <class Format>
std::uint32_t narrow_ieee(float f) noexcept {
  constexpr int kMantissa = Format::kMantissa;
  constexpr std::uint32_t infinity = 31u << kMantissa, quiet = 1u << (kMantissa - 1);
  const std::uint32_t magnitude = magnitude_of(f);
  const std::uint32_t bits = magnitude > kInfinity
                                 ? infinity | quiet | ((magnitude & 0x7fffffu) >> (23 - kMantissa))
                                 : std::min(Format::narrow(magnitude), infinity);
  return (sign_of(f) << (kMantissa + 5)) | bits;
}
template <class Format>
float widen_ieee(std::uint32_t bits) noexcept {
  constexpr int kMantissa = Format::kMantissa;
  constexpr std::uint32_t infinity = 31u << kMantissa;
  const std::uint32_t magnitude = bits & ((32u << kMantissa) - 1u);
  const bool negative = magnitude != bits;
  if (magnitude < infinity) return with_sign(Format::widen(magnitude), negative);
  return std::bit_cast<float>((negative ? 0x80000000u : 0u) | kInfinity |
                              ((magnitude - infinity) << (23 - kMantissa)));
}

}  // namespace

f16::f16(float f) noexcept : bits(static_cast<std::uint16_t>(narrow_ieee<Binary16>(f))) {}
f16::operator float() const noexcept { return widen_ieee<Binary16>(bits); }

f8e5m2::f8e5m2(float f) noexcept : bits(static_cast<std::uint8_t>(narrow_ieee<E5m2>(f))) {}
f8e5m2::operator float() const noexcept { return widen_ieee<E5m2>(bits); }

f8e4m3::f8e4m3(float f) noexcept {
  constexpr std::uint32_t nan = 0x7f;
  const std::uint32_t magnitude = magnitude_of(f);
  const std::uint32_t code = magnitude >= kInfinity ? nan : std::min(E4m3::narrow(magnitude), nan);
  bits = static_cast<std::uint8_t>((sign_of(f) << 7) | code);
}
f8e4m3::operator float() const noexcept {
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7f)
    return std::bit_cast<float>((static_cast<std::uint32_t>(bits & 0x80u) << 24) | 0x7fc00000u);
  return with_sign(E4m3::widen(magnitude), (bits & 0x80u) != 0);
}

}  // namespace weft
