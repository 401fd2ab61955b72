// The kernels of the late device of the tests: the CPU's, run when the stream has come so far. A call is
// refused if the list of kernels says that it reaches beyond the memory that it was given.
#pragma once

#include <memory>
#include <type_traits>

#include "support/late_device.hpp"
#include "support/late_gradients.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/kernel_rows.hpp"

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
    for (const kernels::Operand& operand : kernels::Row<Member>::operands(args...))
      device.expect_inside(kernels::Row<Member>::name, operand.data, operand.bytes());
    const std::shared_ptr<kernels::KernelContext> cpu = compute.attached<CpuKernels>().context;
    device.push(ctx.stream(),
                [cpu, ... there = translated(device, args)] { (cpu->table().*Member)(*cpu, there...); });
  }
};

inline const kernels::KernelTable& table() {
  static constexpr kernels::KernelTable kTable = [] {
    kernels::KernelTable all;
    kernels::for_each_kernel([&]<auto Member>() { all.*Member = &Kernel<Member>::give; });
    return all;
  }();
  return kTable;
}

}  // namespace late

/// Gives the Context a late device cuda:<index> with its kernels, all or those of a table, and those for
/// gradients.
inline LateDevice& add_late_device(Context& context, int index = 0,
                                   const kernels::KernelTable& table = late::table()) {
  auto made = std::make_unique<LateDevice>(index);
  LateDevice& device = *made;
  context.add_device(std::move(made));
  kernels::add_kernels(context, device.device(), table);
  add_late_gradients(context, device);
  return device;
}

}  // namespace weft::test
