// A doorbell: one word of shared memory on which a rank sleeps and that its peers ring. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "weft/base/clock.hpp"

namespace weft {

/// A word on which a rank sleeps. Its memory is mapped by all processes of the host that know this process.
class Doorbell {
 public:
  /// the doorbell of no rank: it reads 0 and wakes nobody, and sleep() lasts for the whole limit
  Doorbell() = default;
  explicit Doorbell(std::atomic<std::uint32_t>* word) : word_(word) {}
  explicit operator bool() const noexcept { return word_ != nullptr; }
  std::uint32_t read() const noexcept {
    return word_ == nullptr ? 0 : word_->load(std::memory_order_seq_cst);
  }
  /// Adds one to the word, and wakes all threads that sleep on it.
  void ring() const noexcept;
  /// Sleeps until the word differs from `seen` or `limit` has passed. May wake early.
  void sleep(std::uint32_t seen, Duration limit) const noexcept;

 private:
  std::atomic<std::uint32_t>* word_ = nullptr;
};

}  // namespace weft
