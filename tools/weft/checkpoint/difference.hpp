// How far two tensors of one shape are apart.
#pragma once

#include <cstdint>

#include "weft/base/view.hpp"

namespace weft::tools {

struct Difference {
  std::int64_t numbers = 0;  ///< that differ by more than the tolerance
  double largest = 0;        ///< of their distances
};

/// A contiguous tensor as real numbers: a complex one has twice as many.
ConstTensorView real_numbers(ConstTensorView view);

/// The difference of contiguous tensors on the host, of one dtype or of two that are not complex; values are
/// compared. With a tolerance of 0 numbers are alike where their bytes are; NaNs are alike, and a NaN and a
/// number are infinitely far apart.
Difference difference(const ConstTensorView& a, const ConstTensorView& b, double tolerance);

}  // namespace weft::tools
