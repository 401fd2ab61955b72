// weft train: the worked example. A byte-level transformer on real text, over any mesh dp x tp.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "commands.hpp"
#include "launcher.hpp"
#include "progress_bar.hpp"
#include "train_flags.hpp"
#include "trainer.hpp"
#include "weft/base/env.hpp"

namespace weft::tools {
namespace {

struct Flags {
  TrainConfig config;
  int ranks = 0;  // > 0: this process starts them
  std::int64_t until = -1;
  std::string save, metrics, progress = "auto", backend = "shm";
  std::int64_t save_every = 0;
  bool resume = false;
};

// The mean loss over the last steps, as it is reported at the end.
constexpr std::size_t kMeanSteps = 20;

double tail_mean(const std::vector<double>& losses) {
  const std::size_t n = std::min(kMeanSteps, losses.size());
  double sum = 0;
  for (std::size_t i = losses.size() - n; i < losses.size(); ++i) sum += losses[i];
  return n == 0 ? 0 : sum / static_cast<double>(n);
}

int train(const Flags& flags) {
  Context context;
  Membership m = Membership::from_env(context);
  const TrainConfig& config = flags.config;
  config.check(m.size);  // before anybody is met: a wrong flag ends every rank at once
  ProcessGroup group = ProcessGroup::create(context, flags.backend, m);
  Trainer trainer(group, config);
  const bool speaks = group.rank() == 0;
  if (flags.resume) trainer.resume(flags.save);

  const std::int64_t first = trainer.next_step(),
                     until = flags.until < 0 ? config.steps : std::min(flags.until, config.steps);
  std::ofstream metrics;
  if (speaks && !flags.metrics.empty()) {
    metrics.open(flags.metrics, flags.resume ? std::ios::app : std::ios::trunc);
    if (!metrics) throw_errno(fmt::format("metrics \"{}\"", flags.metrics), errno);
  }
  if (speaks) {
    fmt::print("weft train: {} parameters, {} bytes of text a step, mesh {}, {} thread{} a rank, text {}{}\n",
               trainer.parameter_count(), trainer.tokens_per_step(), to_string(trainer.mesh().shape()),
               trainer.threads(), trainer.threads() == 1 ? "" : "s", config.text.string(),
               flags.resume ? fmt::format(", resumed at step {}", first) : "");
  }
  ProgressBar bar(speaks ? flags.progress : "none", first, until);
  std::vector<double> losses;
  const auto began = Clock::now();
  while (trainer.next_step() < until) {
    const StepResult r = trainer.step();
    losses.push_back(r.loss);
    const double passed = std::chrono::duration<double>(Clock::now() - began).count();
    const double rate =
        static_cast<double>(trainer.tokens_per_step() * static_cast<std::int64_t>(losses.size())) / passed;
    if (metrics.is_open()) {
      metrics << nlohmann::json{{"step", r.step}, {"loss", r.loss},       {"grad_norm", r.grad_norm},
                                {"lr", r.lr},     {"tokens_per_s", rate}, {"seconds", passed}}
                     .dump()
              << "\n"
              << std::flush;
      if (!metrics) throw_errno(fmt::format("metrics \"{}\"", flags.metrics), errno);
    }
    bar.show(r.step, r.loss, rate);
    const bool last = trainer.next_step() == until;
    if (!flags.save.empty() &&
        (last || (flags.save_every > 0 && trainer.next_step() % flags.save_every == 0)))
      trainer.save(flags.save);
  }
  bar.finish();
  if (speaks && !losses.empty()) {
    fmt::print("{}\n", loss_curve(losses));
    fmt::print("loss {:.4f} at step {}, mean of the last {} steps {:.4f} nats per byte, {:.1f} s\n",
               losses.front(), first, std::min(kMeanSteps, losses.size()), tail_mean(losses),
               std::chrono::duration<double>(Clock::now() - began).count());
    if (!flags.save.empty())
      fmt::print("checkpoint: {}\n", (std::filesystem::path(flags.save) / "latest").string());
  }
  group.barrier().wait();  // nobody leaves while another may still be asked for its memory
  return 0;
}

}  // namespace

void add_train(CLI::App& app, const std::vector<std::string>& words, Body& chosen) {
  auto flags = std::make_shared<Flags>();
  CLI::App* sub = app.add_subcommand("train", "Train a byte-level transformer on a text");
  sub->footer("Ranks come from weft run, from torchrun's or mpirun's variables, or from --ranks.");
  sub->set_config("--config", "", "Read flags from a TOML file");
  add_train_flags(*sub, flags->config);
  sub->add_option("--dp", flags->config.dp, "Data-parallel ranks; -1: what tp leaves")->capture_default_str();
  sub->add_option("--tp", flags->config.tp, "Tensor-parallel ranks")->capture_default_str();
  sub->add_option("--ranks", flags->ranks, "Start this many ranks on this host")->check(CLI::Range(1, 256));
  sub->add_option("--backend", flags->backend, "Transport: shm, gloo, mpi-openmpi, mpi-mpich or auto")
      ->capture_default_str();
  sub->add_option("--until", flags->until, "Stop after this step of the schedule");
  sub->add_option("--save", flags->save, "Folder for checkpoints: one at the end");
  sub->add_option("--save-every", flags->save_every, "… and one every so many steps")
      ->check(CLI::NonNegativeNumber);
  sub->add_flag("--resume", flags->resume, "Go on from the latest checkpoint of --save");
  sub->add_option("--metrics", flags->metrics, "File for metrics, a JSON object a line");
  sub->add_option("--progress", flags->progress, "bar, lines, none; auto: a bar on a terminal")
      ->check(CLI::IsMember({"auto", "bar", "lines", "none"}));
  sub->callback([flags, &words, &chosen] {
    if (flags->resume && flags->save.empty())
      throw CLI::ValidationError("--resume", "needs --save, the folder to go on from");
    chosen = [flags, &words] {
      if (flags->ranks == 0) return train(*flags);
      if (env::get("WEFT_RANK") || env::get("RANK"))
        throw Error(
            ErrorCode::bad_argument,
            "train: --ranks starts ranks, but this process is a rank already (WEFT_RANK or RANK is set)");
      flags->config.check(flags->ranks);  // once, rather than once per rank
      std::vector<std::string> command{std::filesystem::read_symlink("/proc/self/exe").string()};
      for (std::size_t i = 0; i < words.size(); ++i) {  // the same words, without --ranks
        if (words[i] == "--ranks") {
          ++i;
        } else if (!words[i].starts_with("--ranks=")) {
          command.push_back(words[i]);
        }
      }
      return launch({.ranks = flags->ranks, .tag_output = false}, command);
    };
  });
}

}  // namespace weft::tools
