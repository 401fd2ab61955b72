// Calls in flight of one rank of this process, over all its groups: whoever waits drives all of them.
#pragma once

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
  /// Sleeps on the rank's bell until a peer rings or `limit` has passed, unless driving everything once more, after
  /// the announcement, moved something.
  void sleep(Duration limit) noexcept;
  Bell bell() const noexcept { return bell_; }

 private:
  std::mutex mutex_;
  std::vector<Driven*> driven_;
  Bell bell_;
};

}  // namespace weft
