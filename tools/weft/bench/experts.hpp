// weft bench experts: tokens on their way to experts, and layers of experts, next to their parts.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Throws bad_argument that names the flag for a case that cannot be measured. Throws system if the program
/// fails or its results have other bits than on one rank.
void bench_experts(const Options& o);

}  // namespace weft::bench
