// casts.hpp in plain loops.
#include "nn/kernels/float8/casts.hpp"
#include "nn/kernels/float8/widened.hpp"

namespace weft::float8 {
namespace {

inline float f32_of(float x) { return x; }
inline float f32_of(bf16 x) { return static_cast<float>(x); }

// A magnitude that is normal in the format keeps its upper bits: adding almost half of the last kept bit, and
// the last kept bit itself, rounds to nearest, ties to even.
inline std::int32_t rounded_at(std::int32_t magnitude, std::int32_t dropped) {
  return magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1);
}

inline void store(float v, const Float8Format& f, std::uint8_t& code) {
  const std::int32_t bits = bits_of(v), magnitude = bits & kMagnitude;
  const std::int32_t m = magnitude < f.largest ? magnitude : f.largest;
  const std::int32_t normal = (rounded_at(m, f.dropped) - f.rebias) >> f.dropped;
  const std::int32_t small = bits_of(std::bit_cast<float>(m) + f.magic) - bits_of(f.magic);
  std::int32_t c = m < f.least_normal ? small : normal;
  c = magnitude > kInfinite ? 0x7f : c;
  code = static_cast<std::uint8_t>(c | ((bits >> 24) & 0x80));
}

inline void store(float v, const Float8Format& f, bf16& value) {
  const std::int32_t bits = bits_of(v), magnitude = bits & kMagnitude;
  const std::int32_t m = magnitude < f.largest ? magnitude : f.largest;
  const std::int32_t normal = (rounded_at(m, f.dropped) >> f.dropped) << f.dropped;
  const std::int32_t small = bits_of((std::bit_cast<float>(m) + f.magic) - f.magic);
  std::int32_t c = m < f.least_normal ? small : normal;
  c = magnitude > kInfinite ? kNaN : c;
  value.bits = static_cast<std::uint16_t>((c >> 16) | ((bits >> 16) & 0x8000));
}

template <class In, class Out>
void cast(const In* x, CastScales scales, const Float8Format& format, Out* out, std::int64_t rows,
          std::int64_t n) {
  const Float8Format f = format;
  if (!scales.each) {
    const float scale = *scales.scales;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < rows * n; ++i) store(f32_of(x[i]) * scale, f, out[i]);
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r, x += n, out += n) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) store(f32_of(x[i]) * scales.scales[i], f, out[i]);
  }
}

void widen_to_bf16(const std::uint8_t* codes, const Float8Format& format, bf16* out, std::int64_t n) {
  const Float8Format f = format;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) out[i].bits = static_cast<std::uint16_t>(widened(codes[i], f) >> 16);
}
void widen_to_f32(const std::uint8_t* codes, const Float8Format& format, float* out, std::int64_t n) {
  const Float8Format f = format;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(widened(codes[i], f));
}

}  // namespace

const Casts& plain_casts() noexcept {
  static constexpr Casts kCasts{cast<float, std::uint8_t>, cast<float, bf16>, cast<bf16, std::uint8_t>,
                                cast<bf16, bf16>,          widen_to_bf16,     widen_to_f32};
  return kCasts;
}

}  // namespace weft::float8
