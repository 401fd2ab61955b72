// parallelize() where some modules stay whole with what is inside them. Inside tp.
#pragma once

#include <span>

#include "weft/tp/parallelize.hpp"

namespace weft {

/// parallelize(), but the units() of `unasked` need not divide: another module inside them may be split.
void parallelize_but(Module& root, const DeviceMesh& axis, const Plan& plan,
                     std::span<const Module* const> unasked);

}  // namespace weft
