// The flag --ranks of sub-commands that may start their own ranks.
#pragma once

#include <string>
#include <vector>

namespace weft::tools {

/// Throws bad_argument if this process is a rank already. `command`: "train".
void expect_no_rank(const char* command);

/// Returns the same command line for each of the ranks, which starts none. It keeps the number of ranks that
/// were asked for.
std::vector<std::string> command_of_a_rank(const std::vector<std::string>& words, int ranks);
/// That number in such a command line; 0: it is another.
int started_ranks(const std::vector<std::string>& words);

}  // namespace weft::tools
