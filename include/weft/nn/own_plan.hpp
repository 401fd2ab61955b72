// A module's own statement of how ranks share its work. A value; any thread.
#pragma once

#include <string>
#include <vector>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Paths are relative to the module and may lead into containers ("layers.1": child 1 of the Sequential
/// `layers`); `*` is as in a Plan. Usually an OwnPlan lists a pair: layers that are split by columns, and
/// layers that take their output and are split by rows. `styles` gives the names of the layers' styles
/// (weft/tp/own_plan.hpp). If `styles` is empty, `columns` have style "column" and `rows` have style "row".
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
