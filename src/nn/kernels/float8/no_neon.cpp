// casts.hpp for CPUs without NEON.
#include "nn/kernels/float8/casts.hpp"

namespace weft::float8 {

const Casts* neon_casts() noexcept { return nullptr; }

}  // namespace weft::float8
