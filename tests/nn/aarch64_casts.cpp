// The casts for NEON against plain loops and against f64, as a program of its own that is compiled for
// aarch64: aarch64_casts_test.sh runs it. It needs nothing but float8/{plain,neon,no_x86}.cpp.
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "nn/float8_reference.hpp"
#include "nn/kernels/float8/casts.hpp"

namespace {

using namespace weft;
using float8::Casts;
using float8::Float8Format;

int failures = 0;

// Compares bits of results, and prints the first element that differs.
template <class In, class Out>
void expect_same(const char* what, const std::vector<In>& x, const std::vector<Out>& got,
                 const std::vector<Out>& expected) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &expected[i], sizeof(Out)) == 0) continue;
    unsigned of = 0, was = 0, wanted = 0;
    std::memcpy(&of, &x[i], sizeof(In));
    std::memcpy(&was, &got[i], sizeof(Out));
    std::memcpy(&wanted, &expected[i], sizeof(Out));
    std::printf("%s: element %zu, 0x%x, became 0x%x; expected 0x%x\n", what, i, of, was, wanted);
    ++failures;
    return;
  }
}

template <class In, class Out>
void cast_both(const char* what, Casts::Cast<In, Out> vector, Casts::Cast<In, Out> plain,
               const std::vector<In>& x, const std::vector<float>& scales, const Float8Format& format) {
  for (const bool each : {false, true})
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{17}, x.size()}) {
      std::vector<Out> got(x.size()), expected(x.size());
      const auto count = static_cast<std::int64_t>(n);
      const std::int64_t rows = n > 17 ? 1 : 3;
      vector(x.data(), {scales.data(), each}, format, got.data(), rows, count);
      plain(x.data(), {scales.data(), each}, format, expected.data(), rows, count);
      expect_same(what, x, got, expected);
    }
}

template <class Out>
void widen_both(const char* what, Casts::Widen<Out> vector, Casts::Widen<Out> plain,
                const Float8Format& format) {
  std::vector<std::uint8_t> codes(1003);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i);
  const auto count = static_cast<std::int64_t>(codes.size());
  std::vector<Out> got(codes.size()), expected(codes.size());
  vector(codes.data(), format, got.data(), count);
  plain(codes.data(), format, expected.data(), count);
  expect_same(what, codes, got, expected);
}

// Every value of the format, every middle between two, the floats beside them, all of both signs.
std::vector<float> boundaries(const test::Float8Reference& reference) {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> x{0,
                       inf,
                       std::numeric_limits<float>::quiet_NaN(),
                       std::bit_cast<float>(0x7f800001U),
                       std::numeric_limits<float>::max(),
                       std::numeric_limits<float>::denorm_min()};
  for (std::size_t i = 0; i + 1 < reference.values.size(); ++i)
    for (const double at : {reference.values[i], (reference.values[i] + reference.values[i + 1]) / 2}) {
      const auto f = static_cast<float>(at);
      for (const float y : {std::nextafter(f, -inf), f, std::nextafter(f, inf)}) x.push_back(y);
    }
  for (std::size_t i = 0, n = x.size(); i < n; ++i) x.push_back(-x[i]);
  return x;
}

}  // namespace

int main() {
  const Casts *const neon = float8::neon_casts(), &plain = float8::plain_casts();
  if (neon == nullptr) {
    std::puts("the casts for NEON are missing");
    return 1;
  }
  std::mt19937 random(7);
  for (const auto& [dtype, format] :
       {std::pair(DType::f8e4m3, float8::kE4m3), std::pair(DType::f8e5m2, float8::kE5m2)}) {
    const test::Float8Reference reference(dtype);
    widen_both<bf16>("codes to bf16", neon->codes_to_bf16, plain.codes_to_bf16, format);
    widen_both<float>("codes to f32", neon->codes_to_f32, plain.codes_to_f32, format);
    std::vector<float> x = boundaries(reference);
    // Then all bit patterns, and exponents around the range of the format.
    for (int i = 0; i < 1'000'000; ++i) {
      auto bits = static_cast<std::uint32_t>(random());
      if (i % 2 == 0) bits = (bits & 0x807fffffU) | ((100U + random() % 50U) << 23);
      x.push_back(std::bit_cast<float>(bits));
    }
    const float one = 1;
    std::vector<std::uint8_t> codes(x.size()), expected;
    neon->f32_to_codes(x.data(), {&one, false}, format, codes.data(), 1, static_cast<std::int64_t>(x.size()));
    for (const float f : x) expected.push_back(static_cast<std::uint8_t>(reference.code(f)));
    expect_same("f32 to codes", x, codes, expected);

    std::vector<float> scales;
    std::vector<bf16> half;
    for (std::size_t i = 0; i < x.size(); ++i) {
      scales.push_back(0.37F * static_cast<float>(1 + random() % 9));
      half.push_back(bf16::from_bits(static_cast<std::uint16_t>(i)));
    }
    cast_both("f32 to codes", neon->f32_to_codes, plain.f32_to_codes, x, scales, format);
    cast_both("f32 to values", neon->f32_to_values, plain.f32_to_values, x, scales, format);
    cast_both("bf16 to codes", neon->bf16_to_codes, plain.bf16_to_codes, half, scales, format);
    cast_both("bf16 to values", neon->bf16_to_values, plain.bf16_to_values, half, scales, format);
  }
  std::printf("casts for NEON: %d comparisons failed\n", failures);
  return failures == 0 ? 0 : 1;
}
