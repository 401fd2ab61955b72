// The flag --ranks of sub-commands that may start their own ranks.
#pragma once

#include <string>
#include <vector>

namespace weft::tools {

/// Throws bad_argument if this process is a rank already. `command`: "train".
void expect_no_rank(const char* command);

/// Returns the same command line for each of the ranks, without the flag that starts ranks.
std::vector<std::string> command_of_a_rank(const std::vector<std::string>& words);

}  // namespace weft::tools
