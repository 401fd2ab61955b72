// Memory whose pages arrive when the test lets them. Pages of a file on a server that does not answer behave
// in the same way.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "support/processes.hpp"

namespace weft::test {

/// All pages but the first and the last are missing at first. A thread that touches a missing page waits, and
/// so does the kernel.
class SlowMemory {
 public:
  explicit SlowMemory(std::size_t bytes)
      : bytes_(bytes), fault_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK))) {
    uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
    if (fault_ < 0 || ::ioctl(fault_, UFFDIO_API, &api) != 0) return;
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return;
    ::madvise(data, bytes, MADV_NOHUGEPAGE);
    auto* const begin = static_cast<char*>(data);
    begin[0] = begin[bytes - 1] = 0;
    uffdio_register range{.range = {}, .mode = UFFDIO_REGISTER_MODE_MISSING, .ioctls = 0};
    range.range = {.start = reinterpret_cast<std::uint64_t>(begin + kPage), .len = bytes - 2 * kPage};
    if (::ioctl(fault_, UFFDIO_REGISTER, &range) == 0) data_ = begin;
  }
  ~SlowMemory() {
    if (fault_ >= 0) ::close(fault_);  // then all pages come
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  SlowMemory(const SlowMemory&) = delete;
  SlowMemory& operator=(const SlowMemory&) = delete;

  static constexpr std::size_t kPage = 4096;
  /// Whether the system permits this to a test.
  static bool possible() {
    return run_in_child([] { return SlowMemory(16 * kPage).there() ? 0 : 1; }).ok();
  }

  bool there() const { return data_ != nullptr; }
  void* data() { return data_; }
  bool somebody_waits(Duration limit) const {
    pollfd p{.fd = fault_, .events = POLLIN, .revents = 0};
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(limit).count();
    return ::poll(&p, 1, static_cast<int>(ms)) == 1;
  }
  /// The address for which a thread waits; null if no thread waits within `limit`. Call this before
  /// let_come() of that page.
  char* awaited(Duration limit) const {
    uffd_msg message{};
    if (!somebody_waits(limit) || ::read(fault_, &message, sizeof(message)) != sizeof(message))
      return nullptr;
    return data_ + (message.arg.pagefault.address - reinterpret_cast<std::uint64_t>(data_)) / kPage * kPage;
  }
  /// Lets all pages arrive, or the pages in `bytes` bytes from `at` on.
  void let_come() { let_come(data_ + kPage, bytes_ - 2 * kPage); }
  void let_come(char* at, std::size_t bytes) {
    uffdio_zeropage zeros{
        .range = {.start = reinterpret_cast<std::uint64_t>(at), .len = bytes}, .mode = 0, .zeropage = 0};
    EXPECT_EQ(::ioctl(fault_, UFFDIO_ZEROPAGE, &zeros), 0) << std::strerror(errno);
  }

 private:
  const std::size_t bytes_;
  int fault_;
  char* data_ = nullptr;
};

}  // namespace weft::test
