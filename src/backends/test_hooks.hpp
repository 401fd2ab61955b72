// Hooks that tests set for the groups that a rank of this process makes. Users never set hooks, so no public
// header has them. The Context keeps them for each rank of the process.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "weft/backends/backend.hpp"

namespace weft {

struct TestHooks {
  /// Forces one path of the backend: shm knows "inline", "direct", "staged" and "single".
  std::string path = {};
  /// Called in the middle of a copy, while peers' memory is in use.
  std::function<void(std::uint64_t call)> in_chunk = {};
  /// shm: this rank behaves as if the ranks had no memory of pairs (PairMemory)
  bool no_pair_memory = false;
  /// The largest count of one message, which replaces the transport's limit. 0: the transport's own limit.
  std::int64_t max_count = 0;
  std::string host = {};  ///< "auto" and gloo behave as if this rank were on that host; empty: the real host
  /// Gloo: called before `peer` is notified that this rank leaves.
  std::function<void(int peer)> before_leave = {};
};

/// Returns the hooks of the rank that makes this group; empty if no test has set hooks. Thread-safe.
TestHooks test_hooks(const GroupInit& b);

/// While this object exists, the groups that this rank of the process makes in `context` have these hooks.
/// Scopes of one rank must be nested.
class ScopedTestHooks {
 public:
  ScopedTestHooks(Context& context, int process_rank, TestHooks hooks);
  ~ScopedTestHooks();
  ScopedTestHooks(const ScopedTestHooks&) = delete;
  ScopedTestHooks& operator=(const ScopedTestHooks&) = delete;

 private:
  Context& context_;
  const int process_rank_;
  TestHooks outer_;
};

}  // namespace weft
