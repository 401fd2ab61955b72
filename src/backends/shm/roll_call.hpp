// The roll-call: before a time-out names a rank, the ranks are asked whom they wait for.
//
// The rank whose deadline has passed increments the group's number of roll-calls and wakes ranks that sleep.
// A rank that waits, in any group, reads that number whenever it checks for failures and before it sleeps. It
// answers by writing the ranks for which it waits, and then the number. A call that finishes in time does
// none of this. hold_up.hpp says how the answers are used.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "backends/shm/group.hpp"
#include "weft/backends/hold_up.hpp"

namespace weft::shm {

/// One rank's part. Used by the owner of the group alone.
class RollCall {
 public:
  explicit RollCall(const Group& group) : group_(group), stopped_(static_cast<std::size_t>(group.size)) {}
  /// Answers if a peer has asked since last time. `awaited()`: the ranks of this group for which this rank
  /// waits. `message()`: the oldest message for which it waits. Null: none.
  template <class Awaited, class Message>
  void answer(const Awaited& awaited, const Message& message) noexcept {
    const std::uint64_t asked = group_.control.abort().asked.load(std::memory_order_seq_cst);
    if (asked == group_.mine().answered.load(std::memory_order_relaxed) || WEFT_MUTANT("unheard_roll_call"))
      return;
    try {
      write(asked, awaited(), message());
    } catch (...) {  // no memory for the ranks: later
    }
  }
  /// Asks, or goes on asking, for a call that waits for `awaited`. True: further answers will not change
  /// found(). Answers to an earlier question count only if they are a moment old.
  bool ask(const OpState& s, std::span<const int> awaited) noexcept;
  /// The ranks that hold up a call that waits for `awaited`. None if it was not asked.
  HoldUp found(std::span<const int> awaited) const;
  /// See Backend::last_calls(). The arrival lines give the calls, also those of ranks that are dead or
  /// stopped. A rank that answers gives the message for which it waits.
  std::vector<LastCall> last_calls() const;

 private:
  void write(std::uint64_t asked, const std::vector<int>& awaited, const OpState* message) noexcept;
  void begin(const OpState& s, Clock::time_point now) noexcept;
  void look(Clock::time_point now) noexcept;

  const Group& group_;
  std::uint64_t number_ = 0;  // 0: none
  RollCallTimes times_;
  Clock::time_point looks_{};
  std::vector<bool> stopped_;  // processes, by rank, as the system says
};

}  // namespace weft::shm
