// How a sender writes large packed bytes into a slot. No locks: for the thread that owns the links.
#pragma once

#include <array>
#include <cstdint>

#include "weft/base/clock.hpp"

namespace weft::windows {

/// Chooses between ordinary stores and stores around the caches, by what either took before. Where sender and receiver share a cache, the
/// receiver finds there what ordinary stores wrote. Where they do not (cores of two chiplets of an AMD EPYC), each ordinary store first takes its
/// line away from the receiver's cache, across the chip: 155 ns a KiB in place of 40, and stores around the caches take 25 to 35 in both cases
/// (docs/decisions/2026-11-25-stores-into-slots.md). What a processor says of its caches cannot be relied on: threads migrate, and the
/// guests of a hypervisor are told of one cache where there are two. So it is measured, and one block in kTry is written the other way.
class SlotStores {
 public:
  static constexpr std::int64_t kLeast = 4096;  ///< bytes of a block; less is written through the caches
  static constexpr int kTry = 32;
  /// So many times quicker, stores around the caches are taken, since the receiver then reads from memory; and given up where they are not even
  /// kStillWorth times quicker.
  static constexpr double kWorth = 2, kStillWorth = 1.3;

  /// A block of so many bytes is about to be written: whether around the caches. wrote() is to follow.
  bool around_caches(std::int64_t bytes) noexcept {
    bytes_ = bytes;
    if (bytes < kLeast) return false;
    around_ = prefers_ != (++blocks_ % kTry == kTry / 2);
    began_ = Clock::now();
    return around_;
  }
  void wrote() noexcept {
    if (bytes_ >= kLeast) took(Clock::now() - began_);
  }
  /// It took so long.
  void took(Duration time) noexcept {
    double& cost = cost_[around_ ? 1 : 0];
    const double now = static_cast<double>(time.count()) / static_cast<double>(bytes_);
    // A block during which the thread lost its core counts little.
    cost = cost == 0 ? now : cost + ((now < 2 * cost ? now : 2 * cost) - cost) / 4;
    if (cost_[0] > 0 && cost_[1] > 0) prefers_ = cost_[0] > (prefers_ ? kStillWorth : kWorth) * cost_[1];
  }

 private:
  std::array<double, 2> cost_{};  // of a byte: through the caches, around them
  std::int64_t bytes_ = 0;
  unsigned blocks_ = 0;
  bool prefers_ = false, around_ = false;
  Clock::time_point began_{};
};

}  // namespace weft::windows
