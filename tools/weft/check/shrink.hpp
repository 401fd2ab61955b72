// Makes a failing program small: fewer steps, groups and ranks, smaller counts, plainer calls, as long as it
// still fails.
#pragma once

#include <functional>

#include "program.hpp"

namespace weft::check {

/// `fails` runs a program. It is called at most `runs` times.
Program shrink(Program p, const std::function<bool(const Program&)>& fails, int runs);

}  // namespace weft::check
