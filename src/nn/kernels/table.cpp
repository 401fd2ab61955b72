// The tables of kernels by device, and how a KernelContext finds the table of its device.
#include <fmt/format.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "nn/kernels/composed.hpp"
#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/host_call.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/device_tables.hpp"

namespace weft::kernels {
namespace {

using Tables = DeviceTables<WholeTable>;

const KernelTable& table_of(Compute& compute) {
  if (compute.device() == Device{}) return cpu_table();
  if (const WholeTable* table = compute.context().attached<Tables>().find(compute.device())) return *table;
  throw Error(ErrorCode::unsupported,
              fmt::format("kernels: {} has none in this Context; add_kernels() adds them",
                          to_string(compute.device())));
}

std::unique_ptr<KernelContext::State> cpu_state(int threads, Context* context) {
  if (threads < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("KernelContext: threads is {}; expected at least 1", threads));
  return std::make_unique<KernelContext::State>(threads, context);
}

// Makes the tables that the KernelContexts of devices use, and keeps them as long as the Context.
class WholeTables {
 public:
  explicit WholeTables(Context&) {}
  /// The device's kernels, with something in the place of each that it lacks.
  const WholeTable& make(const KernelTable& of_device) {
    auto whole = std::make_unique<WholeTable>();
    static_cast<KernelTable&>(*whole) = of_device;
    compose(*whole);
    const bool on_host = env::get_int("WEFT_HOST_KERNELS", 0, 1).value_or(0) == 1;
    for_each_kernel([&]<auto Member>() {
      if ((*whole).*Member == nullptr)
        (*whole).*Member = on_host ? &Absent<Member>::run_on_host : &Absent<Member>::refuse;
    });
    const std::lock_guard lock(mutex_);
    return *tables_.emplace_back(std::move(whole));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<WholeTable>> tables_;
};

}  // namespace

const KernelTable& cpu_table() noexcept {
  static constexpr KernelTable table{
#define WEFT_KERNEL(name, ...) .name = &cpu::name,
#define WEFT_KERNEL_F32_BF16(name, ...) .name = &cpu::name<float>, .name##_bf16 = &cpu::name<bf16>,
#include "weft/nn/kernels.inl"
  };
  return table;
}

void add_kernels(Context& context, Device device, const KernelTable& table) {
  context.device(device);  // it must be there
  const bool new_one = device != Device{} &&
                       context.attached<Tables>().add(device, context.attached<WholeTables>().make(table));
  if (!new_one)
    throw Error(ErrorCode::bad_argument,
                fmt::format("add_kernels: {} has its kernels already", to_string(device)));
}

KernelContext::KernelContext(int threads)
    : table_(&cpu_table()), threads_(threads), state_(cpu_state(threads, nullptr)) {}

KernelContext::KernelContext(Compute& compute)
    : table_(&table_of(compute)),
      compute_(&compute),
      stream_(compute.stream()),
      threads_(compute.threads()),
      state_(compute.device() == Device{} ? cpu_state(compute.threads(), &compute.context()) : nullptr) {}

KernelContext::~KernelContext() = default;
KernelContext::KernelContext(KernelContext&&) noexcept = default;
KernelContext& KernelContext::operator=(KernelContext&&) noexcept = default;

}  // namespace weft::kernels
