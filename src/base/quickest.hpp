// Chooses between several ways to do the same thing by measuring them. A fixed table would not fit, because
// the quickest way depends on the processor, on the cores in use, on sizes and on the contents of the caches.
// It may also change while a program runs, if a hypervisor moves the cores.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "weft/base/clock.hpp"

namespace weft {

/// Chooses one of kWays ways (an enum that counts from 0) of something that is repeated. At first it tries
/// all ways. Then it uses the quickest way, and measures this way and the others again from time to time. For
/// use by one thread.
///
/// A way is tried several times in a row, and only the last times count, because the caches must adapt to it.
/// (Example: 4 MB copied between two chiplets by the kernel took 698, 440, 419, 442, 382, 343, 319, 311, 299,
/// 297 us.)
template <class Way, std::size_t kWays>
class Quickest {
 public:
  struct Next {
    Way way;
    bool timed;  ///< whether took() needs the time of this use
  };
  /// Returns the way for the next time, among the ways in `possible`. At least one must be possible.
  Next next(std::span<const Way> possible) noexcept;
  /// Records how long the way took, in nanoseconds.
  void took(Way way, std::uint64_t ns) noexcept {
    Of& of = ways_[index(way)];
    of.ns[of.oldest++ % of.ns.size()] = ns;
  }
  /// The quickest way, as far as is known.
  Way best(std::span<const Way> possible) const noexcept {
    return *std::min_element(possible.begin(), possible.end(), [&](Way a, Way b) { return ns(a) < ns(b); });
  }

  /// at first each way is used so often in a row, in the order of `possible`
  static constexpr std::uint64_t kTries = 10;
  static constexpr std::uint64_t kCheck = 32;  ///< one of so many uses of the quickest way is measured
  /// After this many uses another way is tried again, and later after twice as many each time, …
  static constexpr std::uint64_t kSoon = 128;
  /// … up to this many, if the way takes less than twice as long as the quickest way, …
  static constexpr std::uint64_t kAgain = 2048;
  /// … and otherwise up to this many.
  static constexpr std::uint64_t kSeldom = 16384;

 private:
  // The last so many times of a row count. The least of them is used, because other programs may delay a
  // thread.
  static constexpr std::uint64_t kCounted = 3;
  static constexpr std::uint64_t kUnknown = std::numeric_limits<std::uint64_t>::max();
  struct Of {
    std::array<std::uint64_t, kCounted> ns{kUnknown, kUnknown, kUnknown};
    // the way is tried again at use `again`, and then `gap` uses later
    std::uint64_t oldest = 0, again = 0, gap = kSoon;
  };
  static std::size_t index(Way way) noexcept { return static_cast<std::size_t>(way); }
  std::uint64_t ns(Way way) const noexcept {
    const auto& last = ways_[index(way)].ns;
    return *std::min_element(last.begin(), last.end());
  }
  // Sets the use until which `way` is not tried; `n` is the number of the present use.
  void put_off(Way way, std::uint64_t n, Way quickest) noexcept {
    Of& of = ways_[index(way)];
    of.again = n + of.gap;
    of.gap = std::min(2 * of.gap, ns(way) == kUnknown || ns(way) / 2 < ns(quickest) ? kAgain : kSeldom);
  }
  std::uint64_t count_ = 0;
  std::array<Of, kWays> ways_{};
  // The way that is being tried now, for `left_` more uses.
  Way tried_{};
  std::uint64_t left_ = 0;
};

template <class Way, std::size_t kWays>
typename Quickest<Way, kWays>::Next Quickest<Way, kWays>::next(std::span<const Way> possible) noexcept {
  if (possible.size() == 1) return {possible[0], false};
  const std::uint64_t n = count_++;
  const Way quickest = best(possible);
  if (left_ == 0)
    for (const Way way : possible) {
      if (n < ways_[index(way)].again || (way == quickest && ns(way) != kUnknown)) continue;
      tried_ = way;
      left_ = kTries;
      break;
    }
  if (left_ == 0) return {quickest, n % kCheck == 0};
  if (std::find(possible.begin(), possible.end(), tried_) == possible.end()) {
    left_ = 0;
    put_off(tried_, n, quickest);
    return {quickest, false};
  }
  if (--left_ == 0) put_off(tried_, n, quickest);
  return {tried_, left_ < kCounted};
}

/// Nanoseconds of a monotonic clock.
inline std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
}

}  // namespace weft
