// Casts and scales of eight bits beside those of torch, torchao and ml_dtypes: the same bits; and layers
// beside torchao's. Skipped where no Python has them: `tools/torch_python.sh --make torch ml_dtypes torchao`
// makes one.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "nn/float8_reference.hpp"
#include "nn/support.hpp"
#include "support/command_output.hpp"
#include "support/temporary_folder.hpp"
#include "weft/nn/float8.hpp"
#include "weft/nn/float8_linear.hpp"

namespace weft {
namespace {

using float8::Granularity;
using kernels::KernelContext;

template <class T>
void write_file(const std::string& name, const std::vector<T>& values) {
  std::ofstream(name, std::ios::binary)
      .write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(T)));
}
template <class T>
std::vector<T> read_file(const std::string& name, std::size_t count) {
  std::vector<T> values(count);
  std::ifstream file(name, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(T)));
  EXPECT_TRUE(file) << name;
  return values;
}

struct Case {
  DType format;
  const char* name;
};
constexpr Case kFormats[] = {{DType::f8e4m3, "e4m3"}, {DType::f8e5m2, "e5m2"}};

// 10^7 random values: all bit patterns, and exponents around the ranges of the formats. Then each value of
// each format, each middle between two values, the floats next to them, and the ends of f32.
std::vector<float> values_to_cast() {
  const float inf = std::numeric_limits<float>::infinity();
  std::mt19937_64 random(11);
  std::vector<float> x(10'000'000);
  for (std::size_t i = 0; i < x.size(); ++i) {
    auto bits = static_cast<std::uint32_t>(random());
    if (i % 4 != 0) bits = (bits & 0x807fffffU) | ((100U + bits / 7 % 50U) << 23);
    x[i] = std::bit_cast<float>(bits);
  }
  for (const Case& c : kFormats) {
    const std::vector<double> values = test::Float8Reference(c.format).values;
    for (std::size_t i = 0; i + 1 < values.size(); ++i)
      for (const double at : {values[i], (values[i] + values[i + 1]) / 2, values[i + 1]}) {
        const auto f = static_cast<float>(at);
        for (const float y : {std::nextafter(f, -inf), f, std::nextafter(f, inf)}) x.insert(x.end(), {y, -y});
      }
  }
  for (const float y : {inf, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
                        std::numeric_limits<float>::quiet_NaN(), std::bit_cast<float>(0x7f800001U)})
    x.insert(x.end(), {y, -y});
  return x;
}

// Largest magnitudes: random ones of all exponents, and the floats around those whose scale is a power of
// two.
std::vector<float> magnitudes() {
  std::mt19937_64 random(12);
  std::vector<float> amax{0, 1e-12F, 1e-30F, std::numeric_limits<float>::max()};
  for (int i = 0; i < 1'000'000; ++i) {
    const float m = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0x7fffffffU);
    if (std::isfinite(m)) amax.push_back(m);
  }
  for (const float largest : {448.0F, 57344.0F})
    for (int exponent = -60; exponent <= 60; ++exponent) {
      const auto at = std::bit_cast<std::uint32_t>(std::ldexp(largest, exponent));
      for (std::uint32_t i = 0; i < 400; ++i) amax.push_back(std::bit_cast<float>(at - 200 + i));
    }
  return amax;
}

// ml_dtypes has a NaN of its own for e5m2, and both may lose its sign.
bool is_nan_code(DType format, std::uint8_t code) {
  return (code & 0x7f) > (format == DType::f8e4m3 ? 0x7e : 0x7c);
}

// The command that runs a Python with the libraries; empty: there is none.
std::string python_of_oracle() {
  const auto python =
      test::output_of(std::string("'") + WEFT_SOURCE_DIR + "/tools/torch_python.sh' torch ml_dtypes torchao");
  return python.status == 0 ? python.text.substr(0, python.text.find('\n')) : "";
}
constexpr const char* kNoPython =
    "no Python has torch, ml_dtypes, torchao and pytest: tools/torch_python.sh --make torch ml_dtypes "
    "torchao makes one, or WEFT_TEST_PYTHON names it";

test::CommandOutput run_oracle(const std::string& python, const char* what, const std::string& folder) {
  return test::output_of(
      fmt::format("'{}' '{}/tests/nn/float8_oracle.py' {} '{}' 2>&1", python, WEFT_SOURCE_DIR, what, folder));
}

TEST(Float8Oracle, TheBitsOfTorchTorchaoAndMlDtypes) {
  const std::string python = python_of_oracle();
  if (python.empty()) GTEST_SKIP() << kNoPython;
  const test::TemporaryFolder temporary;
  const std::string folder = temporary / "";
  const std::vector<float> x = values_to_cast(), amax = magnitudes();
  write_file(folder + "x.f32", x);
  write_file(folder + "amax.f32", amax);
  const auto ran = run_oracle(python, "casts", folder);
  ASSERT_EQ(ran.status, 0) << ran.text;
  RecordProperty("versions", ran.text);

  KernelContext ctx(2);
  for (const auto& [format, name] : kFormats) {
    const float one = 1;
    std::vector<std::uint8_t> codes(x.size()), all(256);
    const auto count = static_cast<std::int64_t>(x.size());
    TensorView to = view(codes.data(), count);
    to.dtype = format;
    float8::quantise(ctx, view(x.data(), count), Granularity::tensorwise, &one, to);
    for (const char* library : {"torch", "torchao", "ml_dtypes"}) {
      const auto expected =
          read_file<std::uint8_t>(fmt::format("{}{}_{}.u8", folder, library, name), x.size());
      const bool own_nan = std::string_view(library) == "ml_dtypes";
      for (std::size_t i = 0; i < x.size(); ++i)
        if (codes[i] != expected[i]) {
          ASSERT_TRUE(own_nan && is_nan_code(format, codes[i]) && is_nan_code(format, expected[i]))
              << library << " " << name << ": " << fmt::format("{:a}", x[i]) << " became "
              << static_cast<int>(codes[i]) << "; expected " << static_cast<int>(expected[i]);
        }
    }

    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(i);
    TensorView from = view(all.data(), 256);
    from.dtype = format;
    std::vector<float> values(256);
    float8::widen(ctx, from, view(values.data(), 256));
    for (const char* library : {"torch", "ml_dtypes"}) {
      const auto expected = read_file<float>(fmt::format("{}{}_{}.f32", folder, library, name), 256);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(expected[i]))
          ASSERT_TRUE(std::isnan(values[i])) << library << " " << name << " " << i;
        else
          ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected[i]))
              << library << " " << name << " " << i;
      }
    }

    for (const bool power : {false, true}) {
      const auto expected = read_file<float>(
          fmt::format("{}{}scales_{}.f32", folder, power ? "power_" : "", name), amax.size());
      for (std::size_t i = 0; i < amax.size(); ++i)
        ASSERT_EQ(float8::scale_of(amax[i], format, power), expected[i])
            << name << ": " << fmt::format("{:a}", amax[i]) << (power ? " as a power of two" : "");
    }
  }
}

// A layer as a training step has it: activations of which some features are much larger than others, weights
// near their initial values, and gradients that differ by orders of magnitude from token to token. x and dy
// have values of bf16, since rowwise_gw_hp rounds them for dw and torchao multiplies what it gets.
struct LayerCase {
  std::int64_t tokens, in, out;
};
constexpr LayerCase kLayers[] = {{512, 128, 352}, {384, 352, 128}, {64, 16, 16}, {2048, 128, 128}};

void write_layer(const std::string& folder, const LayerCase& c) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "shape.txt") << fmt::format("{} {} {}\n", c.tokens, c.in, c.out);
  std::mt19937_64 random(static_cast<unsigned>(c.tokens + c.out));
  std::normal_distribution<float> normal;
  const auto write = [&](const char* name, std::int64_t rows, std::int64_t columns, auto factor) {
    std::vector<float> values;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t i = 0; i < columns; ++i)
        values.push_back(static_cast<float>(bf16(normal(random) * factor(r, i))));
    write_file(folder + name, values);
  };
  write("x.f32", c.tokens, c.in, [](std::int64_t, std::int64_t i) { return i % 37 == 3 ? 30.0F : 1.0F; });
  write("w.f32", c.out, c.in, [](std::int64_t, std::int64_t) { return 0.02F; });
  write("dy.f32", c.tokens, c.out,
        [](std::int64_t r, std::int64_t) { return 1e-4F * std::exp2(static_cast<float>(r % 11) - 9.0F); });
}

// The results of a float8 layer and those of torchao differ by the rounding of f32 alone, as a part of the
// largest.
void expect_layer(const std::string& folder, const LayerCase& c) {
  const auto [tokens, in, out] = c;
  test::Bench bench;
  const auto tensor = [&](const std::string& name, const Shape& shape) {
    const Tensor t = bench.compute.make(shape);
    std::ranges::copy(read_file<float>(folder + name + ".f32", static_cast<std::size_t>(shape.count())),
                      t.f32().begin());
    return t;
  };
  for (const Float8Recipe recipe :
       {Float8Recipe::tensorwise, Float8Recipe::rowwise, Float8Recipe::rowwise_gw_hp}) {
    Linear layer(in, out, false);
    materialise(layer, bench.compute);
    layer.weight->set_master(tensor("w", {out, in}));
    const auto linears = std::make_shared<Float8Linears>(Float8LinearOptions{recipe});
    Float8Linears::convert(linears, layer);
    Frame frame(bench.compute);
    const Tensor y = layer.forward(tensor("x", {tokens, in}), frame)[0],
                 dx = layer.backward(tensor("dy", {tokens, out}), frame)[0], dw = layer.weight->gradient();
    for (const auto& [what, of_weft] : {std::pair("y", y), {"dx", dx}, {"dw", dw}}) {
      const std::string of = std::string(name(recipe)) + "." + what;
      const std::vector<float> got = test::floats(of_weft),
                               expected = read_file<float>(folder + of + ".f32", got.size());
      float largest = 0, off = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        largest = std::max(largest, std::abs(expected[i]));
        off = std::max(off, std::abs(got[i] - expected[i]));
      }
      EXPECT_LE(off, 2e-6F * largest) << folder << of;
      EXPECT_GT(largest, 0) << folder << of;
    }
  }
}

TEST(Float8Oracle, LayersAreThoseOfTorchao) {
  const std::string python = python_of_oracle();
  if (python.empty()) GTEST_SKIP() << kNoPython;
  const test::TemporaryFolder temporary;
  for (std::size_t i = 0; i < std::size(kLayers); ++i)
    write_layer(temporary / fmt::format("{}/", i), kLayers[i]);
  const auto ran = run_oracle(python, "layers", temporary / "");
  ASSERT_EQ(ran.status, 0) << ran.text;
  for (std::size_t i = 0; i < std::size(kLayers); ++i)
    expect_layer(temporary / fmt::format("{}/", i), kLayers[i]);
}

}  // namespace
}  // namespace weft
