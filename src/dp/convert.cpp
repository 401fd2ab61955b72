#include "dp/convert.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "dp/elements.hpp"
#include "dp/parts.hpp"
#include "host/threads/workers.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {
namespace {

TensorView line(const std::byte* data, std::int64_t at, std::int64_t count, DType dtype) {
  return {const_cast<std::byte*>(data) + at * size_bytes(dtype), dtype, Device{}, Dims::line(count),
          Dims::line(1)};
}

template <class T>
constexpr bool kHalf = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

// The float that rounds to the same half as x. It is rounded to odd, so that its last bit, which no half
// keeps, records what f32 cannot hold (S. Boldo, G. Melquiond, "Emulation of a FMA and correctly rounded
// sums", 2008).
float to_odd(double x) {
  const auto f = static_cast<float>(x);
  if (static_cast<double>(f) == x || x != x) return f;
  const auto bits = std::bit_cast<std::uint32_t>(f);
  const bool beyond = std::abs(static_cast<double>(f)) > std::abs(x);
  return std::bit_cast<float>((beyond ? bits - 1 : bits) | 1u);
}

template <class From, class To>
void convert(std::span<const From> from, std::span<To> to) {
  if constexpr (kHalf<From> && std::is_same_v<To, float>)
    loops::widen(from.data(), to.data(), from.size());
  else if constexpr (std::is_same_v<From, float> && kHalf<To>)
    loops::narrow(from.data(), to.data(), from.size());
  else if constexpr (std::is_same_v<From, double> && kHalf<To>)
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = To(to_odd(from[i]));
  else
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = from_double<To>(to_double(from[i]));
}

void convert(const Converted& c, std::int64_t begin, std::int64_t count, DType from, DType to) {
  with_elements(line(c.from, begin, count, from), [&](auto source) {
    with_elements(line(c.to, begin, count, to), [&](auto target) {
      convert(std::span<const typename decltype(source)::value_type>(source), target);
    });
  });
}

}  // namespace

void convert_all(Compute* compute, const std::vector<Converted>& all, DType from, DType to) {
  if (from == to) {
    copy_all(compute, all.size(), [&](std::size_t i) {
      return Copied{all[i].from, all[i].to, all[i].count * size_bytes(from)};
    });
    return;
  }
  if (on_device(compute))
    throw Error(
        ErrorCode::unsupported,
        fmt::format("sharded_parameters: {} to {} on {}; expected options.reduce as options.gradient there",
                    name(from), name(to), to_string(compute->device())));
  threads::for_blocks(
      compute, all.size(), [&](std::size_t i) { return all[i].count; },
      [&](const threads::Block& b) { convert(all[b.tensor], b.begin, b.count, from, to); });
}

}  // namespace weft::dp
