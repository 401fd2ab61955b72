// The common part of all copies by the kernel between this process and another one (process_vm_readv,
// process_vm_writev). If a page of the other process's memory is not present (a file on NFS or FUSE,
// userfaultfd), such a system call waits for the page without limit, and only SIGKILL ends it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "host/peers/peer_process.hpp"
#include "weft/base/clock.hpp"

namespace weft {

/// The value of WEFT_SINGLE_COPY.
enum class SingleCopySetting : std::uint8_t { automatic, off, pull, push };
/// Throws bad_argument if the variable has another value.
SingleCopySetting single_copy_setting();

/// Decides how many bytes one system call copies. If a system call took long, it has waited for pages. Then
/// pages are copied one by one, until they arrive fast again. So the thread can soon do other work.
class KernelPace {
 public:
  explicit KernelPace(std::int64_t most) noexcept : most_(most), bytes_(most) {}
  std::int64_t bytes() const noexcept { return bytes_; }
  bool slow() const noexcept { return bytes_ < most_; }
  /// Calls copy(), which must copy at most bytes(), measures its time, and returns its result.
  template <class Copy>
  auto timed(const Copy& copy) noexcept {
    const auto began = Clock::now();
    const auto got = copy();
    bytes_ = Clock::now() - began > kSlow ? kPage : std::min(2 * bytes_, most_);
    return got;
  }

 private:
  static constexpr auto kSlow = std::chrono::milliseconds(50);
  static constexpr std::int64_t kPage = 4096;
  std::int64_t most_, bytes_;
};

/// Returns whether the kernel lets other processes copy this memory of this process: it tries to copy the
/// first and the last byte. The kernel refuses memory of some drivers, and secret memory (memfd_secret).
bool kernel_copies_from(const std::byte* data, std::size_t bytes) noexcept;

/// Returns whether the process has ended, or ends within 100 ms. It waits because a process loses its memory
/// shortly before its pidfd reports the end.
bool ends_now(const PeerProcess& process) noexcept;

}  // namespace weft
