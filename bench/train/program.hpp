// The main() of the programs in this folder, which have flags of their own in addition to the flags of every
// benchmark (cases.hpp, Spec). One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness.hpp"

namespace weft::bench {

/// A flag of a single program. `take` gets the flag's value ("" for a flag without a value) and throws
/// bad_argument if the value is not valid.
struct Flag {
  std::string name;
  std::function<void(const std::string& value)> take;
  bool has_value = true;
};

/// `--rounds 3`: runs every case so many times, round by round.
Flag rounds_flag(int& rounds);
/// `--tokens 8,512`: a list of the numbers 8, 32, 128, 512, 2048 and 8192.
Flag tokens_flag(std::vector<std::int64_t>& tokens);
/// `--layers mlp,conv`: a list of words in `known`.
Flag words_flag(std::string name, std::vector<std::string>& words, std::vector<std::string> known);

/// Takes `flags` out of the arguments, then runs bench_main() (harness.hpp). Reports wrong flags, and returns
/// 2 for them.
int program_main(int argc, char** argv, const std::vector<Flag>& flags,
                 const std::function<std::vector<TableRow>(RankOfBench&)>& table,
                 const std::function<std::string(const Spec&)>& settings);

}  // namespace weft::bench
