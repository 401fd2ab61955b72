// The calls that a rank has in flight.
#pragma once

#include <algorithm>
#include <vector>

#include "weft/group/process_group.hpp"
#include "weft/mesh/window.hpp"

namespace weft::check {

/// A call, or several calls that were submitted together, or the exchanges of a window.
struct Open {
  Work work;
  std::vector<WindowTransfer> transfers;
  int group = 0;
  std::vector<int> steps;
  bool is_window() const { return !transfers.empty(); }
  bool done() {
    return (!work.valid() || work.done()) &&
           std::all_of(transfers.begin(), transfers.end(), [](WindowTransfer& t) { return t.done(); });
  }
};

}  // namespace weft::check
