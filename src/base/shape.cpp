#include "weft/base/shape.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "weft/base/error.hpp"

namespace weft {

Dims::Dims(std::span<const std::int64_t> values) {
  if (values.size() > kMaxDims)
    throw Error(ErrorCode::bad_argument,
                fmt::format("shape: {} dimensions; expected at most {}", values.size(), kMaxDims));
  for (const std::int64_t v : values) values_[rank_++] = v;
}

void Dims::push_back(std::int64_t value) {
  if (rank_ == kMaxDims)
    throw Error(ErrorCode::bad_argument,
                fmt::format("shape: {} dimensions; expected at most {}", rank_ + 1, kMaxDims));
  values_[rank_++] = value;
}

Strides row_major(const Shape& shape) noexcept {
  Strides s = shape;
  std::int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    s[i] = step;
    step *= shape[i];
  }
  return s;
}

std::string to_string(const Dims& dims) { return fmt::format("({})", fmt::join(dims.values(), ", ")); }

}  // namespace weft
