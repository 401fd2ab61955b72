// A float8 format in plain f64 arithmetic, for tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "weft/base/dtype.hpp"

namespace weft::test {

/// A format, written down from the OCP specification: bits of mantissa and bias of the exponent.
struct Float8Reference {
  DType format;
  int mantissa, bias;
  int largest_code;
  std::vector<double> values;  ///< of the codes 0 to largest_code
  explicit Float8Reference(DType f)
      : format(f),
        mantissa(f == DType::f8e4m3 ? 3 : 2),
        bias(f == DType::f8e4m3 ? 7 : 15),
        largest_code(f == DType::f8e4m3 ? 0x7e : 0x7b) {
    for (int code = 0; code <= largest_code; ++code) {
      const int exponent = code >> mantissa, rest = code & ((1 << mantissa) - 1);
      const double fraction = static_cast<double>(rest) / (1 << mantissa);
      values.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                     : std::ldexp(1 + fraction, exponent - bias));
    }
  }
  /// The code nearest to v: a search among all values, the even code for the value in the middle of two.
  int code(float v) const {
    const int sign = std::signbit(v) ? 0x80 : 0;
    if (std::isnan(v)) return sign | 0x7f;
    const double magnitude = std::abs(static_cast<double>(v));
    const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
    if (above == values.end()) return sign | largest_code;
    const int high = static_cast<int>(above - values.begin());
    if (*above == magnitude) return sign | high;
    const double middle = (values[high - 1] + values[high]) / 2;
    const int low = high - 1;
    return sign | (magnitude < middle ? low : magnitude > middle ? high : (low % 2 == 0 ? low : high));
  }
};

}  // namespace weft::test
