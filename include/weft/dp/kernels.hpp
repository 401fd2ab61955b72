// The functions by which dp computes on a device. The code that adds the device also provides these
// functions. Copies and fills are functions of the device (weft/host/device_runtime.hpp). Sums over ranks are
// calls of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "weft/base/device.hpp"
#include "weft/base/dtype.hpp"

namespace weft {

class Compute;
class Context;

/// A part of a gradient: `count` elements of f64, f32, bf16 or f16, one after the other, at most
/// kGradientPart elements.
struct GradientPart {
  std::byte* data;  ///< memory of the device
  std::int64_t count;
  DType dtype;
};
inline constexpr std::int64_t kGradientPart = std::int64_t{1} << 16;
/// A function gets at most this many parts at a time, all on one device.
inline constexpr std::size_t kGradientPartsAtOnce = 128;

/// A sum of |x|^p, represented as scale^p * sum, because |x|^p itself may be too large or too small for a
/// double.
struct PowerSum {
  double scale = 1, sum = 0;
};

/// The functions read `parts` before they return. On the CPU the work is done when they return. Another
/// device does the work on compute->stream(), after the work that was queued there before. On the CPU
/// `compute` may be null. Then the calling thread does all work.
struct GradientKernels {
  /// sums[i] becomes the sum over the elements of parts[i]. `sums` is memory of the device. p >= 1, or
  /// infinity. The sums are made in f64, always in the same order. For p up to 4 the result is {1, the sum of
  /// |x|^p} if that sum lies between 2^-500 and 2^900. Otherwise `scale` is the largest |x|, or NaN if an
  /// element is NaN; `sum` is the sum of (|x| / scale)^p, or 1 if p is infinity or `scale` is not finite. If
  /// all elements are 0, the result is {0, 0}.
  void (*power_sums)(Compute* compute, std::span<const GradientPart> parts, double p, PowerSum* sums);
  /// Multiplies every element by `factor` in f64. The product is rounded once to f32 (except for f64) and
  /// then to the element's dtype.
  void (*scale)(Compute* compute, std::span<const GradientPart> parts, double factor);
  /// narrow: to[i] = from[i], rounded to the nearest bf16. widen is the reverse. from, to: (count),
  /// contiguous, disjoint, memory of the device.
  void (*narrow)(Compute* compute, const float* from, bf16* to, std::int64_t count);
  void (*widen)(Compute* compute, const bf16* from, float* to, std::int64_t count);
};

/// The table of the CPU.
const GradientKernels& cpu_gradient_kernels() noexcept;
/// Adds to a Context the table for one of its devices (Context::add_device). The table must exist longer than
/// the Context. Throws bad_argument if the device has a table already, or if a function is null. The text
/// names the function. Thread-safe.
void add_gradient_kernels(Context& context, Device device, const GradientKernels& kernels);

}  // namespace weft
