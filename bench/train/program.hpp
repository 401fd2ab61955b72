// The main() of the programs here: their own flags beside those of every benchmark (cases.hpp, Spec). One
// thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness.hpp"

namespace weft::bench {

/// A flag of one program alone. `take` gets its value, "" for one that has none, and throws bad_argument for
/// what it cannot take.
struct Flag {
  std::string name;
  std::function<void(const std::string& value)> take;
  bool has_value = true;
};

/// `--rounds 3`: every case so often, round by round.
Flag rounds_flag(int& rounds);
/// `--tokens 8,512`, of 8, 32, 128, 512, 2048 and 8192.
Flag tokens_flag(std::vector<std::int64_t>& tokens);
/// `--layers mlp,conv`, of `known`.
Flag words_flag(std::string name, std::vector<std::string>& words, std::vector<std::string> known);

/// Takes `flags` out of the arguments, then bench_main() on all reductions (harness.hpp): 2 for wrong ones,
/// which are reported.
int program_main(int argc, char** argv, const std::vector<Flag>& flags,
                 const std::function<std::vector<TableRow>(RankOfBench&)>& table,
                 const std::function<std::string(const Spec&)>& settings);

}  // namespace weft::bench
