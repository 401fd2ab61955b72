// Watches the calls in flight. It determines which ranks are dead, which deadline has passed, and which call
// has waited so long that a warning is due. This is the slow path of a group. Only the group's owner uses it
// (group_state.hpp).
#pragma once

#include "group/ring.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

class Watch {
 public:
  Watch(Context& context, const Membership& member, Backend& backend, Ring& ring) noexcept
      : context_(context), member_(member), backend_(backend), ring_(ring) {}

  /// Call it after each poll of the group. It returns true if it is time to inspect(). It counts only polls
  /// that leave a call in flight, even if something moved, so that small calls do not read the clock.
  bool due(bool moved) noexcept;
  /// Like due(), for a caller that polls so rarely that counting polls would take too long. Returns true once
  /// in each tick of the kernel.
  bool due_by_tick() noexcept;
  /// Checks the calls in flight. For a call whose polls were without success, the time until the deadline
  /// begins at the first inspect(). Returns true if the backend has failed, perhaps because a deadline has
  /// passed.
  [[gnu::cold]] bool inspect() noexcept;
  /// The last call of each rank, for the Error of a time-out: from the backend, and for this rank from the
  /// ring. Returns an empty list if the backend does not know.
  [[gnu::cold]] std::vector<LastCall> last_calls() noexcept;
  /// Returns last_calls() as a text that begins with "; ".
  [[gnu::cold]] std::string told_last_calls();

 private:
  static void begin(Ring::Slot& slot, Clock::time_point now) noexcept;
  void pass_over(Duration gap) noexcept;
  bool inspect(Ring::Slot& slot, Clock::time_point now) noexcept;
  void warn(Ring::Slot& slot) noexcept;
  void expire(const Ring::Slot& slot, const Ring::Slot& head) noexcept;

  Context& context_;
  const Membership& member_;
  Backend& backend_;
  Ring& ring_;
  int polls_ = 0;                  // the number of polls since the last inspect() that left a call in flight
  Clock::time_point inspected_{};  // the time of that inspect()
  Duration suspended_{};           // suspended_time() at that time
  Duration gap_{};                 // the longest time between two looks while calls wait
  std::int64_t tick_ = 0;          // the kernel's tick of the last due_by_tick()
};

}  // namespace weft
