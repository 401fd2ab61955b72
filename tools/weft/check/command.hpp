// The flags of weft check. This is separate from the command itself so that the binary with the mutations has
// these flags, too.
#pragma once

#include <functional>
#include <string>

#include "checker.hpp"

namespace CLI {
class App;
}

namespace weft::check {

/// Adds "check" to `app`; `chosen` receives its body if "check" is the given command. `others`: backends in
/// addition to those that weft knows, by name.
using MoreBackends = std::function<bool(const std::string& backend, Settings& settings)>;
void add_check(CLI::App& app, std::function<int()>& chosen, const MoreBackends& others = {});
/// A program that has only this command. Returns its exit status.
int check_main(int argc, char** argv, const MoreBackends& others);

}  // namespace weft::check
