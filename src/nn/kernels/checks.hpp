// Checks of arguments that several implementations of a kernel share.
#pragma once

#include <fmt/format.h>

#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::kernels {

inline void check_groups(const char* op, const MapShape& s, std::int64_t groups) {
  if (groups < 1 || s.channels % groups != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} channels do not divide into {} groups", op, s.channels, groups));
}

}  // namespace weft::kernels
