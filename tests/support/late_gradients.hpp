// The functions of dp on the late device of the tests: the CPU's, when the stream reaches them.
#pragma once

#include <vector>

#include "support/late_device.hpp"
#include "weft/dp/kernels.hpp"
#include "weft/host/compute.hpp"

namespace weft::test {

namespace late {

inline std::vector<GradientPart> translated(const LateDevice& device, std::span<const GradientPart> parts) {
  std::vector<GradientPart> there(parts.begin(), parts.end());
  for (GradientPart& part : there) part.data = device.bytes_of(part.data);
  return there;
}

inline const GradientKernels& gradient_kernels() {
  static constexpr GradientKernels kKernels{
      .power_sums =
          [](Compute* compute, std::span<const GradientPart> parts, double p, PowerSum* sums) {
            auto& device = dynamic_cast<LateDevice&>(compute->runtime());
            device.push(compute->stream(),
                        [there = translated(device, parts), p, to = device.bytes_of(sums)] {
                          cpu_gradient_kernels().power_sums(nullptr, there, p, to);
                        });
          },
      .scale =
          [](Compute* compute, std::span<const GradientPart> parts, double factor) {
            auto& device = dynamic_cast<LateDevice&>(compute->runtime());
            device.push(compute->stream(), [there = translated(device, parts), factor] {
              cpu_gradient_kernels().scale(nullptr, there, factor);
            });
          },
      .narrow =
          [](Compute* compute, const float* from, bf16* to, std::int64_t count) {
            auto& device = dynamic_cast<LateDevice&>(compute->runtime());
            device.push(compute->stream(), [from = device.bytes_of(from), to = device.bytes_of(to), count] {
              cpu_gradient_kernels().narrow(nullptr, from, to, count);
            });
          },
      .widen =
          [](Compute* compute, const bf16* from, float* to, std::int64_t count) {
            auto& device = dynamic_cast<LateDevice&>(compute->runtime());
            device.push(compute->stream(), [from = device.bytes_of(from), to = device.bytes_of(to), count] {
              cpu_gradient_kernels().widen(nullptr, from, to, count);
            });
          },
  };
  return kKernels;
}

}  // namespace late

/// Gives the late device cuda:<index>, which the Context has, what dp computes there.
inline void add_late_gradients(Context& context, const LateDevice& device) {
  add_gradient_kernels(context, device.device(), late::gradient_kernels());
}

}  // namespace weft::test
