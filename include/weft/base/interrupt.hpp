// A means by which another thread, or a signal handler, ends the waits of a thread. It is for programs that
// must react to Ctrl-C while they wait for ranks that do not arrive.
//
// The waiting thread holds an Interruptible. Once its Interrupt is raised, all Deadlines that the thread has
// made so far have passed. So every wait with a deadline ends within 20 ms, in the same way as at a time-out:
// locks, files and shared memory are released. Deadlines that the thread makes afterwards, to notify other
// ranks and to clean up, pass at their usual time.
//
// An Interrupt ends waits of the start-up (stores, rendezvous, the making of groups and meshes, shrink), and
// the wait() of a Work. After it has ended a wait(), the group fails on all ranks, with aborted and this
// rank's number. The other ranks cannot finish a call that one rank has left. A wait_for() returns false, as
// at its limit, and the call stays in flight. An Interrupt does not end a wait inside another library: while
// a host's name is resolved, while Gloo connects, in MPI_Init.
#pragma once

#include <atomic>

#include "weft/base/clock.hpp"

namespace weft {

/// A flag that is raised once and never lowered.
class Interrupt {
 public:
  /// May be called from any thread, and in a signal handler.
  void raise() noexcept { raised_.store(true, std::memory_order_relaxed); }
  bool raised() const noexcept { return raised_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> raised_{false};
  static_assert(std::atomic<bool>::is_always_lock_free);
};

/// While an Interruptible exists, `interrupt` ends the waits of the thread that made the Interruptible. Only
/// that thread may use it. If a thread has made several, the last one is used. A wait that an Interrupt ends
/// throws the same error as at a time-out, with two exceptions. The making of a group and the wait() of a
/// Work throw aborted, on this rank and on the others, with a text that names this rank.
class Interruptible {
 public:
  explicit Interruptible(const Interrupt& interrupt) noexcept;
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  /// Whether the Interrupt has ended a wait of this thread.
  bool interrupted() const noexcept { return since_ != Clock::time_point::max(); }

  /// The Interruptible of this thread, or null.
  static Interruptible* current() noexcept;

 private:
  friend Clock::time_point detail::end_of_wait(Clock::time_point, Clock::time_point) noexcept;
  const Interrupt& interrupt_;
  Interruptible* const outer_;
  // the time at which this thread first noticed that the Interrupt was raised
  Clock::time_point since_ = Clock::time_point::max();
};

/// Whether this thread's Interruptible has ended a wait.
inline bool interrupted() noexcept {
  const Interruptible* const here = Interruptible::current();
  return here != nullptr && here->interrupted();
}

}  // namespace weft
