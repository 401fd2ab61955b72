// How the waits of a thread are ended from outside: by another thread, or by the handler of a signal. For
// programs that must answer Ctrl-C while they wait for ranks that do not come.
//
// The thread that waits lives under an Interruptible. Once its Interrupt is raised, all Deadlines that the
// thread has made so far have passed. So every wait with a deadline ends within 20 ms, by the way that it has
// for a timeout: locks, files and shared memory are given back. Deadlines that are made afterwards, to tell
// other ranks and to tidy up, hold again.
//
// It ends waits for ranks to meet (stores, rendezvous, the making of groups and meshes, shrink), and a Work's
// wait(): then the group fails, on all ranks, with aborted and this rank's number, as nobody could go on with
// a call that one of them has left. wait_for() only ends, as by its limit, and the call stays in flight. An
// Interrupt does not end a wait inside of another library: the resolution of a host's name, a connection of
// Gloo's, MPI_Init.
#pragma once

#include <atomic>

#include "weft/base/clock.hpp"

namespace weft {

/// Raised once, for good.
class Interrupt {
 public:
  /// Any thread; also in the handler of a signal.
  void raise() noexcept { raised_.store(true, std::memory_order_relaxed); }
  bool raised() const noexcept { return raised_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> raised_{false};
  static_assert(std::atomic<bool>::is_always_lock_free);
};

/// While it lives, `interrupt` ends the waits of the thread that made it, which alone may use it. The last
/// one made counts. A wait that an Interrupt ends throws what a timeout throws, except when a group is made
/// and in a Work's wait(): these throw aborted, on this rank and on the others, with a text that names this
/// rank.
class Interruptible {
 public:
  explicit Interruptible(const Interrupt& interrupt) noexcept;
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  /// Whether it has ended a wait.
  bool interrupted() const noexcept { return since_ != Clock::time_point::max(); }

  /// The Interrupt of this thread, or null.
  static Interruptible* current() noexcept;

 private:
  friend Clock::time_point detail::end_of_wait(Clock::time_point, Clock::time_point) noexcept;
  const Interrupt& interrupt_;
  Interruptible* const outer_;
  Clock::time_point since_ = Clock::time_point::max();  // when this thread first saw that it is raised
};

/// Whether this thread's Interruptible has ended a wait.
inline bool interrupted() noexcept {
  const Interruptible* const here = Interruptible::current();
  return here != nullptr && here->interrupted();
}

}  // namespace weft
