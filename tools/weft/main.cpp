// weft: the command line. One sub-command per file; see commands.hpp.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iterator>
#include <string>
#include <vector>

#include "commands.hpp"
#include "weft/base/error.hpp"

namespace {

constexpr int kUsage = 2;  // the exit status of wrong flags and values

int run(const std::vector<std::string>& words) {
  const auto dashes = std::find(words.begin(), words.end(), "--");
  const std::vector<std::string> program(dashes == words.end() ? dashes : dashes + 1, words.end());

  CLI::App app("weft: programs of many ranks", "weft");
  app.require_subcommand(1);
  weft::tools::Body chosen;
  weft::tools::add_run(app, program, chosen);
#ifdef WEFT_HAVE_TRAIN
  weft::tools::add_train(app, words, chosen);
  weft::tools::add_parity(app, chosen);
#endif
  weft::tools::add_doctor(app, chosen);
  weft::tools::add_check(app, chosen);
  weft::tools::add_bench(app, chosen);
  try {
    app.parse(std::vector<std::string>(std::make_reverse_iterator(dashes), words.rend()));  // last word first
    if (!program.empty() && !app.got_subcommand("run")) throw CLI::ExtrasError({"--"});
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kUsage;  // 0: --help
  }
  return chosen();
}

// What a sub-command printed may lie in a buffer still, and the disk may be full.
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
