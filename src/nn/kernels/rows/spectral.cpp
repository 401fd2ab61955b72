// The arithmetic of a spectral norm on its weight and vectors, with numbers that stay on the device of the
// kernels.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

bool divides(float sigma) { return std::isfinite(sigma) && sigma != 0.0f; }

}  // namespace

void normalise(KernelContext& ctx, float* x, const double* squares, double eps, std::int64_t n) {
  scale(ctx, x, static_cast<float>(1 / std::max(std::sqrt(*squares), eps)), n);
}

void spectral_divide(KernelContext& ctx, float* x, const float* sigma, const float* inner, std::int64_t n) {
  if (!divides(*sigma))
    throw Error(ErrorCode::bad_argument,
                fmt::format("spectral norm: sigma is {}; expected a number other than 0", *sigma));
  const auto by = static_cast<double>(*sigma);
  const double factor = inner == nullptr ? 1 / by : -static_cast<double>(*inner) / (by * by);
  scale(ctx, x, static_cast<float>(factor), n);
}

void spectral_keep(KernelContext&, const float* from, const float* sigma, float* to, std::int64_t n) {
  if (divides(*sigma)) std::copy_n(from, n, to);
}

}  // namespace weft::kernels::cpu
