// Learning rates over time. Pure arithmetic.
#pragma once

#include <cstdint>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Rises linearly from peak/warmup to `peak` over the first `warmup` steps, then falls along half a cosine to
/// `floor` at step `total` and stays there. Steps count from 0.
struct CosineSchedule {
  double peak = 1e-3, floor = 0;
  std::int64_t warmup = 0, total = 1;
  /// Throws bad_argument unless 0 <= warmup < total and 0 <= floor <= peak.
  void check() const;
  double at(std::int64_t step) const noexcept;
};

}  // namespace weft
