// The functions in the table of a device for kernels that the device does not have. They throw an error that
// names the kernel. If WEFT_HOST_KERNELS allows it, they run the CPU's kernel on copies of the operands.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "weft/nn/kernel_rows.hpp"

namespace weft::kernels {

/// The table of a device as its KernelContexts have it: no entry is null.
struct WholeTable : KernelTable {
  /// By Row::number: whether the kernel's warning has been logged.
  mutable std::array<std::atomic<bool>, kKernels> warned{};
};

/// One call of a kernel of the CPU for a device. The constructor waits for the stream and copies what the
/// kernel reads.
class HostCall {
 public:
  HostCall(KernelContext& ctx, std::string_view kernel, std::size_t number,
           std::span<const Operand> operands);

  /// The context of the CPU, which has as many threads.
  KernelContext& context() const noexcept { return *host_; }
  /// The next argument. An operand becomes its copy on the host. Call it for each argument in turn.
  template <class T>
  T argument(T value) {
    if constexpr (!kIsOperand<T>) {
      return static_cast<T>(value);
    } else {
      std::byte* const copy = copies_[next_++].get();
      if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(copy);
      else
        value.data = reinterpret_cast<decltype(value.data)>(copy);
      return value;
    }
  }
  /// Copies what the kernel has written, in the order of the stream.
  void finish();

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  KernelContext* device_;
  KernelContext* host_;
  std::span<const Operand> operands_;
  std::vector<std::unique_ptr<std::byte, Free>> copies_;  // exactly as long as the list says; null if the
                                                          // operand is null
  std::size_t next_ = 0;
};

/// Throws unsupported, naming the kernel and the device.
[[noreturn]] void throw_absent(const KernelContext& ctx, std::string_view kernel);

/// The two functions that may stand for a kernel.
template <auto Member>
struct Absent;
template <class... Args, void (*KernelTable::*Member)(KernelContext&, Args...)>
struct Absent<Member> {
  static void refuse(KernelContext& ctx, Args...) { throw_absent(ctx, Row<Member>::name); }
  static void run_on_host(KernelContext& ctx, Args... args) {
    const auto operands = Row<Member>::operands(args...);
    static_assert(operands.size() == (std::size_t{0} + ... + std::size_t{kIsOperand<Args>}),
                  "the list names each operand of the kernel");
    HostCall call(ctx, Row<Member>::name, Row<Member>::number, operands);
    const std::tuple<Args...> there{call.template argument<Args>(args)...};  // from left to right
    std::apply([&](const auto&... all) { (cpu_table().*Member)(call.context(), all...); }, there);
    call.finish();
  }
};

}  // namespace weft::kernels
