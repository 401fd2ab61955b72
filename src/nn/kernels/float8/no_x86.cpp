// casts.hpp for CPUs that are no x86.
#include "nn/kernels/float8/casts.hpp"

namespace weft::float8 {

const Casts* avx2_casts() noexcept { return nullptr; }
const Casts* avx512_casts() noexcept { return nullptr; }

}  // namespace weft::float8
