// weft bench: runs our programs and the peers' programs in turns, and shows the results.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Makes the measurements that `o` requests and prints them. Returns the exit status: 0 if all of our
/// programs were measured. Throws bad_argument that names the wrong flag, and unsupported if the programs are
/// not there.
int run_bench(Options o);

/// The operations `weft bench` knows, for its help.
std::string known_ops();

/// The measurement and the program of an operation, for `weft bench <op> --help`; of all operations if `op`
/// names none.
std::string about(const std::string& op);

}  // namespace weft::bench
