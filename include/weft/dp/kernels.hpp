// The functions that dp computes on a device; the code that provides the device provides them. Copies and
// fills are the device's own (weft/host/device_runtime.hpp), sums over ranks a group's.
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
/// kGradientPart of them.
struct GradientPart {
  std::byte* data;  ///< memory of the device
  std::int64_t count;
  DType dtype;
};
inline constexpr std::int64_t kGradientPart = std::int64_t{1} << 16;
/// A function gets at most so many of them at a time, all of one device.
inline constexpr std::size_t kGradientPartsAtOnce = 128;

/// A sum of |x|^p, as scale^p * sum: |x|^p itself may be too large or too small for a double.
struct PowerSum {
  double scale = 1, sum = 0;
};

/// They read `parts` before they return. The CPU has done the work then; another device does it on
/// compute->stream(), after what the stream was given before. On the CPU `compute` may be null: then the
/// calling thread does it alone.
struct GradientKernels {
  /// sums[i]: of the elements of parts[i], in memory of the device. p >= 1, or infinity. Summed in f64,
  /// always in the same order. For p up to 4, {1, the sum of |x|^p} where that lies between 2^-500 and 2^900.
  /// Otherwise scale is the largest |x|, or NaN if an element is NaN, and sum is that of (|x| / scale)^p, or
  /// 1 if p is infinity or scale is not finite; {0, 0} if all elements are 0.
  void (*power_sums)(Compute* compute, std::span<const GradientPart> parts, double p, PowerSum* sums);
  /// Every element times `factor`, in f64, rounded once to f32 (f64 stays) and then to its own dtype.
  void (*scale)(Compute* compute, std::span<const GradientPart> parts, double factor);
  /// to[i] = from[i], rounded to the nearest bf16, and back. from, to: (count), contiguous, disjoint, memory
  /// of the device.
  void (*narrow)(Compute* compute, const float* from, bf16* to, std::int64_t count);
  void (*widen)(Compute* compute, const bf16* from, float* to, std::int64_t count);
};

/// The functions of the CPU.
const GradientKernels& cpu_gradient_kernels() noexcept;
/// Gives a Context those of a device that it has (Context::add_device); the table outlives it. Throws
/// bad_argument if there are some already, and where a function is null, naming it. Thread-safe.
void add_gradient_kernels(Context& context, Device device, const GradientKernels& kernels);

}  // namespace weft
