// The transports on which a test of operations runs: the transports of this build, or that of the job in
// which the test runs.
#pragma once

#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"

namespace weft::test {

struct TransportSetting {
  std::string backend;
  Ranks kind;
};
inline void PrintTo(const TransportSetting& s, std::ostream* to) { *to << s.backend; }

inline std::vector<TransportSetting> transport_settings() {
  if (const char* const job = std::getenv("WEFT_TEST_BACKEND")) return {{job, Ranks::job}};
  std::vector<TransportSetting> all{{"shm", Ranks::threads}};
  if (kProcesses) all.push_back({"shm", Ranks::processes});
  if (WEFT_HAVE_GLOO) all.push_back({"gloo", Ranks::threads});
  return all;
}

}  // namespace weft::test
