// The first thing the ranks of a group do: each puts a card into the store and reads those of the others.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/backends/backend.hpp"

namespace weft {

/// The cards of all ranks, by rank. `what` keeps the keys of several uses of one token apart. Throws timeout
/// naming the ranks that did not join by the deadline, mismatch where they do not agree on the size.
std::vector<std::string> join(const Bringup& b, std::string_view what, const std::string& card);

}  // namespace weft
