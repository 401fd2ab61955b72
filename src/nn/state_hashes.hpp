// Hashes by which a second run of a forward pass is compared with the first. Included only inside nn.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "weft/nn/module.hpp"

namespace weft {

/// A hash of the bits of each buffer of the tree, and the version of each parameter, with their paths.
std::vector<std::pair<std::string, std::uint64_t>> hashes_of_state(Context& context, Module& module);

}  // namespace weft
