// How ranks share the work of a module, as the module itself says it. A value; any thread.
#pragma once

#include <string>
#include <vector>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Paths are relative to the module and may lead into containers ("layers.1": child 1 of the Sequential
/// `layers`); `*` is as in a Plan. Usually it is a pair: layers split by columns, and those that take their
/// output, split by rows. `styles` says it layer by layer, by the names of styles (weft/tp/own_plan.hpp).
/// If `styles` is empty the standard one is meant: style "column" for `columns` and style "row" for
/// `rows`.
struct OwnPlan {
  struct Entry {
    std::string path, style;
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  std::vector<std::string> columns{}, rows{};
  std::vector<Entry> styles{};

  bool empty() const noexcept { return columns.empty() && rows.empty() && styles.empty(); }
  friend bool operator==(const OwnPlan&, const OwnPlan&) = default;
};

}  // namespace weft
