// Arrays for the tests of kernels, and how they are compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::kernels::test {

inline constexpr double kUlp = 0x1p-24;

template <class T>
using Array = std::vector<T>;

template <class T = float>
Array<T> random_array(std::int64_t n, unsigned seed, double low = -1.0, double high = 1.0) {
  std::mt19937_64 generator(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  Array<T> a(static_cast<std::size_t>(n));
  for (T& x : a) {
    const double drawn = uniform(generator);
    if constexpr (std::is_same_v<T, bf16>) {
      x = bf16(static_cast<float>(drawn));
    } else {
      x = static_cast<T>(drawn);
    }
  }
  return a;
}

inline Array<float> zeros(std::int64_t n) { return Array<float>(static_cast<std::size_t>(n), 0.0f); }

// The contents of an output before a kernel overwrites it: a kernel that adds, or leaves a hole, shows.
inline Array<float> garbage(std::int64_t n) { return Array<float>(static_cast<std::size_t>(n), 1e30f); }

inline void expect_close(const Array<float>& got, const Array<float>& want, double ulps,
                         const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0.0;
  for (float x : want) largest = std::max(largest, std::abs(static_cast<double>(x)));
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], ulps * kUlp * largest) << what << "[" << i << "]";
  }
}

// The logarithm of the sum that a softmax is divided by; -infinity where it has no term.
inline Array<float> log_sums(const Array<float>& softmax) {
  Array<float> all;
  for (std::size_t i = 0; i < softmax.size(); i += 2) all.push_back(softmax[i] + std::log(softmax[i + 1]));
  return all;
}

inline bool same_bits(const Array<float>& a, const Array<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return e.what();
  }
  return "nothing thrown";
}

// d/dx of `loss` at each element of x by central differences with h = 1e-5: their own error is h^2 times the
// third derivative plus 1e-16 / h, both near 1e-10 at size 1; 1e-7 leaves room for larger derivatives and
// none for a wrong term.
inline void expect_gradient(Array<double>& x, const Array<double>& gradient,
                            const std::function<double()>& loss, const std::string& what) {
  ASSERT_EQ(x.size(), gradient.size());
  const double h = 1e-5;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + h;
    const double above = loss();
    x[i] = at - h;
    const double below = loss();
    x[i] = at;
    ASSERT_NEAR(gradient[i], (above - below) / (2.0 * h), 1e-7) << what << "[" << i << "]";
  }
}

inline double dot(const Array<double>& a, const Array<double>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace weft::kernels::test
