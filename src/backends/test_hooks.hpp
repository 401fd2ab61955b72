// What tests set for the groups that a rank of this process makes. Never set by users, so it is in no public
// header: the Context keeps it, by rank of the process.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "weft/backends/backend.hpp"

namespace weft {

struct TestHooks {
  std::string path =
      {};  ///< force one path of the backend: shm knows "inline", "direct", "staged" and "single"
  std::function<void(std::uint64_t call)> in_chunk =
      {};  ///< called with peers' memory in hand, in the middle of a copy
  std::int64_t max_count =
      0;  ///< as if the transport counted no further than this in one message; 0: its own limit
  std::string host = {};  ///< "auto" and gloo take this rank to be on that host; empty: on its own
  std::function<void(int peer)> before_leave =
      {};  ///< gloo: called before `peer` is told that this rank leaves
};

/// The hooks of the rank that makes this group; empty where no test has set any. Thread-safe.
TestHooks test_hooks(const GroupInit& b);

/// While it lives, the groups that this rank of the process makes in `context` have these hooks. Scopes of
/// one rank are nested.
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
