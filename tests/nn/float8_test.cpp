// Float8 numbers against an independent reference in f64, and against the casts and scales of torchao.
#include "weft/nn/float8.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "nn/float8_reference.hpp"
#include "support/golden_case.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using float8::Granularity;
using kernels::KernelContext;
using Reference = test::Float8Reference;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kQuiet = std::numeric_limits<float>::quiet_NaN();

ConstTensorView line(const std::vector<float>& x) {
  return view(x.data(), static_cast<std::int64_t>(x.size()));
}
TensorView codes_view(std::vector<std::uint8_t>& codes, DType format, const Shape& shape) {
  TensorView v = view(codes.data(), shape);
  v.dtype = format;
  return v;
}

std::vector<std::uint8_t> quantised(KernelContext& ctx, const std::vector<float>& x, DType format,
                                    float scale = 1) {
  std::vector<std::uint8_t> codes(x.size());
  float8::quantise(ctx, line(x), Granularity::tensorwise, &scale, codes_view(codes, format, line(x).shape));
  return codes;
}

// Codes and values of x must be those of the reference.
void expect_casts(KernelContext& ctx, const std::vector<float>& x, DType format, float scale = 1) {
  const Reference reference(format);
  const std::vector<std::uint8_t> codes = quantised(ctx, x, format, scale);
  std::vector<bf16> values(x.size());
  float8::quantise_to_bf16(ctx, line(x), Granularity::tensorwise, &scale, format,
                           view(values.data(), static_cast<std::int64_t>(x.size())));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float scaled = x[i] * scale;
    const int expected = reference.code(scaled);
    ASSERT_EQ(codes[i], expected) << x[i] << " times " << scale << " as " << name(format);
    if ((expected & 0x7f) == 0x7f) {
      ASSERT_EQ(values[i].bits, std::signbit(scaled) ? 0xffc0 : 0x7fc0);
      continue;
    }
    const double value = reference.values[static_cast<std::size_t>(expected & 0x7f)];
    ASSERT_EQ(static_cast<float>(values[i]), static_cast<float>(expected & 0x80 ? -value : value));
    ASSERT_EQ(std::signbit(static_cast<float>(values[i])), (expected & 0x80) != 0);
  }
}

class Float8Numbers : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Formats, Float8Numbers, testing::Values(DType::f8e4m3, DType::f8e5m2),
                         [](const auto& of) { return std::string(name(of.param)); });

TEST_P(Float8Numbers, AllCodesWiden) {
  KernelContext ctx(1);
  const Reference reference(GetParam());
  std::vector<std::uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i);
  std::vector<float> wide(256);
  std::vector<bf16> half(256);
  const TensorView from = codes_view(codes, GetParam(), {256});
  float8::widen(ctx, from, view(wide.data(), 256));
  float8::widen(ctx, from, view(half.data(), 256));
  for (int i = 0; i < 256; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const float scalar = GetParam() == DType::f8e4m3
                             ? static_cast<float>(f8e4m3::from_bits(static_cast<std::uint8_t>(i)))
                             : static_cast<float>(f8e5m2::from_bits(static_cast<std::uint8_t>(i)));
    if ((i & 0x7f) <= reference.largest_code) {
      const double value = reference.values[static_cast<std::size_t>(i & 0x7f)];
      ASSERT_EQ(wide[at], static_cast<float>(i & 0x80 ? -value : value)) << i;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[at]), std::bit_cast<std::uint32_t>(scalar)) << i;
    } else if (std::isnan(scalar)) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[at]), i & 0x80 ? 0xffc00000U : 0x7fc00000U) << i;
    } else {
      ASSERT_EQ(wide[at], scalar) << i;  // an infinity
    }
    ASSERT_EQ(half[at].bits, std::bit_cast<std::uint32_t>(wide[at]) >> 16) << i;
  }
}

// Every value, every middle between two values, and the floats just above and below each of them.
TEST_P(Float8Numbers, BoundariesRoundToEven) {
  KernelContext ctx(1);
  const Reference reference(GetParam());
  std::vector<float> x{0.0F,
                       kInf,
                       kQuiet,
                       std::numeric_limits<float>::max(),
                       std::numeric_limits<float>::min(),
                       std::numeric_limits<float>::denorm_min(),
                       std::bit_cast<float>(0x7f800001U),
                       std::bit_cast<float>(0x7fffffffU)};
  for (std::size_t i = 0; i < reference.values.size(); ++i) {
    const double value = reference.values[i], next = i + 1 < reference.values.size()
                                                         ? reference.values[i + 1]
                                                         : 2 * value - reference.values[i - 1];
    for (const double at : {value, (value + next) / 2}) {
      const auto f = static_cast<float>(at);
      for (const float y : {std::nextafter(f, -kInf), f, std::nextafter(f, kInf)}) x.push_back(y);
    }
  }
  const std::size_t positive = x.size();
  for (std::size_t i = 0; i < positive; ++i) x.push_back(-x[i]);
  expect_casts(ctx, x, GetParam());
  const std::vector<std::uint8_t> ends = quantised(ctx, {kInf, -kInf, kQuiet, -kQuiet, -0.0F}, GetParam());
  const auto most = static_cast<std::uint8_t>(reference.largest_code);
  EXPECT_EQ(ends,
            (std::vector<std::uint8_t>{most, static_cast<std::uint8_t>(most | 0x80), 0x7f, 0xff, 0x80}));
}

TEST_P(Float8Numbers, TenMillionRandomValues) {
  KernelContext ctx(2);
  std::mt19937_64 random(7);
  constexpr std::size_t kAtOnce = 1'000'000;
  std::vector<float> x(kAtOnce);
  for (int round = 0; round < 10; ++round) {
    // All bit patterns in the first rounds; then exponents around the range of the format.
    for (float& f : x) {
      auto bits = static_cast<std::uint32_t>(random());
      if (round >= 3) bits = (bits & 0x807fffffU) | ((100U + bits / 7 % 50U) << 23);
      f = std::bit_cast<float>(bits);
    }
    expect_casts(ctx, x, GetParam(), round % 2 == 0 ? 1.0F : 3.14159F);
    if (HasFatalFailure()) return;
  }
}

// All values of bf16, in order and mixed, so that some blocks have values that are cut off, or NaNs, and
// others have none; with scales that are powers of two, that are not, and that leave hardly any value in the
// range of the format.
TEST_P(Float8Numbers, Bf16CastsAsTheSameF32) {
  KernelContext ctx(1);
  std::vector<bf16> half;
  for (std::uint32_t bits = 0; bits < 65536; ++bits)
    half.push_back(bf16::from_bits(static_cast<std::uint16_t>(bits)));
  std::mt19937_64 random(17);
  for (int i = 0; i < 70'000; ++i)  // most of them small
    half.push_back(bf16::from_bits(static_cast<std::uint16_t>(random() % (i % 5000 == 0 ? 65536 : 0x3c00))));
  std::vector<float> x;
  for (const bf16 h : half) x.push_back(static_cast<float>(h));
  const auto count = static_cast<std::int64_t>(x.size());
  std::vector<float> scales{0.37F,          1.0F,     0x1p-7F, 448 / 3.0F, 57344 / 7.0F, 4.48e14F,
                            0x1.fffffep40F, 0x1p-70F, 0x1p89F, 0x1p95F,    0x1p-95F,     0x1p126F,
                            0x1p-126F,      -0.37F,   0.0F,    kInf,       kQuiet};
  for (int i = 0; i < 20; ++i) scales.push_back(std::exp2(static_cast<float>(random() % 4096) / 128 - 16));
  for (const float scale : scales) {
    std::vector<std::uint8_t> codes(x.size());
    float8::quantise(ctx, view(half.data(), count), Granularity::tensorwise, &scale,
                     codes_view(codes, GetParam(), {count}));
    ASSERT_EQ(codes, quantised(ctx, x, GetParam(), scale)) << scale;
  }
}

// A scale for each column: few rows and many, columns around the width of vectors and of parts, values that
// are cut off, NaNs, and scales that are not positive or leave hardly any value in the range of the format.
TEST_P(Float8Numbers, Bf16CastsByColumnsAsTheSameF32) {
  std::mt19937_64 random(19);
  const float odd_scales[] = {-0.37F, 0.0F, kInf, kQuiet, 0x1p-95F, 0x1p126F};
  for (const int threads : {1, 2})
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 64},
                                        {3, 200},
                                        {4, 31},
                                        {40, 32},
                                        {70, 129},
                                        {5, 1100},
                                        {9, 8192 + 77}})
      for (const bool odd : {false, true}) {
        KernelContext ctx(threads);
        const Shape shape{rows, columns};
        std::vector<bf16> half;
        std::vector<float> x, scales;
        for (std::int64_t i = 0; i < rows * columns; ++i) {
          const bool any = random() % 3000 == 0;
          half.push_back(bf16::from_bits(static_cast<std::uint16_t>(
              any ? random() : (random() & 0x8000) | (0x3900 + random() % 0x900))));
          x.push_back(static_cast<float>(half.back()));
        }
        for (std::int64_t i = 0; i < columns; ++i)
          scales.push_back(std::exp2(static_cast<float>(random() % 4096) / 128 - 16));
        if (odd) scales[random() % scales.size()] = odd_scales[random() % 6];
        std::vector<std::uint8_t> codes(x.size()), expected(x.size());
        float8::quantise(ctx, view(half.data(), shape), Granularity::columnwise, scales.data(),
                         codes_view(codes, GetParam(), shape));
        float8::quantise(ctx, view(x.data(), shape), Granularity::columnwise, scales.data(),
                         codes_view(expected, GetParam(), shape));
        ASSERT_EQ(codes, expected) << rows << " rows of " << columns << (odd ? ", an odd scale" : "");
      }
}

// Rows that are taken together and rows that remain; magnitudes of bf16 are those of the same f32.
TEST(Float8Amax, OfBf16IsThatOfTheSameF32) {
  std::mt19937_64 random(18);
  for (const int threads : {1, 2})
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                                        {7, 200},
                                        {67, 129},
                                        {8, 4096},
                                        {300, 64},
                                        {0, 3},
                                        {16, 1100}}) {
      KernelContext ctx(threads);
      std::vector<bf16> half;
      std::vector<float> x;
      for (std::int64_t i = 0; i < rows * columns; ++i) {
        half.push_back(bf16::from_bits(static_cast<std::uint16_t>(random() % 0xff80)));
        x.push_back(static_cast<float>(half.back()));
      }
      for (const Granularity g : {Granularity::tensorwise, Granularity::rowwise, Granularity::columnwise}) {
        const Shape shape{rows, columns};
        const auto groups = static_cast<std::size_t>(float8::scale_count(shape, g));
        std::vector<float> of_half(groups), of_f32(groups), expected(groups, 0);
        float8::amax(ctx, view(half.data(), shape), g, of_half.data());
        float8::amax(ctx, view(x.data(), shape), g, of_f32.data());
        for (std::size_t i = 0; i < x.size(); ++i) {
          const std::size_t at = g == Granularity::tensorwise ? 0
                                 : g == Granularity::rowwise  ? i / static_cast<std::size_t>(columns)
                                                              : i % static_cast<std::size_t>(columns);
          if (!std::isnan(expected[at]) && !(std::abs(x[i]) <= expected[at])) expected[at] = std::abs(x[i]);
        }
        for (std::size_t i = 0; i < groups; ++i) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(of_half[i]), std::bit_cast<std::uint32_t>(of_f32[i]));
          ASSERT_EQ(std::isnan(of_half[i]), std::isnan(expected[i]));
          if (!std::isnan(expected[i])) {
            ASSERT_EQ(of_half[i], expected[i]);
          }
        }
      }
    }
}

std::vector<float> random_matrix(std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& f : x) f = normal(random);
  return x;
}

// Scales by row, by column and of the whole, for sizes around the width of vectors and of blocks of threads.
TEST_P(Float8Numbers, EachGranularityIsTheScalarCast) {
  const Reference reference(GetParam());
  for (const int threads : {1, 2, 3}) {
    KernelContext ctx(threads);
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{0, 5},
                                        {5, 0},
                                        {1, 1},
                                        {3, 7},
                                        {17, 33},
                                        {40, 16},
                                        {2, 20011},
                                        {700, 61}}) {
      const Shape shape{rows, columns};
      const std::vector<float> x = random_matrix(static_cast<std::size_t>(rows * columns), 3);
      for (const Granularity g : {Granularity::tensorwise, Granularity::rowwise, Granularity::columnwise}) {
        const std::int64_t count = float8::scale_count(shape, g);
        ASSERT_EQ(count, g == Granularity::tensorwise ? 1 : g == Granularity::rowwise ? rows : columns);
        const auto group = [&](std::int64_t r, std::int64_t c) {
          return static_cast<std::size_t>(g == Granularity::tensorwise ? 0
                                          : g == Granularity::rowwise  ? r
                                                                       : c);
        };
        std::vector<float> expected(static_cast<std::size_t>(count), 0), amax(expected.size(), -1);
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c)
            expected[group(r, c)] =
                std::max(expected[group(r, c)], std::abs(x[static_cast<std::size_t>(r * columns + c)]));
        float8::amax(ctx, view(x.data(), shape), g, amax.data());
        ASSERT_EQ(amax, expected);
        std::vector<float> scales;
        for (const float a : amax) scales.push_back(float8::scale_of(a, GetParam(), false));
        std::vector<std::uint8_t> codes(x.size());
        float8::quantise(ctx, view(x.data(), shape), g, scales.data(), codes_view(codes, GetParam(), shape));
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c) {
            const auto at = static_cast<std::size_t>(r * columns + c);
            ASSERT_EQ(codes[at], reference.code(x[at] * scales[group(r, c)])) << r << " " << c;
          }
      }
    }
  }
}

TEST(Float8Scales, AreThoseOfTheRule) {
  EXPECT_EQ(float8::scale_of(448, DType::f8e4m3, false), 1.0F);
  EXPECT_EQ(float8::scale_of(1, DType::f8e5m2, false), 57344.0F);
  EXPECT_EQ(float8::scale_of(3, DType::f8e4m3, false), static_cast<float>(448.0 / 3.0));
  EXPECT_EQ(float8::scale_of(3, DType::f8e4m3, true), 128.0F);  // 149.3, rounded down
  EXPECT_EQ(float8::scale_of(7, DType::f8e4m3, true), 64.0F);   // 64 exactly
  EXPECT_EQ(float8::scale_of(1000, DType::f8e4m3, true), 0.25F);
  // 511.99997: its logarithm is 9 in f32, as torchao computes it.
  EXPECT_EQ(float8::scale_of(0x1.c00002p-1F, DType::f8e4m3, true), 512.0F);
  EXPECT_EQ(float8::scale_of(0x1.c00022p-1F, DType::f8e4m3, true), 256.0F);
  EXPECT_EQ(float8::scale_of(0, DType::f8e4m3, false), static_cast<float>(448.0 / 1e-12));
  EXPECT_EQ(float8::scale_of(1e-30F, DType::f8e5m2, false), static_cast<float>(57344.0 / 1e-12));
  EXPECT_EQ(float8::scale_of(kInf, DType::f8e4m3, true), 0.0F);
  EXPECT_TRUE(std::isnan(float8::scale_of(kQuiet, DType::f8e4m3, false)));
  EXPECT_TRUE(std::isnan(float8::scale_of(kQuiet, DType::f8e4m3, true)));
}

// An overflow or a NaN anywhere in a group shows in its amax, whatever else is there.
TEST(Float8Scales, NotFiniteIsSeen) {
  KernelContext ctx(2);
  std::vector<float> x = random_matrix(3 * 21, 5);
  float amax[21];
  x[22] = -kInf;
  float8::amax(ctx, view(x.data(), Shape{3, 21}), Granularity::rowwise, amax);
  EXPECT_TRUE(std::isfinite(amax[0]));
  EXPECT_EQ(amax[1], kInf);
  x[1] = -kQuiet;
  float8::amax(ctx, view(x.data(), Shape{3, 21}), Granularity::tensorwise, amax);
  EXPECT_TRUE(std::isnan(amax[0]));
  float8::amax(ctx, view(x.data(), Shape{3, 21}), Granularity::columnwise, amax);
  EXPECT_TRUE(std::isnan(amax[1]));
  EXPECT_TRUE(std::isfinite(amax[0]));
}

TEST(Float8Functions, RescaleRoundsEachStep) {
  KernelContext ctx(2);
  const std::int64_t rows = 5, columns = 37;
  const std::vector<float> product = random_matrix(rows * columns, 1), of_rows = random_matrix(rows, 2),
                           of_columns = random_matrix(columns, 3), bias = random_matrix(columns, 4);
  for (const bool each_row : {false, true})
    for (const bool each_column : {false, true})
      for (const bool with_bias : {false, true})
        for (const bool add : {false, true}) {
          std::vector<float> out = random_matrix(rows * columns, 9);
          const std::vector<float> before = out;
          float8::rescale(ctx, product.data(), {rows, columns}, {of_rows.data(), each_row},
                          {of_columns.data(), each_column}, with_bias ? bias.data() : nullptr, out.data(),
                          add);
          for (std::size_t i = 0; i < out.size(); ++i) {
            const std::size_t r = i / columns, c = i % columns;
            volatile float by_row = 1.0F / of_rows[each_row ? r : 0],
                           by_column = 1.0F / of_columns[each_column ? c : 0];
            volatile float value = product[i] * by_row;
            value = value * by_column;
            if (with_bias) value = value + bias[c];
            if (add) value = before[i] + value;
            ASSERT_EQ(out[i], value) << i;
          }
        }
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return e.what();
  }
  return "nothing thrown";
}

TEST(Float8Functions, MistakesAreNamed) {
  KernelContext ctx(1);
  std::vector<float> x(6);
  std::vector<std::int32_t> integers(6);
  std::vector<std::uint8_t> codes(6);
  const float one = 1;
  EXPECT_EQ(refusal([&] { float8::amax(ctx, view(integers.data(), 6), Granularity::tensorwise, x.data()); }),
            "float8: x is i32; expected f32 or bf16");
  EXPECT_EQ(refusal([&] {
              float8::quantise(ctx, view(x.data(), 6), Granularity::tensorwise, &one, view(codes.data(), 6));
            }),
            "float8: the format is u8; expected f8e4m3 or f8e5m2");
  EXPECT_EQ(refusal([&] {
              float8::quantise(ctx, view(x.data(), 6), Granularity::tensorwise, &one,
                               codes_view(codes, DType::f8e4m3, {2, 3}));
            }),
            "float8: codes is (2, 3); expected (6)");
  EXPECT_EQ(
      refusal([&] { float8::widen(ctx, codes_view(codes, DType::f8e4m3, {6}), view(integers.data(), 6)); }),
      "float8: values are i32; expected bf16 or f32");
  EXPECT_EQ(refusal([&] {
              float8::quantise_to_bf16(ctx, view(x.data(), 6), Granularity::tensorwise, &one, DType::f8e4m3,
                                       view(x.data(), 6));
            }),
            "float8: values are f32; expected bf16");
  TensorView strided = view(x.data(), Shape{3, 1});
  strided.shape = {2, 2};
  strided.strides = Dims{3, 1};
  EXPECT_EQ(refusal([&] { float8::amax(ctx, strided, Granularity::tensorwise, x.data()); }),
            "float8: x is not contiguous");
}

TEST(Float8Golden, FilesArePresent) { test::expect_golden({"fp8_cast_table"}); }

TEST(Float8Golden, CastsAreThoseOfTorchao) {
  for (const auto& file : test::golden_files("fp8_cast_table")) {
    test::Golden golden(file);
    KernelContext ctx(1);
    const Tensor x = golden.tensor("in.x");
    const std::vector<float> values(x.f32().begin(), x.f32().end());
    for (const auto& [format, key] :
         {std::pair(DType::f8e4m3, "out.e4m3"), std::pair(DType::f8e5m2, "out.e5m2")}) {
      const Tensor bits = golden.tensor(std::string(key) + "_bits");
      const std::vector<std::uint8_t> expected(bits.as<std::uint8_t>().begin(),
                                               bits.as<std::uint8_t>().end());
      std::vector<std::uint8_t> codes = quantised(ctx, values, format);
      EXPECT_EQ(codes, expected) << key;
      std::vector<float> wide(codes.size());
      float8::widen(ctx, codes_view(codes, format, x.shape()), view(wide.data(), x.shape()));
      const std::vector<double> decoded = golden.values(key);
      for (std::size_t i = 0; i < wide.size(); ++i) ASSERT_EQ(wide[i], decoded[i]);
    }
  }
}

}  // namespace
}  // namespace weft
