// The baseline: element-wise sums as plain loops, compiled with -O2 for the baseline instruction set.
#pragma once

#include <cstdint>

#include "weft/base/dtype.hpp"

namespace weft::bench {

void plain_sum(const float* const* in, int n, float* out, std::int64_t count);
void plain_sum(const double* const* in, int n, double* out, std::int64_t count);
void plain_sum(const bf16* const* in, int n, bf16* out, std::int64_t count);
void plain_sum(const f16* const* in, int n, f16* out, std::int64_t count);

}  // namespace weft::bench
