// The ways in which the ranks of a test of shm run, and the memory that they use.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {

struct ShmSetting {
  Ranks kind;
  Memory memory;
  bool pairs = true;  ///< false: the ranks have no memory of pairs (PairMemory)
};

/// "threads_foreign", "processes_shared", …
inline std::string to_string(const ShmSetting& s) {
  return to_string(s.kind) + (s.memory == Memory::shared ? "_shared" : "_foreign") +
         (s.pairs ? "" : "_without_pairs");
}

/// All settings that make a difference: threads reach all memory, processes reach only shared memory. Without
/// `tools/test.sh --full` the thread sanitizer runs only the threads, since it does not see what other
/// processes do.
inline std::vector<ShmSetting> shm_settings() {
  if (!kThreadsInForks && !does_everything()) return {{Ranks::threads, Memory::local}};
  return {
      {Ranks::threads, Memory::local}, {Ranks::processes, Memory::shared}, {Ranks::processes, Memory::local}};
}

/// A test whose bodies run on n ranks in each of these ways.
class OnShm : public testing::TestWithParam<ShmSetting> {
 protected:
  static void run(int n, const std::function<void(Rank&)>& body, RankOptions options = {}) {
    options.hooks.no_pair_memory = !GetParam().pairs;
    run_ranks(GetParam().kind, n, body, options);
  }
};

}  // namespace weft::test
