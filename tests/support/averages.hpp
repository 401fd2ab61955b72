// Averages of numbers whose sum does not fit in their dtype, and the right results. These are computed one
// element at a time in 128 bits or in a long double, by no rule of weft's.
//
//   for (i …) store_extreme(in, dtype, rank, i);
//   … all_reduce(in, out, {.op = ReduceOp::avg}) …
//   EXPECT_EQ(wrong_average(dtype, ins of all ranks, out, count), "");
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "weft/base/dtype.hpp"

namespace weft::test {

__extension__ typedef __int128 Wide;
__extension__ typedef unsigned __int128 UnsignedWide;

/// f(T{}) for the type of each part of an element, and how many parts it has: of a complex number two.
template <class F>
auto with_part(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f64: return f(double{}, 1);
    case DType::f32: return f(float{}, 1);
    case DType::f16: return f(f16{}, 1);
    case DType::bf16: return f(bf16{}, 1);
    case DType::i8: return f(std::int8_t{}, 1);
    case DType::i16: return f(std::int16_t{}, 1);
    case DType::i32: return f(std::int32_t{}, 1);
    case DType::i64: return f(std::int64_t{}, 1);
    case DType::u8: return f(std::uint8_t{}, 1);
    case DType::u16: return f(std::uint16_t{}, 1);
    case DType::u32: return f(std::uint32_t{}, 1);
    case DType::u64: return f(std::uint64_t{}, 1);
    case DType::c64: return f(float{}, 2);
    case DType::c128: return f(double{}, 2);
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2: break;
  }
  std::abort();
}

/// The dtypes that have averages.
inline std::vector<DType> averaged_dtypes() {
  std::vector<DType> all;
  for (int d = 0; d < kDTypeCount; ++d)
    if (const auto t = static_cast<DType>(d); t != DType::boolean && t != DType::f8e4m3 && t != DType::f8e5m2)
      all.push_back(t);
  return all;
}

// Largest and least first, those that usually go wrong behind them.
template <class T>
std::vector<T> extremes() {
  if constexpr (std::is_integral_v<T>) {
    using L = std::numeric_limits<T>;
    return {L::max(), L::min(), T(L::max() - 1), T(L::min() + 1), T(0), T(1), T(-1), T(L::max() / 2)};
  } else {
    const double most = std::is_same_v<T, double>  ? std::numeric_limits<double>::max()
                        : std::is_same_v<T, float> ? std::numeric_limits<float>::max()
                        : std::is_same_v<T, f16>   ? 65504
                                                   : 0x1.fep127;
    const auto of = [](double x) {
      if constexpr (sizeof(T) == 8)
        return x;
      else
        return static_cast<T>(static_cast<float>(x));
    };
    return {of(most), of(-most), of(most * 0.75), of(-most / 2), of(0), of(1.5), of(-1.5), of(most / 3)};
  }
}

/// Element i of rank `rank`: the largest of all, the least of all, the two by turns, then a mixture.
inline void store_extreme(std::byte* data, DType dtype, int rank, std::int64_t i) {
  with_part(dtype, [&]<class T>(T, int parts) {
    static const std::vector<T> list = extremes<T>();
    for (int part = 0; part < parts; ++part) {
      std::uint64_t h =
          (static_cast<std::uint64_t>(i * parts + part) * 1009 + static_cast<std::uint64_t>(rank)) *
          0x9e3779b97f4a7c15u;
      h ^= h >> 29;
      const std::size_t which = i == 0   ? 0
                                : i == 1 ? 1
                                : i == 2 ? static_cast<std::size_t>(rank % 2)
                                         : h % list.size();
      std::memcpy(data + (i * parts + part) * static_cast<std::int64_t>(sizeof(T)), &list[which], sizeof(T));
    }
    return 0;
  });
}

/// The fault of `got`, the average over inputs of finite numbers. Empty: none. Integers are exact, truncated
/// toward zero. Floats are finite, and as near as the roundings of their accumulator (`unit`) and one
/// rounding of the dtype allow.
inline std::string wrong_average(DType dtype, const std::vector<const std::byte*>& in, const std::byte* got,
                                 std::int64_t count) {
  return with_part(dtype, [&]<class T>(T, int parts) -> std::string {
    const auto n = static_cast<long double>(in.size());
    for (std::int64_t i = 0; i < count * parts; ++i) {
      const auto at = [&](const std::byte* from) {
        T x;
        std::memcpy(static_cast<void*>(&x), from + i * static_cast<std::int64_t>(sizeof(T)), sizeof x);
        return x;
      };
      if constexpr (std::is_integral_v<T>) {
        Wide total = 0;  // 2^63 inputs of 64 bits fit
        for (const std::byte* from : in) total += at(from);
        const T want = static_cast<T>(total / static_cast<Wide>(in.size()));
        if (at(got) != want) return fmt::format("element {}: {}; expected {}", i, at(got), want);
      } else {
        const auto wide = [](T x) {
          if constexpr (sizeof(T) == 2)
            return static_cast<long double>(static_cast<float>(x));
          else
            return static_cast<long double>(x);
        };
        long double total = 0, sizes = 0;
        for (const std::byte* from : in) {
          total += wide(at(from));
          sizes += std::abs(wide(at(from)));
        }
        const long double want = total / n, is = wide(at(got));
        const long double own = std::is_same_v<T, double>  ? 0x1p-53L
                                : std::is_same_v<T, float> ? 0x1p-24L
                                : std::is_same_v<T, f16>   ? 0x1p-11L
                                                           : 0x1p-8L;
        const long double unit = sizeof(T) == 2 ? 0x1p-24L : 0x1p-53L;
        const long double slack = own * std::abs(want) + (n + 1) * unit * sizes / n;
        if (!(std::abs(is - want) <= slack))
          return fmt::format("element {}: {}; expected {}", i, static_cast<double>(is),
                             static_cast<double>(want));
      }
    }
    return {};
  });
}

}  // namespace weft::test
