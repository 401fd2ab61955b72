// weft check from end to end: draws, runs, validates, shrinks, reports.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "program.hpp"
#include "runner.hpp"
#include "verdict.hpp"

namespace weft::check {

struct Options {
  Range range;
  Settings settings;
  std::uint64_t seed = 1;
  std::int64_t programs = 200;
  std::optional<std::uint64_t> only;  ///< this program alone
  std::string replay;                 ///< a file with a program, instead of drawing
  int jobs = 0;                       ///< programs at once; 0: as suits the machine
  bool keep_going = false;            ///< past the first failure
  bool show = false;                  ///< print each program
  bool shrinks = true;
  std::string progress = "auto";       ///< bar, lines, none
  std::string json;                    ///< a further place for the summary
  std::string command = "weft check";  ///< how the program is started again, without seed and program
};

/// Returns the exit status: 0 if every program had the guaranteed outcome. It forks, so the process must have
/// no threads and no Context.
int run_check(const Options& options);

}  // namespace weft::check
