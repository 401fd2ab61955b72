#include "nn/kernels/host_call.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"
#include "weft/base/log.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft::kernels {
namespace {

// The CPU's KernelContext of a rank that computes on a device.
struct HostKernels {
  explicit HostKernels(Compute& compute) : context(compute.threads()) {}
  KernelContext context;
};

void copy(Compute& compute, const void* from, Device from_device, void* to, Device to_device,
          std::size_t bytes) {
  if (bytes > 0) compute.runtime().copy(from, from_device, to, to_device, Rows{bytes}, compute.stream());
}

}  // namespace

void throw_absent(const KernelContext& ctx, std::string_view kernel) {
  throw Error(
      ErrorCode::unsupported,
      fmt::format("kernels: {} has no {}; give it to add_kernels(), or set WEFT_HOST_KERNELS=1 to run it on "
                  "the host, on copies of its operands",
                  to_string(ctx.stream().device), kernel));
}

HostCall::HostCall(KernelContext& ctx, std::string_view kernel, std::size_t number,
                   std::span<const Operand> operands)
    : device_(&ctx), host_(&ctx.compute()->attached<HostKernels>().context), operands_(operands) {
  Compute& compute = *ctx.compute();
  const Device device = compute.device();
  if (!static_cast<const WholeTable&>(ctx.table()).warned[number].exchange(true))
    compute.context().log().write(
        LogLayer::program, LogLevel::warning,
        fmt::format("kernels: {} has no {}: it runs on the host, on copies of its operands "
                    "(WEFT_HOST_KERNELS=1)",
                    to_string(device), kernel));
  copies_.reserve(operands.size());
  for (const Operand& operand : operands) {
    auto& to = copies_.emplace_back();
    if (operand.data != nullptr)
      to.reset(static_cast<std::byte*>(::operator new (operand.bytes(), std::align_val_t{64})));
  }
  try {
    for (std::size_t i = 0; i < operands.size(); ++i)
      if (copies_[i] != nullptr && operands[i].access != Access::writes)
        copy(compute, operands[i].data, device, copies_[i].get(), Device{}, operands[i].bytes());
  } catch (...) {
    try {
      compute.wait();  // the copies that are queued write to memory that is about to go
    } catch (...) {    // the first error is reported
    }
    throw;
  }
  compute.wait();
}

void HostCall::finish() {
  Compute& compute = *device_->compute();
  for (std::size_t i = 0; i < operands_.size(); ++i)
    if (operands_[i].access != Access::reads)
      copy(compute, copies_[i].get(), Device{}, const_cast<void*>(operands_[i].data), compute.device(),
           operands_[i].bytes());
}

}  // namespace weft::kernels
