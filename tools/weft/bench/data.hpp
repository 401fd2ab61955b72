// `weft bench data`: what data parallelism costs, and the same in torch, in turns.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Measures what `o` asks for, prints tables, writes o.json. Throws bad_argument for a case or number of
/// ranks that there is not, naming the flag; system where one of our own programs fails or two programs'
/// results differ.
void bench_data(const Options& o);

}  // namespace weft::bench
