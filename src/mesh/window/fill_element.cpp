#include "mesh/window/fill_element.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/sum_types.hpp"

namespace weft::windows {
namespace {

// Rounds to f32 in such a way that rounding once more, to a dtype with fewer bits, gives the same as rounding
// `value` at once ("round to odd": S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums:
// proved algorithms using rounding to odd", 2008).
float to_odd(double value) {
  float f = static_cast<float>(value);
  if (static_cast<double>(f) == value || !std::isfinite(f)) return f;
  if (std::fabs(static_cast<double>(f)) > std::fabs(value)) f = std::nextafter(f, 0.0F);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &f, sizeof(f));
  bits |= 1U;
  std::memcpy(&f, &bits, sizeof(f));
  return std::signbit(value) ? -std::fabs(f) : f;
}

template <class T>
T rounded(double value) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
    return T(to_odd(value));
  } else if constexpr (std::is_integral_v<T>) {
    // The nearest that T has.
    if (!(value > static_cast<double>(std::numeric_limits<T>::min()))) return std::numeric_limits<T>::min();
    if (!(value < static_cast<double>(std::numeric_limits<T>::max()))) return std::numeric_limits<T>::max();
    return static_cast<T>(std::nearbyint(value));
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace

std::array<std::byte, 16> element_of(double value, DType dtype) noexcept {
  std::array<std::byte, 16> bytes{};
  const auto put = [&](const auto& element) { std::memcpy(bytes.data(), &element, sizeof(element)); };
  switch (dtype) {
    case DType::boolean: put(static_cast<std::uint8_t>(value != 0)); break;
    case DType::f8e4m3: put(f8e4m3(to_odd(value))); break;
    case DType::f8e5m2: put(f8e5m2(to_odd(value))); break;
    case DType::c64: put(static_cast<float>(value)); break;
    case DType::c128: put(value); break;
    default: with_sum_type(dtype, [&](auto zero) { put(rounded<decltype(zero)>(value)); });
  }
  return bytes;
}

}  // namespace weft::windows
