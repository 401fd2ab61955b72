// A ticket for a call in flight.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "weft/base/clock.hpp"
#include "weft/base/device.hpp"

namespace weft {

class GroupState;

/// Move-only. `in` and `out` of the call must live, and not be touched, until it is done.
///
/// Dropping an unfinished Work aborts its group and quiesces (up to 2 s, once a group): never do it on
/// purpose. A Work whose Error was thrown is invalid. The Work of coalesced calls is done when all are, and
/// fails with the first that fails. An invalid Work counts as done: done(), wait() and wait_for() return at once,
/// without an Error, so a second wait() tells nothing. They may be called from any thread, one at a time per Work;
/// each makes progress on all calls in flight of this rank, in all its groups, so that waiting in different orders
/// on different ranks cannot deadlock.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(Work&& other) noexcept
      : group_(other.group_), slot_(other.slot_), ticket_(other.ticket_), more_(std::move(other.more_)) {
    other.group_ = nullptr;
  }
  Work& operator=(Work&& other) noexcept;
  ~Work() {
    if (group_) drop();
  }

  /// Takes the next possible steps; never blocks. True: finished. Throws the call's Error where it failed.
  bool done();
  /// Makes progress until it is done. Throws the call's Error; after the deadline, timeout.
  void wait();
  /// Like wait(), but returns false after `limit`, the call still pending.
  bool wait_for(Duration limit);
  /// Makes `stream` wait for it; Stream{}: the default one of the group's device. Stream backends do not block
  /// the host and leave the Work pending: wait() or done() still tell how it ended. With others the host waits
  /// here.
  void wait_on(Stream stream);
  /// False: default-made, moved from, or already waited for.
  bool valid() const noexcept { return group_ != nullptr; }

 private:
  friend class GroupState;
  Work(GroupState* group, std::uint32_t slot, std::uint32_t ticket) noexcept
      : group_(group), slot_(slot), ticket_(ticket) {}
  template <class Ask>
  bool ask(const Ask& ask);
  void take(Work& other) noexcept;
  void drop() noexcept;
  void finish() noexcept;
  void spend() noexcept;
  GroupState* group_ = nullptr;  // counted; null: nothing is chained either
  std::uint32_t slot_ = 0;
  std::uint32_t ticket_ = 0;    // the slot's generation while the call is in flight
  std::unique_ptr<Work> more_;  // coalesced: the next call, waited for after this
};

}  // namespace weft
