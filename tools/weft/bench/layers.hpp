// `weft bench layers`: layers on one rank and over several, and the same in torch, in turns.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Measures what `o` asks for, prints tables, writes o.json. Throws bad_argument for a layer, pass, dtype,
/// number of tokens or of ranks that there is not, naming the flag; system where one of our own programs
/// fails or two programs' results differ.
void bench_layers(const Options& o);

}  // namespace weft::bench
