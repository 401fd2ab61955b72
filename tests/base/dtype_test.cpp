#include "weft/base/dtype.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <complex>
#include <limits>
#include <random>
#include <string>

#include "weft/base/error.hpp"
#include "weft/base/view.hpp"

namespace weft::dtype_test {
namespace {

// The slow way, in double: the value of a format with `mantissa_bits` and exponents from `min_exponent` on.
struct Format {
  int mantissa_bits, min_exponent;
  double overflow;  // values from here on, and those that round to it, are beyond the format
  double beyond = std::numeric_limits<double>::infinity();
};
constexpr Format kF16{10, -14, 65536.0};
const Format kBf16{7, -126, std::ldexp(1.0, 128)};
constexpr Format kF8e4m3{3, -6, 480.0, std::numeric_limits<double>::quiet_NaN()};
constexpr Format kF8e5m2{2, -14, 65536.0};

// x rounded to the format, ties to even: to the nearest multiple of the unit in the last place at its
// exponent.
double rounded(double x, const Format& f) {
  if (std::isnan(x) || x == 0) return x;
  if (std::isinf(x)) return std::copysign(f.beyond, x);
  int exponent = std::ilogb(x);
  if (exponent < f.min_exponent) exponent = f.min_exponent;
  const double unit = std::ldexp(1.0, exponent - f.mantissa_bits);
  const double nearest = std::nearbyint(std::fabs(x) / unit) * unit;
  return std::copysign(nearest < f.overflow ? nearest : f.beyond, x);
}

// The value of a code, for T's own split into exponent and mantissa.
template <class T>
double value_of_bits(unsigned bits, const Format& f) {
  constexpr int kBits = sizeof(T) * 8;
  const int bias = 1 - f.min_exponent, mantissa_bits = f.mantissa_bits;
  const int mantissa = static_cast<int>(bits & ((1u << mantissa_bits) - 1u));
  const int exponents = 1 << (kBits - 1 - mantissa_bits);
  const int exponent = static_cast<int>(bits >> mantissa_bits) % exponents;
  const double sign = bits >> (kBits - 1) ? -1.0 : 1.0, nan = std::numeric_limits<double>::quiet_NaN();
  if constexpr (std::is_same_v<T, f8e4m3>) {
    if (exponent == exponents - 1 && mantissa == 7) return std::copysign(nan, sign);
  } else if (exponent == exponents - 1) {
    return std::copysign(mantissa ? nan : std::numeric_limits<double>::infinity(), sign);
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// The same bits, or NaNs of one sign.
void expect_same(float got, double expected, const char* of, double from) {
  ASSERT_EQ(std::signbit(got), std::signbit(expected)) << of << std::hexfloat << from;
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(got)) << of << std::hexfloat << from << " gave " << got;
  } else {
    ASSERT_EQ(static_cast<double>(got), expected) << of << std::hexfloat << from;
  }
}

template <class T>
constexpr unsigned kCodes = 1u << (sizeof(T) * 8);
template <class T>
T code(unsigned bits) {
  return T::from_bits(static_cast<decltype(T::bits)>(bits));
}

template <class T>
void every_value_goes_round(const Format& format) {
  for (unsigned b = 0; b < kCodes<T>; ++b) {
    const float f = static_cast<float>(code<T>(b));
    const double expected = value_of_bits<T>(b, format);
    expect_same(f, expected, "code ", b);
    // A NaN is still a NaN: quiet, same sign and payload.
    const unsigned quiet = std::isnan(expected) ? 1u << (format.mantissa_bits - 1) : 0u;
    if (std::isinf(format.beyond) || !std::isnan(expected)) {
      ASSERT_EQ(T(f).bits, b | quiet) << b;
    }
  }
}

// A complex type as a device's library has it.
struct ComplexOfADevice {
  using value_type = float;
  float x, y;
  float real() const { return x; }
  float imag() const { return y; }
};

TEST(F16, EveryValueGoesRound) { every_value_goes_round<f16>(kF16); }
TEST(Bf16, EveryValueGoesRound) { every_value_goes_round<bf16>(kBf16); }
TEST(F8, EveryValueGoesRound) {
  every_value_goes_round<f8e4m3>(kF8e4m3);
  every_value_goes_round<f8e5m2>(kF8e5m2);
}

// At every pair of neighbours: the tie between them and the floats beside it.
template <class T>
void ties_go_to_even(const Format& format) {
  for (unsigned b = 0; b + 1 < kCodes<T>; ++b) {
    const float low = static_cast<float>(code<T>(b)), high = static_cast<float>(code<T>(b + 1));
    if (!std::isfinite(low) || !std::isfinite(high) || std::signbit(low) != std::signbit(high)) continue;
    const auto tie = static_cast<float>((static_cast<double>(low) + high) / 2);
    for (const float f : {tie, std::nextafterf(tie, low), std::nextafterf(tie, high)})
      expect_same(static_cast<float>(T(f)), rounded(f, format), "", f);
    const unsigned even = b % 2 ? b + 1 : b;
    ASSERT_EQ(T(tie).bits, even) << b;
  }
}

TEST(F16, TiesGoToEven) { ties_go_to_even<f16>(kF16); }
TEST(Bf16, TiesGoToEven) { ties_go_to_even<bf16>(kBf16); }
TEST(F8, TiesGoToEven) {
  ties_go_to_even<f8e4m3>(kF8e4m3);
  ties_go_to_even<f8e5m2>(kF8e5m2);
}

template <class T>
void random_floats_round_as_in_double(const Format& format) {
  std::mt19937 random(7);
  for (int i = 0; i < 2'000'000; ++i) {
    auto u = static_cast<std::uint32_t>(random());
    // Half of them near the format's own range, where the interesting exponents are.
    if (i % 2) u = (u & 0x807fffffu) | ((127u - 27u + u % 46u) << 23);
    const float f = std::bit_cast<float>(u);
    expect_same(static_cast<float>(T(f)), rounded(f, format), "", f);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(F16, RandomFloatsRoundAsInDouble) { random_floats_round_as_in_double<f16>(kF16); }
TEST(Bf16, RandomFloatsRoundAsInDouble) { random_floats_round_as_in_double<bf16>(kBf16); }
TEST(F8, RandomFloatsRoundAsInDouble) {
  random_floats_round_as_in_double<f8e4m3>(kF8e4m3);
  random_floats_round_as_in_double<f8e5m2>(kF8e5m2);
}

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

// Neither format saturates. A value that rounds beyond the largest value is a NaN in E4M3, and infinity in
// E5M2.
TEST(F8, Edges) {
  const float infinity = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(f8e4m3(448.0f).bits, 0x7e);
  EXPECT_EQ(f8e4m3(464.0f).bits, 0x7e);  // the tie with 480, which is not there, goes to the even 448
  EXPECT_EQ(f8e4m3(std::nextafterf(464.0f, infinity)).bits, 0x7f);
  EXPECT_EQ(f8e4m3(-1e30f).bits, 0xff);
  EXPECT_EQ(f8e4m3(infinity).bits, 0x7f);
  EXPECT_EQ(f8e4m3(-infinity).bits, 0xff);
  EXPECT_EQ(f8e4m3(nan).bits, 0x7f);
  EXPECT_EQ(f8e4m3(-nan).bits, 0xff);
  EXPECT_EQ(f8e4m3(0x1p-9f).bits, 1);
  EXPECT_EQ(f8e4m3(0x1p-10f).bits, 0);  // tie with zero
  EXPECT_EQ(f8e4m3(std::nextafterf(0x1p-10f, 1.0f)).bits, 1);
  EXPECT_EQ(f8e4m3(0x1p-6f).bits, 8);
  EXPECT_EQ(f8e4m3(-0.0f).bits, 0x80);
  EXPECT_EQ(f8e4m3(-1e-45f).bits, 0x80);

  EXPECT_EQ(f8e5m2(57344.0f).bits, 0x7b);
  EXPECT_EQ(f8e5m2(std::nextafterf(61440.0f, 0.0f)).bits, 0x7b);
  EXPECT_EQ(f8e5m2(61440.0f).bits, 0x7c);  // the tie with 65536 goes to the even one
  EXPECT_EQ(f8e5m2(-infinity).bits, 0xfc);
  EXPECT_EQ(f8e5m2(nan).bits, 0x7e);
  EXPECT_EQ(f8e5m2(0x1p-16f).bits, 1);
  EXPECT_EQ(f8e5m2(0x1p-17f).bits, 0);
  EXPECT_EQ(f8e5m2(std::nextafterf(0x1p-17f, 1.0f)).bits, 1);
  EXPECT_EQ(f8e5m2(-0.0f).bits, 0x80);
}

TEST(DType, OfTypes) {
  EXPECT_EQ(dtype_of<f8e4m3>, DType::f8e4m3);
  EXPECT_EQ(dtype_of<f8e5m2>, DType::f8e5m2);
  EXPECT_EQ(dtype_of<std::complex<float>>, DType::c64);
  EXPECT_EQ(dtype_of<std::complex<double>>, DType::c128);
  EXPECT_EQ(dtype_of<ComplexOfADevice>, DType::c64);
  static_assert(!Element<std::complex<long double>> && !Element<std::array<float, 2>> &&
                !Element<std::string>);
  EXPECT_EQ(size_bytes(DType::f8e4m3), sizeof(f8e4m3));
  EXPECT_EQ(size_bytes(DType::f8e5m2), sizeof(f8e5m2));
  EXPECT_EQ(size_bytes(DType::c64), sizeof(std::complex<float>));
  EXPECT_EQ(size_bytes(DType::c128), sizeof(std::complex<double>));
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
}  // namespace weft::dtype_test
