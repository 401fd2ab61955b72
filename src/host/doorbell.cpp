#include "weft/host/doorbell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "base/waits/suspension.hpp"

namespace weft {

void Doorbell::ring() const noexcept {
  if (word_ == nullptr) return;
  word_->fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::sleep(std::uint32_t seen, Duration limit) const noexcept {
  if (limit <= Duration::zero()) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(seconds.count());
  time.tv_nsec = static_cast<long>((limit - seconds).count());
  const TimedWait wait(limit);
  if (word_ == nullptr) {
    ::nanosleep(&time, nullptr);
    return;
  }
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word_), FUTEX_WAIT, seen, &time, nullptr, 0);
}

}  // namespace weft
