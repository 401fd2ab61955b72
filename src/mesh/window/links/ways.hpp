// Memory that ranks do not share goes over a link packed into slots, in one of two ways, or is copied by the kernel. Which is quicker depends on the
// processor, on which of its cores the ranks are, on the runs of the bytes and on what the caches hold: so all are measured
// (docs/decisions/2026-11-25-ways-are-measured.md).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace weft::windows {

/// How bytes get from one rank's memory to another's.
enum class Way : std::uint8_t {
  gathered,  ///< packed: short runs are gathered in the first cache, and written to the slot in long pieces
  by_runs,   ///< packed: each run is written to the slot
  by_kernel  ///< copied once, by the kernel
};
inline constexpr std::size_t kWays = 3;

/// Chooses the way of the exchanges of one plan with one rank, as they are repeated. The first ones try all ways. Then the quickest is used; it is measured
/// again from time to time, and so are the others, since a hypervisor may move the cores. For one thread.
class Ways {
 public:
  struct Next {
    Way way;
    bool timed;  ///< took() is to be told
  };
  /// That of the next exchange, for which these are possible; at least one is.
  Next next(std::span<const Way> possible) noexcept;
  /// What an exchange took both ranks to copy, in nanoseconds.
  void took(Way way, std::uint64_t ns) noexcept {
    Of& of = ways_[index(way)];
    of.ns[of.oldest++ % of.ns.size()] = ns;
  }
  /// The quickest, as far as is known.
  Way best(std::span<const Way> possible) const noexcept {
    return *std::min_element(possible.begin(), possible.end(), [&](Way a, Way b) { return ns(a) < ns(b); });
  }

  static constexpr std::uint64_t kTries = 4;   ///< of each way, at the beginning
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
  Way again_ = Way::gathered;
  bool second_ = false;  // the next one tries `again_` once more, and that one is measured
};

inline Ways::Next Ways::next(std::span<const Way> possible) noexcept {
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

}  // namespace weft::windows
