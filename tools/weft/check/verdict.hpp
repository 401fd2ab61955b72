// Whether what happened is what the backend's row of guarantees says must happen.
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

/// `shared`: of a program that has run. Bounds on time grow with how late the watcher itself was woken.
Verdict judge(const Program& p, const Settings& settings, const SharedReport& shared);

}  // namespace weft::check
