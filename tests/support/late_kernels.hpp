// The kernels of the late device of the tests: the CPU's, run when the stream has come so far.
#pragma once

#include <memory>
#include <type_traits>

#include "support/late_device.hpp"
#include "support/late_gradients.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::test {

namespace late {

struct CpuKernels {
  explicit CpuKernels(Compute& compute)
      : context(std::make_shared<kernels::KernelContext>(compute.threads())) {}
  std::shared_ptr<kernels::KernelContext> context;  // work that is still queued holds it, too
};

// Memory of the device as the CPU's kernels find it.
template <class T>
T translated(const LateDevice& device, T value) {
  if constexpr (std::is_pointer_v<T>)
    return device.bytes_of(value);
  else if constexpr (std::is_same_v<T, kernels::WeightMatrix>)
    return {device.bytes_of(value.data), value.weight, value.version};
  else if constexpr (std::is_same_v<T, kernels::ScoreBias>)
    return {device.bytes_of(value.data), value.of_each_sample, value.of_each_query};
  else
    return value;
}

template <auto Member>
struct Kernel;
template <class... Args, void (*kernels::KernelTable::*Member)(kernels::KernelContext&, Args...)>
struct Kernel<Member> {
  static void give(kernels::KernelContext& ctx, Args... args) {
    Compute& compute = *ctx.compute();
    auto& device = dynamic_cast<LateDevice&>(compute.runtime());
    const std::shared_ptr<kernels::KernelContext> cpu = compute.attached<CpuKernels>().context;
    device.push(ctx.stream(),
                [cpu, ... there = translated(device, args)] { (cpu->table().*Member)(*cpu, there...); });
  }
};

inline const kernels::KernelTable& table() {
#define WEFT_LATE(name) .name = &Kernel<&kernels::KernelTable::name>::give,
  static constexpr kernels::KernelTable kTable{WEFT_KERNELS(WEFT_LATE)};
#undef WEFT_LATE
  return kTable;
}

}  // namespace late

/// Gives the Context a late device cuda:<index> with its kernels, and those for gradients.
inline LateDevice& add_late_device(Context& context, int index = 0) {
  auto made = std::make_unique<LateDevice>(index);
  LateDevice& device = *made;
  context.add_device(std::move(made));
  kernels::add_kernels(context, device.device(), late::table());
  add_late_gradients(context, device);
  return device;
}

}  // namespace weft::test
