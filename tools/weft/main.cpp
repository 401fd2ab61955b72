// weft: the command line. One sub-command per file; see commands.hpp.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/text/nearest.hpp"
#include "command_voice.hpp"
#include "commands.hpp"
#include "weft/base/error.hpp"
#include "weft/weft.h"

namespace {

constexpr int kUsage = 2;  // the exit status of wrong flags and values

/// `before`: the command that has these sub-commands, "checkpoint ", or nothing.
void check_command(const CLI::App& app, std::string_view before, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  if (std::find(names.begin(), names.end(), word) != names.end()) return;
  const std::string meant = weft::is_meant(word, names);
  throw weft::Error(
      weft::ErrorCode::bad_argument,
      fmt::format("unknown command \"{}{}\"{}{}{}", before, word, meant,
                  meant.empty() ? "; the commands are " : " The commands are ", fmt::join(names, ", ")));
}

// Returns whether the word after this one is its value.
bool takes_next_word(const CLI::App& run, const std::string& word) {
  const bool attached = word.find('=') != std::string::npos || (!word.starts_with("--") && word.size() > 2);
  if (attached) return false;
  const CLI::Option* option = run.get_option_no_throw(word);
  return option != nullptr && option->get_items_expected_min() > 0;
}

// The words for weft itself and the words of the program that `weft run` starts. The latter are all words
// behind "--", or from the first word that is neither an option nor an option's value. "-np 2" means "-n 2",
// as mpirun's users write it.
struct Words {
  std::vector<std::string> ours, program;
};

Words split(const CLI::App& app, const std::vector<std::string>& words) {
  Words s;
  const CLI::App* run = !words.empty() && words[0] == "run" ? app.get_subcommand("run") : nullptr;
  for (auto word = words.begin(); word != words.end(); ++word) {
    const bool first = word == words.begin();
    if (*word == "--" || (run != nullptr && !first && !word->starts_with('-'))) {
      s.program.assign(word + (*word == "--" ? 1 : 0), words.end());
      break;
    }
    const bool mpiruns = run != nullptr && *word == "-np";
    s.ours.push_back(mpiruns ? "-n" : *word);
    if (run != nullptr && !first && word + 1 != words.end() && takes_next_word(*run, s.ours.back()))
      s.ours.push_back(*++word);
  }
  return s;
}

// Converts "help" and "version" to flags: `weft help run` is `weft run --help`.
std::vector<std::string> as_flags(const std::vector<std::string>& words) {
  if (words.empty() || (words[0] != "help" && words[0] != "version")) return words;
  std::vector<std::string> flags(words.begin() + 1, words.end());
  flags.push_back("--" + words[0]);
  return flags;
}

void check_commands(const CLI::App& app, const std::vector<std::string>& words) {
  if (words.empty() || words[0].starts_with('-')) return;
  check_command(app, "", words[0]);
  const CLI::App* command = app.get_subcommand(words[0]);
  const bool has_commands = !command->get_subcommands([](const CLI::App*) { return true; }).empty();
  if (has_commands && words.size() > 1 && !words[1].starts_with('-'))
    check_command(*command, words[0] + " ", words[1]);
}

const CLI::App* innermost(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return command;
}

// Refuses our words that match no option of the command: "train has no option "--stepz"; is --steps meant?".
void refuse_unknown(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* const command = innermost(app);
  std::vector<std::string> names;
  for (const CLI::Option* option : command->get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  for (const std::string& word : words) {
    if (!word.starts_with("--") || word == "--") continue;
    const std::string name = word.substr(0, word.find('='));
    if (command->get_option_no_throw(name) == nullptr && app.get_option_no_throw(name) == nullptr)
      throw weft::Error(
          weft::ErrorCode::bad_argument,
          fmt::format("{} has no option \"{}\"{}", command->get_name(), name, weft::is_meant(name, names)));
  }
}

// "weft: run: --ranks is 0; expected 1 to 256", and the help that says more.
int refuse(const CLI::App& app, const CLI::Error& e) {
  std::string path;
  for (const CLI::App* command = innermost(app); command != &app; command = command->get_parent())
    path.insert(0, command->get_name() + " ");
  std::string text = weft::tools::in_our_words(e);
  if (text == "A subcommand is required") {
    std::vector<std::string> names;
    for (const CLI::App* command : innermost(app)->get_subcommands([](const CLI::App*) { return true; }))
      names.push_back(command->get_name());
    text = fmt::format("no command; the commands are {}", fmt::join(names, ", "));
  }
  const std::string before = path.empty() ? "" : path.substr(0, path.size() - 1) + ": ";
  fmt::print(stderr, "weft: {}{}\nweft: see weft {}--help\n", before, text, path);
  return kUsage;
}

// CLI11 silently reads 99999999999999999999 as the largest possible number, 010 as 8 and 0x10 as 16.
template <class Number>
std::string decimal_fault(const std::string& text) {
  const char* const first = text.data() + (text.starts_with('+') ? 1 : 0);
  const std::string_view digits = std::string_view(text).substr(text.find_first_not_of("+-") == 1 ? 1 : 0);
  Number value{};
  const auto [end, failed] = std::from_chars(first, text.data() + text.size(), value);
  const bool octal = digits.size() > 1 && digits[0] == '0';
  if (failed == std::errc() && end == text.data() + text.size() && !octal) return {};
  return fmt::format("Value {}; expected a decimal number without leading zeros, from {} to {}", text,
                     std::numeric_limits<Number>::min(), std::numeric_limits<Number>::max());
}

void expect_decimals(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type.starts_with("INT")) option->check(decimal_fault<std::int64_t>);
    if (type.starts_with("UINT")) option->check(decimal_fault<std::uint64_t>);
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) expect_decimals(*command);
}

int run(const std::vector<std::string>& given) {
  CLI::App app("weft: programs of many ranks", "weft");
  app.formatter(std::make_shared<weft::tools::HelpFormat>());  // before commands, which take it
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("weft ") + WEFT_VERSION);
  std::vector<std::string> program;
  weft::tools::Body chosen;
  weft::tools::add_run(app, program, chosen);
#ifdef WEFT_HAVE_TRAIN
  weft::tools::add_train(app, given, chosen);
  weft::tools::add_parity(app, given, chosen);
  weft::tools::add_sample(app, given, chosen);
#endif
  weft::tools::add_doctor(app, chosen);
#ifdef WEFT_HAVE_CHECK_AND_BENCH
  weft::tools::add_check(app, chosen);
#endif
#ifdef WEFT_HAVE_CHECKPOINT
  weft::tools::add_checkpoint(app, chosen);
#endif
#ifdef WEFT_HAVE_CHECK_AND_BENCH
  weft::tools::add_bench(app, chosen);
#endif
  expect_decimals(app);
  const std::vector<std::string> words = as_flags(given);
  check_commands(app, words);
  const Words s = split(app, words);
  program = s.program;
  try {
    app.parse(std::vector<std::string>(s.ours.rbegin(), s.ours.rend()));  // last word first
    if (!program.empty() && !app.got_subcommand("run")) throw CLI::ExtrasError({"--"});
  } catch (const CLI::ExtrasError& e) {
    refuse_unknown(app, s.ours);
    return refuse(app, e);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return refuse(app, e);
  }
  return chosen();
}

// The output of a sub-command may still be in a buffer, and the disk may be full.
int with_output_written(int status) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  std::fprintf(stderr, "weft: cannot write standard output: %s\n",
               errno != 0 ? weft::system_words(errno).c_str() : "a write failed");
  return status == 0 ? 1 : status;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return with_output_written(run(std::vector<std::string>(argv + 1, argv + argc)));
  } catch (const weft::Error& e) {
    std::fprintf(stderr, "weft: %s\n", e.what());
    return e.code() == weft::ErrorCode::bad_argument ? kUsage : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "weft: %s\n", e.what());
    return 1;
  }
}
