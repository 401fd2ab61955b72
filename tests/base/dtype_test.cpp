#include "weft/base/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "weft/base/error.hpp"

namespace weft {
namespace {

// The slow way, in double: the value of a format with `mantissa_bits` and exponents from `min_exponent` on.
struct Format {
  int mantissa_bits, min_exponent;
  double overflow;  // values from here on round to infinity
};
constexpr Format kF16{10, -14, 65520.0};
const Format kBf16{7, -126, std::ldexp(1.0 + 255.0 / 256.0, 127)};

// x rounded to the format, ties to even: to the nearest multiple of the unit in the last place at its
// exponent.
double rounded(double x, const Format& f) {
  if (std::isnan(x) || std::isinf(x) || x == 0) return x;
  if (std::fabs(x) >= f.overflow) return std::copysign(std::numeric_limits<double>::infinity(), x);
  int exponent = std::ilogb(x);
  if (exponent < f.min_exponent) exponent = f.min_exponent;
  const double unit = std::ldexp(1.0, exponent - f.mantissa_bits);
  return std::copysign(std::nearbyint(std::fabs(x) / unit) * unit, x);
}

double value_of_bits(std::uint16_t bits, int mantissa_bits, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

std::uint64_t double_bits(double x) {
  std::uint64_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

template <class T>
void every_value_goes_round(int mantissa_bits, int exponent_bits) {
  for (unsigned b = 0; b < 65536; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    const float f = static_cast<float>(T::from_bits(bits));
    const double expected = value_of_bits(bits, mantissa_bits, exponent_bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(f)) << b;
      const std::uint16_t again = T(f).bits, quiet = static_cast<std::uint16_t>(1u << (mantissa_bits - 1));
      ASSERT_EQ(again, bits | quiet) << b;  // still a NaN, quiet, same sign and payload
      continue;
    }
    ASSERT_EQ(double_bits(f), double_bits(expected)) << b;  // exact, signs of zero included
    ASSERT_EQ(T(f).bits, bits) << b;
  }
}

TEST(F16, EveryValueGoesRound) { every_value_goes_round<f16>(10, 5); }
TEST(Bf16, EveryValueGoesRound) { every_value_goes_round<bf16>(7, 8); }

// At every pair of neighbours: the tie between them and the floats beside it.
template <class T>
void ties_go_to_even(const Format& format) {
  for (unsigned b = 0; b < 65535; ++b) {
    const float low = static_cast<float>(T::from_bits(static_cast<std::uint16_t>(b)));
    const float high = static_cast<float>(T::from_bits(static_cast<std::uint16_t>(b + 1)));
    if (!std::isfinite(low) || !std::isfinite(high) || std::signbit(low) != std::signbit(high)) continue;
    const auto tie = static_cast<float>((static_cast<double>(low) + high) / 2);
    for (const float f : {tie, std::nextafterf(tie, low), std::nextafterf(tie, high)})
      ASSERT_EQ(double_bits(static_cast<float>(T(f))), double_bits(rounded(f, format))) << f;
  }
}

TEST(F16, TiesGoToEven) { ties_go_to_even<f16>(kF16); }
TEST(Bf16, TiesGoToEven) { ties_go_to_even<bf16>(kBf16); }

template <class T>
void random_floats_round_as_in_double(const Format& format) {
  std::mt19937 random(7);
  for (int i = 0; i < 2'000'000; ++i) {
    auto u = static_cast<std::uint32_t>(random());
    // Half of them near the format's own range, where the interesting exponents are.
    if (i % 2) u = (u & 0x807fffffu) | ((127u - 27u + u % 46u) << 23);
    const float f = std::bit_cast<float>(u);
    if (std::isnan(f)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(T(f))));
    } else {
      ASSERT_EQ(double_bits(static_cast<float>(T(f))), double_bits(rounded(f, format))) << std::hexfloat << f;
    }
  }
}

TEST(F16, RandomFloatsRoundAsInDouble) { random_floats_round_as_in_double<f16>(kF16); }
TEST(Bf16, RandomFloatsRoundAsInDouble) { random_floats_round_as_in_double<bf16>(kBf16); }

TEST(F16, Edges) {
  EXPECT_EQ(f16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(f16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(f16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(f16(0x1p-24f).bits, 1);
  EXPECT_EQ(f16(0x1p-25f).bits, 0);  // tie with zero
  EXPECT_EQ(f16(std::nextafterf(0x1p-25f, 1.0f)).bits, 1);
  EXPECT_EQ(f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(f16(1e-45f).bits, 0);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(bf16(-0.0f).bits, 0x8000);
}

TEST(DType, NamesAndSizes) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto t = static_cast<DType>(i);
    EXPECT_NE(name(t), "?");
    EXPECT_EQ(dtype_from_name(name(t)), t);
    EXPECT_GT(size_bytes(t), 0);
  }
  EXPECT_EQ(name(DType::boolean), "bool");
  EXPECT_EQ(size_bytes(dtype_of<double>), 8);
  EXPECT_EQ(size_bytes(dtype_of<bf16>), 2);
  EXPECT_TRUE(is_floating(DType::f16));
  EXPECT_FALSE(is_floating(DType::i32));
  try {
    dtype_from_name("float");
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_EQ(std::string(e.what()),
              "dtype: \"float\" is not known; expected one of f64, f32, f16, bf16, i8, i16, i32, i64, u8, "
              "u16, u32, u64, bool, f8e4m3, f8e5m2, c64, c128");
  }
}

}  // namespace
}  // namespace weft
