// weft run: a program, once per rank.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "backend_names.hpp"
#include "commands.hpp"
#include "elastic.hpp"
#include "launcher.hpp"
#include "number_flag.hpp"

namespace weft::tools {
namespace {

// Two pipes and a few connections each, under the usual limit of 1024 descriptors.
constexpr int kMostRanks = 256;

struct Flags {
  LaunchOptions options{.ranks = 0};
  std::string bind = "none", elastic;
  double timeout = 0;
};

// The words that start it: a program of Python by python3, as `python -m weft run` starts it by its own.
std::vector<std::string> with_interpreter(std::vector<std::string> program) {
  if (program[0].ends_with(".py")) program.insert(program.begin(), "python3");
  return program;
}

}  // namespace

void add_run(CLI::App& app, const std::vector<std::string>& program, Body& chosen) {
  auto flags = std::make_shared<Flags>();
  CLI::App* run = app.add_subcommand("run", "Run a program as several ranks of this host");
  run->footer(
      "Usage: weft run -n RANKS [OPTIONS] PROGRAM [ITS OWN WORDS]; -np means -n. The first word that is no "
      "option is the program; all that follows is its own: weft run -n 4 ./program "
      "--steps 10. A program whose name ends in .py is run by python3.");
  run->add_option("-n,--ranks", flags->options.ranks, "How many ranks; required without --elastic")
      ->check(CLI::Range(1, kMostRanks));
  run->add_option(
      "--elastic", flags->elastic,
      "MIN:MAX: when a rank fails, start all again on those that are left, at least MIN; programs "
      "go on from their checkpoints. -n: the ranks of the first start, by default MAX");
  run->add_option("--bind", flags->bind, "cores: each rank runs on its share of the cores only")
      ->check(CLI::IsMember({"none", "cores"}))
      ->capture_default_str();
  run->add_flag_callback(
      "--tag-output", [flags] { flags->options.tag_output = true; },
      "Put the rank before each line: \"[2] \" (the default)");
  run->add_flag_callback(
      "--no-tag-output", [flags] { flags->options.tag_output = false; }, "Leave the rank out");
  run->add_flag("--keep-going", flags->options.keep_going,
                "Leave the others alone when a rank fails: they may go on without it");
  run->add_option("--backend", flags->options.backend,
                  "What the ranks' \"auto\", which is the default, takes: shm, gloo or another transport by "
                  "name (sets WEFT_BACKEND)");
  run->add_option("--timeout", flags->timeout,
                  "End the job after that many seconds, say which ranks still ran, exit with 124")
      ->check(number_between(0.001, 1e9));
  run->callback([flags, &program, &chosen] {
    if (program.empty())
      throw CLI::ValidationError("weft run", "no program; expected: weft run -n 4 PROGRAM");
    flags->options.timeout =
        std::chrono::duration_cast<Duration>(std::chrono::duration<double>(flags->timeout));
    if (const std::string wrong = flags->options.backend.empty()
                                      ? std::string()
                                      : unknown_backend(flags->options.backend, backend_names());
        !wrong.empty())
      throw CLI::ValidationError("--backend", wrong);
    if (!flags->elastic.empty()) {
      if (flags->options.keep_going)
        throw CLI::ValidationError("--keep-going", "leaves the others alone; --elastic starts them again");
      flags->options.elastic = elastic_from_text("run: --elastic", flags->elastic);
      flags->options.ranks = first_ranks("run: --ranks", *flags->options.elastic, flags->options.ranks);
    } else if (flags->options.ranks == 0) {
      throw CLI::RequiredError("--ranks");
    }
    flags->options.bind_cores = flags->bind == "cores";
    chosen = [flags, &program] { return launch(flags->options, with_interpreter(program)); };
  });
}

}  // namespace weft::tools
