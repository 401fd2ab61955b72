// The `recording` test backend: a transport without communication. It records every call and lets each end as
// the test decides. Recording is the test's end of it: any thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "weft/backends/backend.hpp"

namespace weft::test {

/// How a call ends. After `polls` polls without a step it is done, or fails with `why`. Or it never ends.
struct Fate {
  enum Kind { finish, fail, never } kind = finish;
  int polls = 0;
  Failure why{};
};

/// The calls of its backends and their answers. Must outlive the groups made with factory().
class Recording {
 public:
  /// A bring-up, without what a test does not compare.
  struct Made {
    std::string token, name;
    int rank, size, process_rank;
  };

  BackendFactory factory();

  /// The fate of calls posted from now on. Default: done at the first poll.
  void decide(std::function<Fate(const OpState&)> fate);
  void decide(const Fate& fate);
  /// From now on calls with the fate `never` are done at their next poll.
  void let_go();
  /// Called by a thread that is about to sleep, once it has announced that to its peers.
  void on_sleep(std::function<void()> hook);
  /// The answer of missing().
  void miss(std::vector<int> ranks, std::string story);
  /// Simulates a failure of a peer: healthy() is false from now on.
  void lose(const Failure& why);
  /// Backends made from now on move memory of devices, not of the host.
  void move_device_memory();
  /// Backends made from now on do not have these operations themselves.
  void lack(OpSet ops);
  /// The answer of quiet() and quiesce(). Default: true.
  void set_quiet(bool quiet);

  std::vector<OpState> posted() const;       ///< every call, as it was at post()
  std::vector<Made> made() const;            ///< every backend
  std::vector<Failure> failed() const;       ///< every fail()
  std::vector<MemoryRange> exposed() const;  ///< of the last quiesce()
  /// Every batch(), as how many calls had been posted: begun, ended, begun, …
  std::vector<std::size_t> batches() const;
  int quiesces() const;   ///< every quiesce() that was asked for with time to wait
  int polls() const;      ///< over all calls
  int destroyed() const;  ///< backends that are gone

 private:
  class RecordingBackend;
  mutable std::mutex mutex_;
  std::function<Fate(const OpState&)> fate_ = [](const OpState&) { return Fate{}; };
  std::function<void()> on_sleep_;
  int let_go_ = 0;  // times let_go() was called
  std::vector<int> missing_;
  std::string story_ = "nobody is missing";
  std::unique_ptr<Failure> lost_;  // what lose() said, to all groups
  bool quiet_ = true, device_ = false;
  OpSet lacked_ = 0;
  std::vector<OpState> posted_;
  std::vector<Made> made_;
  std::vector<Failure> failed_;
  std::vector<MemoryRange> exposed_;
  std::vector<std::size_t> batches_;
  int polls_ = 0, destroyed_ = 0, quiesces_ = 0;
};

}  // namespace weft::test
