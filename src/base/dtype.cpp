#include "weft/base/dtype.hpp"

#include <fmt/format.h>

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

// binary32 to binary16 by integer arithmetic: shift the mantissa to its new width and round to nearest even
// on the bits that fall off; subnormal results shift further.
f16::f16(float f) noexcept {
  const auto u = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal: 2^-14 and above
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude > 0x33000000u) {  // subnormal: above 2^-25
    const std::uint32_t shift = 126u - (magnitude >> 23), mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u),
                        tie = 1u << (shift - 1);
    half = kept + ((rest > tie || (rest == tie && (kept & 1u))) ? 1u : 0u);
  } else {
    half = 0;
  }
  bits = static_cast<std::uint16_t>(sign | half);
}

f16::operator float() const noexcept {
  const std::uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu,
                      mantissa = bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

}  // namespace weft
