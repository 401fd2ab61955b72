// Elements of one floating dtype as those of another.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"

namespace weft::dp {

/// `count` elements, one after the other.
struct Converted {
  const std::byte* from;
  std::byte* to;
  std::int64_t count;
};

/// Converts all, each element rounded once; if both dtypes are one, copies. f64, f32, bf16 and f16; with
/// the threads of `compute` (null: with this one). On a device only copies: throws unsupported.
void convert_all(Compute* compute, const std::vector<Converted>& all, DType from, DType to);

}  // namespace weft::dp
