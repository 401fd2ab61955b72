// The tables of kernels by device, and how a KernelContext finds the table of its device.
#include <fmt/format.h>

#include "nn/kernels/cpu_context.hpp"
#include "weft/base/error.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/device_tables.hpp"

namespace weft::kernels {
namespace {

using Tables = DeviceTables<KernelTable>;

const KernelTable& table_of(Compute& compute) {
  if (compute.device() == Device{}) return cpu_table();
  if (const KernelTable* table = compute.context().attached<Tables>().find(compute.device())) return *table;
  throw Error(ErrorCode::unsupported,
              fmt::format("kernels: {} has none in this Context; add_kernels() gives them",
                          to_string(compute.device())));
}

std::unique_ptr<KernelContext::State> cpu_state(int threads, Context* context) {
  if (threads < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("KernelContext: threads is {}; expected at least 1", threads));
  return std::make_unique<KernelContext::State>(threads, context);
}

}  // namespace

const KernelTable& cpu_table() noexcept {
#define WEFT_MEMBER(name) .name = &cpu::name,
  static constexpr KernelTable table{WEFT_KERNELS(WEFT_MEMBER)};
#undef WEFT_MEMBER
  return table;
}

void add_kernels(Context& context, Device device, const KernelTable& table) {
#define WEFT_CHECK(name)                 \
  if (table.name == nullptr)             \
    throw Error(ErrorCode::bad_argument, \
                fmt::format("add_kernels: the table of {} has no " #name, to_string(device)));
  WEFT_KERNELS(WEFT_CHECK)
#undef WEFT_CHECK
  context.device(device);  // it must be there
  if (device == Device{} || !context.attached<Tables>().add(device, table))
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
