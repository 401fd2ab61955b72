// weft check: see check/.
#include "check/command.hpp"
#include "commands.hpp"

namespace weft::tools {

void add_check(CLI::App& app, Body& chosen) { check::add_check(app, chosen); }

}  // namespace weft::tools
