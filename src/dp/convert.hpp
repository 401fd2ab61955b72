// Converts elements of one floating dtype to another.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"

namespace weft::dp {

/// `count` consecutive elements.
struct Converted {
  const std::byte* from;
  std::byte* to;
  std::int64_t count;
};

/// Converts all elements, each rounded once. If both dtypes are equal, it copies. Supports f64, f32, bf16 and
/// f16. The threads of `compute` do the work (null: this thread). On a device it only copies, and throws
/// unsupported for a conversion.
void convert_all(Compute* compute, const std::vector<Converted>& all, DType from, DType to);

}  // namespace weft::dp
