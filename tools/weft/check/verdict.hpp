// Checks the outcome of a program against the guarantees that the backend promises.
#pragma once

#include <string>

#include "runner.hpp"
#include "shared_report.hpp"

namespace weft::check {

struct Verdict {
  std::string complaint;  ///< empty: all is as promised
  bool slow = false;      ///< the machine's load alone may explain it: to be run again, by itself
  std::string outcome;    ///< in a word or two, for the summary: "right bits", "peer_lost", …
};

/// `shared`: the report of a program that has run. Bounds on time grow with the delay of the watcher's own
/// wake-ups.
Verdict judge(const Program& p, const Settings& settings, const SharedReport& shared);

}  // namespace weft::check
