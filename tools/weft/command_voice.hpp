// The help and the errors of the command line, as weft writes them and CLI11 does not. Callable from any
// thread.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace weft::tools {

/// Help in lines of at most 80 columns: "--ranks N    How many ranks (1 to 256; required)" where CLI11 writes
/// "--ranks INT:INT in [1 - 256] REQUIRED".
class HelpFormat : public CLI::Formatter {
 public:
  HelpFormat();
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_footer(const CLI::App* command) const override;
};

/// The error of CLI11 in weft's words: "--ranks is 0; expected 1 to 256" for "--ranks: Value 0 not in range 1
/// to 256".
std::string in_our_words(const CLI::Error& error);

}  // namespace weft::tools
