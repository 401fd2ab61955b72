// weft bench domain: layers that are cut in space over ranks, beside what they consist of.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Throws bad_argument for what cannot be measured, naming the flag; system where the program fails or its
/// results have other bits than on one rank.
void bench_domain(const Options& o);

}  // namespace weft::bench
