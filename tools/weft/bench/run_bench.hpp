// weft bench: our programs and the peers', in turns, and what came out.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Runs what `o` asks for and prints it. Returns the exit status: 0 if all of ours was measured. Throws
/// bad_argument naming the flag that is wrong, unsupported if the programs are not there.
int run_bench(Options o);

/// The operations `weft bench` knows, for its help.
std::string known_ops();

/// The measurement and the program of an operation, for `weft bench <op> --help`; of all operations if `op`
/// is none of them.
std::string about(const std::string& op);

}  // namespace weft::bench
