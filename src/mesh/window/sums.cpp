#include "mesh/window/sums.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/reduce.hpp"

namespace weft::windows {
namespace {

template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, bf16> || std::is_same_v<T, f16>, float, T>;

template <class T>
void add_elements(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                  std::int64_t out_step) {
  for (std::int64_t i = 0; i < count; ++i) {
    SumOf<T> a;
    T b;
    std::memcpy(&a, out + i * out_step, sizeof(a));
    std::memcpy(&b, in + i * in_step, sizeof(b));
    if constexpr (std::is_integral_v<T>)
      a = static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));  // wraps
    else
      a += static_cast<SumOf<T>>(b);
    std::memcpy(out + i * out_step, &a, sizeof(a));
  }
}

template <class T>
void round_elements(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                    std::int64_t out_step) {
  for (std::int64_t i = 0; i < count; ++i) {
    SumOf<T> sum;
    std::memcpy(&sum, in + i * in_step, sizeof(sum));
    const T rounded(sum);
    std::memcpy(out + i * out_step, &rounded, sizeof(T));
  }
}

// To f32 such that rounding once more, to a dtype with fewer bits, gives what rounding `value` at once would ("round to odd": S. Boldo,
// G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
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

// Calls see(T{}) for the type of an element that can be added.
template <class See>
void with_type(DType dtype, const See& see) {
  switch (dtype) {
    case DType::f64: return see(double{});
    case DType::f32: return see(float{});
    case DType::f16: return see(f16{});
    case DType::bf16: return see(bf16{});
    case DType::i8: return see(std::int8_t{});
    case DType::i16: return see(std::int16_t{});
    case DType::i32: return see(std::int32_t{});
    case DType::i64: return see(std::int64_t{});
    case DType::u8: return see(std::uint8_t{});
    case DType::u16: return see(std::uint16_t{});
    case DType::u32: return see(std::uint32_t{});
    case DType::u64: return see(std::uint64_t{});
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: return;
  }
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

void stream_runs(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                 std::int64_t out_step, std::int64_t run) {
  for (std::int64_t i = 0; i < count; ++i, in += in_step, out += out_step) stream_bytes(out, in, run);
}

void add_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    loops.each_row(
        [&](std::int64_t from, std::int64_t to, std::int64_t count, std::int64_t in_step,
            std::int64_t out_step) { add_elements<T>(in + from, out + to, count, in_step, out_step); });
  });
}

void round_to(const Loops& loops, DType dtype, const std::byte* in, std::byte* out) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    loops.each_row(
        [&](std::int64_t from, std::int64_t to, std::int64_t count, std::int64_t in_step,
            std::int64_t out_step) { round_elements<T>(in + from, out + to, count, in_step, out_step); });
  });
}

DType sum_dtype(DType dtype) noexcept {
  return dtype == DType::bf16 || dtype == DType::f16 ? DType::f32 : dtype;
}

bool can_add(DType dtype) noexcept {
  bool can = false;
  with_type(dtype, [&](auto) { can = true; });
  return can;
}

std::array<std::byte, 16> element_of(double value, DType dtype) noexcept {
  std::array<std::byte, 16> bytes{};
  const auto put = [&](const auto& element) { std::memcpy(bytes.data(), &element, sizeof(element)); };
  switch (dtype) {
    case DType::boolean: put(static_cast<std::uint8_t>(value != 0)); break;
    case DType::f8e4m3: put(f8e4m3(to_odd(value))); break;
    case DType::f8e5m2: put(f8e5m2(to_odd(value))); break;
    case DType::c64: put(static_cast<float>(value)); break;
    case DType::c128: put(value); break;
    default: with_type(dtype, [&](auto zero) { put(rounded<decltype(zero)>(value)); });
  }
  return bytes;
}

}  // namespace weft::windows
