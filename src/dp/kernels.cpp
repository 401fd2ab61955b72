#include "weft/dp/kernels.hpp"

#include <fmt/format.h>

#include <cmath>

#include "dp/elements.hpp"
#include "dp/loops.hpp"
#include "dp/parts.hpp"
#include "host/threads/workers.hpp"
#include "weft/base/error.hpp"
#include "weft/host/device_tables.hpp"

namespace weft {
namespace {

using Tables = DeviceTables<GradientKernels>;

// Sums within these bounds stay plain sums. More than 2^100 of them can be added up, and a term whose power
// is too small for a double is smaller than the rounding error.
bool in_range(double sum) { return sum >= 0x1p-500 && sum <= 0x1p900; }

template <class T>
double largest(std::span<const T> values) {
  double most = 0;
  dp::for_floats(values, [&](const auto& part) {
    const double x = dp::loops::largest(part.data(), part.size());
    most = x > most || std::isnan(x) ? x : most;  // a NaN stays
  });
  return most;
}

// Σ (|v| / scale)^p. Several partial sums are computed in parallel. This is faster, and keeps rounding errors
// small.
template <class T>
double sum_of_powers(std::span<const T> values, double scale, double p) {
  double lanes[dp::loops::kLanes] = {};
  dp::for_floats(values, [&](const auto& part) {
    if (p == 2 && scale == 1)
      dp::loops::add_squares(part.data(), part.size(), lanes);
    else if (p == 1 && scale == 1)
      dp::loops::add_magnitudes(part.data(), part.size(), lanes);
    else
      for (std::size_t i = 0; i < part.size(); ++i)
        lanes[i % dp::loops::kLanes] += dp::loops::power(std::abs(static_cast<double>(part[i])) / scale, p);
  });
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class T>
PowerSum power_sum(std::span<const T> values, double p) {
  if (dp::loops::plain(p)) {
    const double sum = sum_of_powers(values, 1, p);
    if (in_range(sum)) return {1, sum};  // otherwise NaN or infinity, zeros, or magnitudes of f64 alone
  }
  const double scale = largest(values);
  if (std::isinf(p) || scale == 0 || !std::isfinite(scale)) return {scale, scale == 0 ? 0.0 : 1.0};
  return {scale, sum_of_powers(values, scale, p)};
}

TensorView view_of(const GradientPart& part) {
  return {part.data, part.dtype, {}, Dims::line(part.count), Dims::line(1)};
}

// Calls work(i, elements) for each part, with the threads of `compute`.
template <class Work>
void for_parts(Compute* compute, std::span<const GradientPart> parts, const Work& work) {
  std::int64_t elements = 0;
  for (const GradientPart& part : parts) elements += part.count;
  threads::run(compute, parts.size(), elements, [&](std::size_t i) {
    dp::with_elements(view_of(parts[i]), [&](const auto& values) { work(i, values); });
  });
}

void power_sums(Compute* compute, std::span<const GradientPart> parts, double p, PowerSum* sums) {
  for_parts(compute, parts, [&](std::size_t i, const auto& values) {
    using T = typename std::remove_cvref_t<decltype(values)>::element_type;
    sums[i] = power_sum(std::span<const T>(values), p);
  });
}

void scale(Compute* compute, std::span<const GradientPart> parts, double factor) {
  for_parts(compute, parts, [&](std::size_t, const auto& values) { dp::scale_elements(values, factor); });
}

template <class From, class To>
void convert(Compute* compute, std::int64_t count, const From* from, To* to,
             void (*loop)(const From*, To*, std::size_t)) {
  threads::for_blocks(
      compute, 1, [&](std::size_t) { return count; },
      [&](const threads::Block& b) {
        loop(from + b.begin, to + b.begin, static_cast<std::size_t>(b.count));
      });
}
void narrow(Compute* compute, const float* from, bf16* to, std::int64_t count) {
  convert<float, bf16>(compute, count, from, to,
                       [](const float* x, bf16* y, std::size_t n) { dp::loops::narrow(x, y, n); });
}
void widen(Compute* compute, const bf16* from, float* to, std::int64_t count) {
  convert<bf16, float>(compute, count, from, to,
                       [](const bf16* x, float* y, std::size_t n) { dp::loops::widen(x, y, n); });
}

}  // namespace

const GradientKernels& cpu_gradient_kernels() noexcept {
  static constexpr GradientKernels kernels{
      .power_sums = &power_sums, .scale = &scale, .narrow = &narrow, .widen = &widen};
  return kernels;
}

void add_gradient_kernels(Context& context, Device device, const GradientKernels& kernels) {
  for (const auto& [name, missing] : {std::pair{"power_sums", kernels.power_sums == nullptr},
                                      {"scale", kernels.scale == nullptr},
                                      {"narrow", kernels.narrow == nullptr},
                                      {"widen", kernels.widen == nullptr}})
    if (missing)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("add_gradient_kernels: the table of {} has no {}", to_string(device), name));
  context.device(device);  // it must be there
  if (device == Device{} || !context.attached<Tables>().add(device, kernels))
    throw Error(ErrorCode::bad_argument,
                fmt::format("add_gradient_kernels: {} has its kernels already", to_string(device)));
}

const GradientKernels& dp::kernels_of(std::string_view what, const Compute* compute) {
  if (!on_device(compute)) return cpu_gradient_kernels();
  if (const GradientKernels* const kernels = compute->context().attached<Tables>().find(compute->device()))
    return *kernels;
  throw Error(ErrorCode::unsupported,
              fmt::format("{}: this Context has no gradient kernels of {}; add_gradient_kernels() adds them",
                          what, to_string(compute->device())));
}

}  // namespace weft
