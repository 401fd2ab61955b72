// weft check: see check/, and check_schedule.cpp.
#include <CLI/CLI.hpp>

#include "check/command.hpp"
#include "commands.hpp"

namespace weft::tools {

void add_check(CLI::App& app, Body& chosen) {
  check::add_check(app, chosen);
#ifdef WEFT_HAVE_TRAIN
  add_check_schedule(*app.get_subcommand("check"), chosen);
#endif
}

}  // namespace weft::tools
