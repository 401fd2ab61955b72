// A module's own statement of how ranks share its work. A value; any thread.
#pragma once

#include <string>
#include <vector>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Paths are relative to the module and may lead into containers ("layers.1": child 1 of the Sequential
/// `layers`); `*` is as in a Plan. Usually it is a pair: layers split by columns, and those that take their
/// output, split by rows. `styles` gives the style of each layer by name (weft/tp/own_plan.hpp). If `styles`
/// is empty, `columns` have style "column" and `rows` have style "row".
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
