// The value of one code.
#pragma once

#include "nn/kernels/float8/casts.hpp"

namespace weft::float8 {

/// Its bits as f32.
inline std::int32_t widened(std::uint8_t code, const Float8Format& f) {
  const std::int32_t m = code & 0x7f;
  const std::int32_t normal = (m << f.dropped) + f.rebias;
  const std::int32_t small = bits_of(static_cast<float>(m) * f.step);
  std::int32_t bits = normal < f.least_normal ? small : normal;
  const std::int32_t beyond = (m & 3) == 0 && f.largest_code == 0x7b ? kInfinite : kNaN;
  bits = m > f.largest_code ? beyond : bits;
  return bits | static_cast<std::int32_t>(static_cast<std::uint32_t>(code & 0x80) << 24);
}

}  // namespace weft::float8
