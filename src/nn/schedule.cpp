#include "weft/nn/schedule.hpp"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "weft/base/error.hpp"

namespace weft {

void CosineSchedule::check() const {
  if (warmup < 0 || warmup >= total)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("schedule: warmup {} of total {} steps; expected 0 <= warmup < total", warmup, total));
  if (!(floor >= 0 && floor <= peak))
    throw Error(ErrorCode::bad_argument,
                fmt::format("schedule: floor {} and peak {}; expected 0 <= floor <= peak", floor, peak));
  if (!std::isfinite(peak))
    throw Error(ErrorCode::bad_argument, fmt::format("schedule: peak is {}; expected a finite number", peak));
}

double CosineSchedule::at(std::int64_t step) const noexcept {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (step >= total) return floor;
  const double done = static_cast<double>(step - warmup) / static_cast<double>(total - warmup);  // [0, 1)
  return floor + (peak - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
}

}  // namespace weft
