// A choice between ways to do the same that is made by measuring them, where no table is right: it depends on the processor, on which of its cores are used,
// on sizes and on what the caches hold, and changes while a program runs, where a hypervisor moves the cores.
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

/// Chooses one of kWays ways (an enum that counts from 0) of something that is repeated. The first times try all. Then the quickest is used; it is
/// measured again from time to time, and so are the others. For one thread.
template <class Way, std::size_t kWays>
class Quickest {
 public:
  struct Next {
    Way way;
    bool timed;  ///< took() is to be told
  };
  /// That of the next time, for which these are possible; at least one is.
  Next next(std::span<const Way> possible) noexcept;
  /// How long it took, in nanoseconds.
  void took(Way way, std::uint64_t ns) noexcept {
    Of& of = ways_[index(way)];
    of.ns[of.oldest++ % of.ns.size()] = ns;
  }
  /// The quickest, as far as is known.
  Way best(std::span<const Way> possible) const noexcept {
    return *std::min_element(possible.begin(), possible.end(), [&](Way a, Way b) { return ns(a) < ns(b); });
  }

  static constexpr std::uint64_t kTries = 4;   ///< of each way, at the beginning, in the order of `possible`
  static constexpr std::uint64_t kCheck = 32;  ///< so often the quickest is measured
  static constexpr std::uint64_t kAgain =
      256;  ///< and the others, where they take less than twice as long; else kSeldom
  static constexpr std::uint64_t kSeldom = 2048;

 private:
  struct Of {
    // The least of the last three counts: a thread may be held up by others meanwhile.
    std::array<std::uint64_t, 3> ns{kUnknown, kUnknown, kUnknown};
    std::uint64_t oldest = 0, again = kAgain;
  };
  static constexpr std::uint64_t kUnknown = std::numeric_limits<std::uint64_t>::max();
  static std::size_t index(Way way) noexcept { return static_cast<std::size_t>(way); }
  std::uint64_t ns(Way way) const noexcept {
    const auto& last = ways_[index(way)].ns;
    return *std::min_element(last.begin(), last.end());
  }
  std::uint64_t count_ = 0;
  std::array<Of, kWays> ways_{};
  Way again_{};
  bool second_ = false;  // the next one tries `again_` once more, and that one is measured
};

template <class Way, std::size_t kWays>
typename Quickest<Way, kWays>::Next Quickest<Way, kWays>::next(std::span<const Way> possible) noexcept {
  if (possible.size() == 1) return {possible[0], false};
  const std::uint64_t n = count_++;
  if (n < kTries * possible.size())
    return {possible[n / kTries], n % kTries > 0};  // the first one touches new pages
  const Way quickest = best(possible);
  for (const Way way : possible) {
    if (way == quickest) continue;
    if (second_ && way == again_) {
      second_ = false;
      return {way, true};
    }
    if (Of& of = ways_[index(way)]; !second_ && n >= of.again) {
      of.again = n + (ns(way) / 2 < ns(quickest) ? kAgain : kSeldom);
      again_ = way;
      second_ = true;
      return {way, false};
    }
  }
  second_ = false;
  return {quickest, n % kCheck == 0};
}

/// Nanoseconds of a clock that goes on.
inline std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
}

}  // namespace weft
