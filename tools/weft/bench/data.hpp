// `weft bench data`: the cost of data parallelism, in weft and in torch, measured in turns.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Makes the measurements that `o` requests, prints tables, writes o.json. Throws bad_argument that names the
/// flag for a case or number of ranks that does not exist. Throws system if one of our own programs fails or
/// two programs' results differ.
void bench_data(const Options& o);

}  // namespace weft::bench
