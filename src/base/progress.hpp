// Calls in flight of one rank of this process, over all its groups: whoever waits drives all of them.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/neighbourhood.hpp"

namespace weft {

/// Something with calls in flight: a process group.
class Driven {
 public:
  virtual ~Driven() = default;
  /// Takes the next steps of what is in flight, without blocking. True: something moved.
  virtual bool drive() noexcept = 0;
  /// Tells peers that this rank is about to sleep on its bell (true) or is awake again (false).
  virtual void announce_sleep(bool asleep) noexcept = 0;
  /// False: nobody rings when something has happened, so sleepers nap and look again.
  virtual bool rings() const noexcept { return true; }
};

/// All groups of one rank of this process. Thread-safe; a rank's groups may be driven by several threads.
class ProgressList {
 public:
  explicit ProgressList(Bell bell) : bell_(bell) {}
  void add(Driven* d);
  /// After it returns nobody drives `d` through this list.
  void remove(Driven* d) noexcept;
  /// drive() on each. True: something moved.
  bool drive_all() noexcept;
  /// Counts the threads of this rank that sleep: announce_sleep(true) on each group for the first, (false)
  /// for the last. True: one of them does not ring.
  bool announce_sleep(bool asleep) noexcept;
  /// Sleeps on the rank's bell until a peer rings or `limit` has passed. After the announcement everything is
  /// driven once more and `finished` asked: where either says yes it does not sleep. No wake-up is lost: a
  /// peer publishes its step first and looks for sleepers after, so either the last drive sees the step, or
  /// the peer sees the announcement and rings, which changes the word that was read before it.
  template <class Finished>
  void sleep(Duration limit, const Finished& finished) noexcept {
    const std::uint32_t seen = bell_.read();
    const bool nap = announce_sleep(true);
    if (!drive_all() && !finished()) bell_.sleep(seen, nap ? std::min(limit, kNap) : limit);
    announce_sleep(false);
  }
  Bell bell() const noexcept { return bell_; }

 private:
  // Long enough that napping costs a few percent of a core, short beside what made the waiter give up
  // spinning.
  static constexpr Duration kNap = std::chrono::microseconds(200);
  std::mutex mutex_;
  std::vector<Driven*> driven_;
  int sleepers_ = 0;  // threads of this rank that sleep
  Bell bell_;
};

}  // namespace weft
