// The sub-commands of `weft`, one file each. Called from main, on the program's only thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace weft::tools {

/// Runs a sub-command once its flags are read; returns the exit status. It may throw weft::Error: main prints
/// the error and exits with 2 for a bad_argument, with 1 otherwise.
using Body = std::function<int()>;

// Each function adds its sub-command to `app`. `chosen` receives its body if it is the given command.

/// `program`: the program to run and its arguments, which weft does not parse. It is known once flags are
/// parsed.
void add_run(CLI::App& app, const std::vector<std::string>& program, Body& chosen);

/// `words`: the whole command line, for starting ranks with equal flags, and for finding --config.
void add_train(CLI::App& app, const std::vector<std::string>& words, Body& chosen);
void add_parity(CLI::App& app, const std::vector<std::string>& words, Body& chosen);
void add_sample(CLI::App& app, const std::vector<std::string>& words, Body& chosen);
void add_doctor(CLI::App& app, Body& chosen);
void add_check(CLI::App& app, Body& chosen);
/// `check`: the sub-command that add_check() adds.
void add_check_schedule(CLI::App& check, Body& chosen);
void add_checkpoint(CLI::App& app, Body& chosen);
void add_bench(CLI::App& app, Body& chosen);

}  // namespace weft::tools
