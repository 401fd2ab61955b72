// `weft bench layers`: layers on one rank and over several, in weft and in torch, measured in turns.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Makes the measurements that `o` requests, prints tables, writes o.json. Throws bad_argument that names the
/// flag for a layer, pass, dtype, number of tokens or of ranks that does not exist. Throws system if one of
/// our own programs fails or two programs' results differ.
void bench_layers(const Options& o);

}  // namespace weft::bench
