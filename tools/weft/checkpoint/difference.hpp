// How much two tensors of one shape differ.
#pragma once

#include <cstdint>

#include "weft/base/view.hpp"

namespace weft::tools {

struct Difference {
  std::int64_t numbers = 0;  ///< that differ by more than the tolerance
  double largest = 0;        ///< of their distances
};

/// A contiguous tensor as real numbers: a complex tensor has twice as many.
ConstTensorView real_numbers(ConstTensorView view);

/// The difference of contiguous tensors on the host, of one dtype or of two dtypes that are not complex. It
/// compares values. With a tolerance of 0, numbers are equal if their bytes are. NaNs are equal, and a NaN
/// and a number differ infinitely.
Difference difference(const ConstTensorView& a, const ConstTensorView& b, double tolerance);

}  // namespace weft::tools
