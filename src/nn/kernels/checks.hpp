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

/// For any shape of attention. No heads at all are 0 over 0.
template <class Shape>
void check_heads(const char* op, const Shape& s) {
  if (s.heads == 0 && s.kv_heads == 0) return;
  if (s.kv_heads < 1 || s.heads % s.kv_heads != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} query heads over {} key/value heads; expected a multiple", op, s.heads,
                            s.kv_heads));
}

}  // namespace weft::kernels
