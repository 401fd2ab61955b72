// weft train: the worked example. It trains a transformer on real text, byte by byte or by tokens, or a model
// of weather on maps, over any mesh.
#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "base/cpu/peak.hpp"
#include "base/files/new_file.hpp"
#include "base/files/regular_file.hpp"
#include "base/text/plain_streams.hpp"
#include "columns.hpp"
#include "commands.hpp"
#include "config_file.hpp"
#include "contents.hpp"
#include "elastic.hpp"
#include "elastic_mesh.hpp"
#include "launcher.hpp"
#include "number_flag.hpp"
#include "progress_bar.hpp"
#include "ranks_flag.hpp"
#include "run_log.hpp"
#include "save_folder.hpp"
#include "stop_request.hpp"
#include "train_flags.hpp"
#include "trainer.hpp"
#include "weft/models/training.hpp"
#include "weft/store/elastic.hpp"

namespace weft::tools {
namespace {

struct Flags {
  TrainConfig config;
  int ranks = 0;  // > 0: this process starts them
  std::int64_t until = -1;
  std::string elastic;  // MIN:MAX; empty: not elastic, unless weft run is
  std::string save, progress = "auto", backend = "auto";
  RunLog::Files log;
  std::int64_t save_every = 0;
  double save_minutes = 0;
  int keep = 0;
  std::string resume = "no";
  bool overwrite = false, async_save = true;
  std::int64_t eval_every = 0, eval_batches = 0, patience = 0;
  double least_gain = 0;
  std::int64_t hash_every = 0;
  std::string hash_file, values_of, values_file;
  std::function<std::string()> effective;  // the whole configuration as a file
};

CheckpointPlan checkpoint_plan(const Flags& flags) {
  CheckpointPlan plan{.folder = flags.save, .every_steps = flags.save_every, .keep = flags.keep};
  plan.every = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(60 * flags.save_minutes));
  plan.background = flags.async_save;
  return plan;
}

// The number of last steps over which the mean loss is reported at the end.
constexpr std::size_t kMeanSteps = 20;

double tail_mean(const std::vector<double>& losses) {
  const std::size_t n = std::min(kMeanSteps, losses.size());
  double sum = 0;
  for (std::size_t i = losses.size() - n; i < losses.size(); ++i) sum += losses[i];
  return n == 0 ? 0 : sum / static_cast<double>(n);
}

// The request of this rank.
void say_memory(const weft::Trainer::Memory& m) {
  const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  fmt::print("memory of a rank in MiB: parameters {:.2f}, gradients {:.2f}, optimizer {:.2f}",
             mib(m.parameters), mib(m.gradients), mib(m.states));
  if (m.gathered > 0) fmt::print(";\n  gathered blocks at most {:.2f}", mib(m.gathered));
  fmt::print("\n");
}

// The load of the experts in the last step.
void say_balance(const std::vector<LayerBalance>& layers) {
  for (const LayerBalance& layer : layers) {
    const RouterReport& r = layer.report;
    const auto [least, most] = std::ranges::minmax(r.counts);
    const double all = static_cast<double>(r.assignments) / 100;
    fmt::print(
        "experts of {}: {:.1f} to {:.1f} % of the assignments, largest / mean {:.2f},\n"
        "  dropped {:.1f} %, balance loss {:.3f}\n",
        layer.path, static_cast<double>(least) / all, static_cast<double>(most) / all, r.imbalance(),
        100 * r.dropped_share(), r.aux_loss);
  }
}

KindWords words_of(const TrainConfig& config) { return kind_of(config).words(config); }

void say_how_it_went(const Flags& flags, const std::vector<double>& losses, std::int64_t first,
                     double passed) {
  fmt::print("{}\n", loss_curve(losses, output_columns()));
  const std::size_t mean_of = std::min(kMeanSteps, losses.size());
  fmt::print("loss {:.4f} at step {}, mean of the last {} steps {:.4f} {}, {:.1f} s\n", losses.front(), first,
             mean_of, tail_mean(losses), words_of(flags.config).loss, passed);
  if (!flags.save.empty())
    fmt::print("checkpoint: {}\n", (std::filesystem::path(flags.save) / "latest").string());
}

// Writes what --hash-every and --values-of ask for. Each rank has one, as the tensors are gathered; the first
// rank writes.
class Contents {
 public:
  Contents(const Flags& flags, bool writes) : flags_(flags), writes_(writes) {
    if (writes && !flags.hash_file.empty()) {
      file_.emplace(flags.hash_file, "train: --hash-file: ");
      file_->publish();
    }
  }
  /// For Training::step(); empty: nothing is asked of this step.
  Training::See see(std::int64_t step, bool last) {
    const bool hashes = flags_.hash_every > 0 && (step + 1) % flags_.hash_every == 0;
    if (!hashes && (!last || flags_.values_of.empty())) return nullptr;
    return [this, step, hashes, last](std::string_view kind, const std::string& path, const Tensor& tensor) {
      if (hashes) say(content_line({step, std::string(kind), path}, tensor) + "\n");
      if (last && flags_.values_of == fmt::format("{} {}", kind, path)) {
        const std::string values = content_values(tensor);
        found_ = true;
        if (writes_) write_new_file(flags_.values_file, values, "train: --values-file: ");
      }
    };
  }

  /// Call it behind the last step: throws if that step did not have the tensor of --values-of.
  void finish(bool stepped) const {
    if (stepped && !flags_.values_of.empty() && !found_)
      bad_training(fmt::format(
          "--values-of is \"{}\"; expected activation, gradient, parameter or state, a blank, and "
          "a path that the last step has, as in \"gradient norm.weight\"",
          flags_.values_of));
  }

 private:
  void say(const std::string& line) {
    if (!writes_) return;
    if (file_)
      file_->write(line);
    else
      fmt::print("{}", line);
  }
  const Flags& flags_;
  const bool writes_;
  bool found_ = false;
  std::optional<NewFile> file_;
};

// Memory of this process that is resident, in MiB.
double resident_mib() {
  FileIn in("/proc/self/statm");
  std::int64_t pages = 0, resident = 0;
  in >> pages >> resident;
  return static_cast<double>(resident * ::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

// Floating-point operations that all cores of the run can do in a second; 0: not known. As if every rank ran
// on cores of its own that are as this one's.
double peak_flops(const Training& trainer, const TrainConfig& config, int ranks) {
  const double of_thread = peak_gflops(config.weights == "bf16" ? DType::bf16 : DType::f32) * 1e9;
  return of_thread * trainer.threads() * ranks;
}

std::string in_words(const weft::Trainer::Evaluation& e, const KindWords& words) {
  return fmt::format("held-out loss {:.4f} {}{}, over {} {}s", e.loss, words.loss,
                     words.perplexity ? fmt::format(", perplexity {:.3f}", e.perplexity) : "", e.tokens,
                     words.one);
}

// Beside the checkpoints lie the configuration, and the tokenizer, which `weft sample` needs.
void keep_beside(const std::filesystem::path& folder, const std::string& config, const Tokenizer* tokenizer) {
  write_new_file(folder / "config.toml", config, "train: --save: ");
  if (tokenizer != nullptr) write_new_file(folder / kTokenizerFile, tokenizer->json(), "train: --save: ");
}

// A run that a killed rank must not cost more than the steps since the last checkpoint.
void expect_elastic(const Flags& flags) {
  if (flags.save.empty() || (flags.save_every == 0 && flags.save_minutes == 0))
    bad_training(
        "--elastic needs --save, and --save-every or --save-minutes: each start goes on from the newest "
        "checkpoint");
  if (flags.overwrite)
    bad_training(
        "--elastic with --overwrite; each start goes on from the newest checkpoint in the folder of --save: "
        "expected another folder");
}

// Waits until the ranks of the mesh are done, or have failed. Returns the signal that ended the run; 0: none.
int stay_spare(ProcessGroup& all, const StopRequest& stop_request) {
  all.barrier({.deadline = Duration::max()}).wait();
  return stop_request.signal();
}

// Flags of a pipeline are for one. Not in TrainConfig::check(): weft parity gives all meshes the same flags.
void expect_pipeline_flags_are_read(const TrainConfig& c) {
  if (c.pp == 1 && c.pipeline != TrainConfig().pipeline)
    bad_training(fmt::format("pipeline is \"{}\" with pp 1; expected pp of 2 or more", c.pipeline));
  if (c.pp == 1 && c.stages_per_rank != 0)
    bad_training(fmt::format("stages-per-rank is {} with pp 1; expected pp of 2 or more", c.stages_per_rank));
}

// All that the ranks must have alike, of the form of identity_of().
std::string run_of_all_ranks(const Flags& f, const TrainConfig& c) {
  return fmt::format(
      "{} exact={} dp={} tp={} pp={} ep={} domain={} data={} replicate={} micro_batches={} weights={} "
      "activations={} float8={} until={} eval_every={} eval_batches={} patience={} save_every={}",
      identity_of(c), c.exact, c.dp, c.tp, c.pp, c.ep, c.domain, c.data, c.replicate, c.micro_batches,
      c.weights, c.activations, c.float8, f.until, f.eval_every, f.eval_batches, f.patience, f.save_every);
}

int train_on_a_rank(Flags flags) {
  Context context;
  Membership m = Membership::from_env(context);
  TrainConfig& config = flags.config;
  if (config.exact) m.order = Order::canonical;
  const bool elastic = restart_count().has_value();
  if (elastic) {
    expect_elastic(flags);
    if (flags.resume == "no") flags.resume = "auto";
  } else if (!flags.elastic.empty()) {
    bad_training("--elastic needs --ranks, or weft run --elastic");
  }
  const int used = elastic ? fit_mesh(config, m.size) : m.size;
  expect_pipeline_flags_are_read(config);
  config.check(used);  // before anybody is met: a wrong flag ends every rank at once
  SaveFolder found;
  if (!flags.save.empty()) found = look_at_save_folder(flags.save, config, flags.resume, flags.overwrite);
  const StopRequest stop_request;
  ProcessGroup all = ProcessGroup::create(context, flags.backend, m);
  if (all.rank() >= used) {
    const int signal = stay_spare(all, stop_request);
    return signal == 0 ? 0 : 128 + signal;
  }
  std::vector<int> of_mesh(static_cast<std::size_t>(used));
  std::iota(of_mesh.begin(), of_mesh.end(), 0);
  std::optional<ProcessGroup> part;  // of the ranks that are not spare
  if (used < all.size()) part = all.subgroup("mesh", of_mesh);
  ProcessGroup& group = part ? *part : all;
  expect_same_run(group, run_of_all_ranks(flags, config));
  Training trainer(group, config, found.resume);
  const bool speaks = group.rank() == 0;
  const CheckpointExtra resumed = found.resume ? trainer.resume(flags.save) : CheckpointExtra{};

  const std::int64_t first = trainer.next_step(),
                     until = flags.until < 0 ? config.steps : std::min(flags.until, config.steps);
  const KindWords words = words_of(config);
  if (speaks && !flags.save.empty()) keep_beside(flags.save, flags.effective(), trainer.tokenizer());
  std::optional<RunLog> log;
  if (speaks) log.emplace(flags.log, first, found.resume, words);
  const double peak = speaks ? peak_flops(trainer, config, used) : 0;
  if (speaks) {
    fmt::print("{}\n",
               folded(fmt::format("weft train: {} parameters, {} a step, mesh {}, {} "
                                  "thread{} a rank, {}{}",
                                  trainer.parameter_count(), words.a_step, to_string(trainer.mesh().shape()),
                                  trainer.threads(), trainer.threads() == 1 ? "" : "s", words.source,
                                  found.resume ? fmt::format(", resumed at step {}", first) : ""),
                      2));
    if (used < all.size()) fmt::print("{} of {} ranks are spare\n", all.size() - used, all.size());
    if (!found.note.empty()) fmt::print("{}\n", found.note);
    if (const std::string report = trainer.float8_report(); !report.empty()) fmt::print("{}\n", report);
    if (first >= until) fmt::print("nothing is left to do: step {} of {} is reached\n", first, until);
    std::fflush(stdout);
  }
  Contents contents(flags, speaks);
  ProgressBar bar(speaks ? flags.progress : "none", first, until, words);
  std::vector<double> losses;
  const auto began = Clock::now();
  TrainingPlan plan{.steps = until};
  plan.step = [&](std::int64_t number) { return trainer.step(contents.see(number, number + 1 == until)); };
  plan.stop = [&] { return stop_request.signal(); };
  plan.checkpoints = checkpoint_plan(flags);
  plan.checkpoints.extra = [&] { return trainer.extra(); };
  std::optional<weft::Trainer::Evaluation> evaluated;
  std::int64_t evaluated_at = -1;  // the number of steps taken
  plan.evaluate_every = flags.eval_every;
  plan.patience = flags.patience;
  plan.least_gain = flags.least_gain;
  plan.resumed = resumed;
  double evaluating = 0;  // seconds, which do not count for the speed
  plan.evaluate = [&] {
    const auto start = Clock::now();
    const weft::Trainer::Evaluation e = trainer.evaluate(flags.eval_batches);
    evaluating += std::chrono::duration<double>(Clock::now() - start).count();
    return e;
  };
  plan.on_evaluation = [&](const weft::Trainer::Evaluation& e) {
    evaluated = e;
    evaluated_at = trainer.next_step();
    bar.evaluated(e.loss);
    if (log) log->evaluated(e);
  };
  const bool holds_out = config.source.holds_out();
  plan.on_step = [&](const weft::Trainer::Result& r) {
    losses.push_back(r.loss);
    const double passed = std::chrono::duration<double>(Clock::now() - began).count();
    const double rate =
        static_cast<double>(trainer.units_per_step() * static_cast<std::int64_t>(losses.size())) /
        (passed - evaluating);
    StepValues v{.step = r.step,
                 .epoch = trainer.epoch(),
                 .loss = r.loss,
                 .grad_norm = r.grad_norm,
                 .lr = trainer.rate_at(r.step),
                 .units_per_s = rate,
                 .seconds = passed,
                 .memory_mib = resident_mib(),
                 .peak_share = peak > 0 ? rate * trainer.flops_per_unit() / peak : 0};
    for (const LayerBalance& layer : trainer.balance()) {
      v.imbalance.push_back(layer.report.imbalance());
      v.dropped.push_back(layer.report.dropped_share());
    }
    const bool last = r.step + 1 == until;
    if (log)
      log->step(v, holds_out && (last || (flags.eval_every > 0 && (r.step + 1) % flags.eval_every == 0)));
    bar.show({r.step, r.loss, v.lr, r.grad_norm, rate, v.memory_mib, v.peak_share});
  };
  const TrainingEnd end = train(trainer.trainer(), plan);
  const int stopped = end.reason;  // the signal
  const bool gave_up = end.why == TrainingEnded::patience;
  if (holds_out && stopped == 0 && evaluated_at != trainer.next_step()) plan.on_evaluation(plan.evaluate());
  if (log) log->finish();
  bar.finish();
  contents.finish(stopped == 0 && !gave_up && !losses.empty());
  if (speaks && stopped != 0)
    fmt::print(
        "stopped by SIG{} after step {} of {}{}\n", sigabbrev_np(stopped), trainer.next_step(), until,
        flags.save.empty() ? ": nothing is saved, for want of --save" : ": --resume goes on from here");
  if (speaks && gave_up)
    fmt::print("ended after step {} of {}: {} evaluation{} in a row without a lower loss than {:.4f}\n",
               trainer.next_step(), until, flags.patience, flags.patience == 1 ? "" : "s", *end.best_loss);
  if (speaks && !losses.empty()) say_memory(trainer.memory());
  if (speaks && !losses.empty()) say_balance(trainer.balance());
  if (speaks && !losses.empty())
    say_how_it_went(flags, losses, first, std::chrono::duration<double>(Clock::now() - began).count());
  if (speaks && evaluated) fmt::print("{}\n", in_words(*evaluated, words));
  all.barrier().wait();  // no rank leaves while another may still need its memory
  return stopped == 0 ? 0 : 128 + stopped;
}

int start_ranks(const Flags& flags, const std::vector<std::string>& words) {
  expect_no_rank("train");
  expect_pipeline_flags_are_read(flags.config);
  LaunchOptions options{.ranks = flags.ranks, .tag_output = false};
  TrainConfig config = flags.config;
  std::string resume = flags.resume;
  if (!flags.elastic.empty()) {
    expect_elastic(flags);
    options.elastic = elastic_from_text("train: --elastic", flags.elastic);
    first_ranks("train: --ranks", *options.elastic, flags.ranks);
    TrainConfig smallest = config;
    fit_mesh(smallest, options.elastic->least);  // or a later start would find that no mesh fits
    fit_mesh(config, flags.ranks);
    if (resume == "no") resume = "auto";
  } else {
    config.check(flags.ranks);
  }
  // Checks the options here once, rather than once per rank.
  if (!flags.save.empty()) look_at_save_folder(flags.save, config, resume, flags.overwrite);
  return launch(options, command_of_a_rank(words, flags.ranks));
}

bool is_same_file(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::error_code failed;
  if (std::filesystem::equivalent(a, b, failed)) return true;
  const std::filesystem::path of_a = std::filesystem::weakly_canonical(a, failed);
  return !failed && of_a == std::filesystem::weakly_canonical(b, failed) && !failed;
}

// The files that the run writes; a file that it reads, or a second one of these, must be another file.
void expect_own_files(const Flags& flags, const std::string& config_file) {
  namespace fs = std::filesystem;
  const TrainConfig& c = flags.config;
  std::vector<std::pair<const char*, fs::path>> others{
      {"--config", config_file},
      {"--text", c.is_of_maps() ? fs::path() : c.source.text},
      {"--tokenizer", c.source.tokenizer},
      {"--held-out-file", c.source.held_out_file},
      {"--maps", c.maps.maps},
      {"--targets", c.maps.targets},
      {"--pipeline", c.pipeline}};
  for (const auto& [flag, path] : {std::pair<const char*, fs::path>{"--metrics", flags.log.metrics},
                                   {"--csv", flags.log.csv},
                                   {"--curves", flags.log.curves},
                                   {"--hash-file", flags.hash_file},
                                   {"--values-file", flags.values_file}}) {
    if (path.empty()) continue;
    for (const auto& [other, file] : others)
      if (!file.empty() && is_same_file(path, file))
        throw CLI::ValidationError(
            flag, fmt::format("is \"{}\", the file of {}; expected another file", path.string(), other));
    others.emplace_back(flag, path);
  }
}

void check_together(const Flags& flags, const std::string& config_file) {
  flags.log.check();
  expect_own_files(flags, config_file);
  if (flags.until < -1)
    throw CLI::ValidationError("--until", fmt::format("is {}; expected a step, or -1", flags.until));
  const bool resumes = flags.resume != "no";
  if (resumes && flags.save.empty())
    throw CLI::ValidationError("--resume", "needs --save, the folder to go on from");
  if (resumes && flags.overwrite)
    throw CLI::ValidationError("--overwrite", "replaces what --resume goes on from; expected one of them");
  if (flags.save_every > 0 && flags.save.empty())
    throw CLI::ValidationError("--save-every", "needs --save, the folder for checkpoints");
  if (flags.save_minutes > 0 && flags.save.empty())
    throw CLI::ValidationError("--save-minutes", "needs --save, the folder for checkpoints");
  for (const auto& [flag, value] :
       {std::pair{"--init-except", &flags.config.init_except}, {"--init-remap", &flags.config.init_remap}})
    if (!value->empty() && flags.config.init_from.empty())
      throw CLI::ValidationError(flag, "needs --init-from, the checkpoint of another run");
  if (flags.keep > 0 && flags.save.empty())
    throw CLI::ValidationError("--keep", "needs --save, the folder for checkpoints");
  for (const auto& [flag, value] :
       {std::pair{"--eval-every", flags.eval_every}, {"--eval-batches", flags.eval_batches}})
    if (value > 0 && !flags.config.source.holds_out())
      throw CLI::ValidationError(flag, "needs --held-out or --held-out-file, to evaluate on");
  if (flags.patience > 0 && flags.eval_every == 0)
    throw CLI::ValidationError("--patience", "needs --eval-every, which says when the run is evaluated");
  if (flags.least_gain > 0 && flags.patience == 0)
    throw CLI::ValidationError("--least-gain", "needs --patience, the evaluations that may gain less");
  if (!flags.hash_file.empty() && flags.hash_every == 0)
    throw CLI::ValidationError("--hash-file", "needs --hash-every, which says in which steps");
  if (flags.values_of.empty() != flags.values_file.empty())
    throw CLI::ValidationError("--values-of", "goes with --values-file");
}

}  // namespace

void add_train(CLI::App& app, const std::vector<std::string>& words, Body& chosen) {
  auto flags = std::make_shared<Flags>();
  CLI::App* sub = app.add_subcommand("train", "Train a transformer on a text, or a weather model on maps");
  sub->footer("Ranks come from weft run, from torchrun's or mpirun's variables, or from --ranks.");
  const auto file = std::make_shared<ConfigFile>(*sub, words);
  const auto option = [&](const char* name, auto& value, const char* help) {
    CLI::Option* added = sub->add_option(name, value, help)->capture_default_str();
    return file->take(added->multi_option_policy(CLI::MultiOptionPolicy::TakeLast), &value);
  };
  add_train_flags(*sub, flags->config, *file);
  option("--dp", flags->config.dp, "Data-parallel ranks; -1: what the other axes leave");
  option("--tp", flags->config.tp, "Tensor-parallel ranks");
  option("--domain", flags->config.domain,
         "Ranks that share each map, cut along its rows, with --model weather (docs/domain_parallel.md)");
  option("--ep", flags->config.ep, "Ranks that share the experts, each with sequences of its own");
  option("--pp", flags->config.pp, "Ranks of a pipeline, each with its own stages of the model");
  option("--pipeline", flags->config.pipeline,
         "Its schedule: gpipe, 1f1b, interleaved or zero-bubble, or a file with one "
         "(docs/pipeline_parallel.md)");
  option("--stages-per-rank", flags->config.stages_per_rank, "With interleaved; 0: 2");
  option("--micro-batches", flags->config.micro_batches,
         "Into so many each data rank cuts its sequences of a step");
  option("--data", flags->config.data,
         "What data ranks do with the parameters: ddp, each has all; fsdp, divided; hsdp, divided in "
         "--replicate copies")
      ->check(CLI::IsMember({"ddp", "fsdp", "hsdp"}));
  option("--replicate", flags->config.replicate,
         "Copies of the divided parameters with --data hsdp, and divides --dp; 0: 2");
  option("--ranks", flags->ranks, "Start this many ranks on this host; 0: this process is one")
      ->check(CLI::Range(0, 256));
  option("--elastic", flags->elastic,
         "MIN:MAX, with --ranks: when a rank fails, start again on the ranks that are left, on the mesh that "
         "fits, from the newest checkpoint (docs/elastic.md)");
  option("--backend", flags->backend, "Transport: shm, gloo, mpi-openmpi, mpi-mpich or auto");
  option("--until", flags->until, "Stop after this step of the schedule; -1: after the last");
  option("--save", flags->save,
         "Folder for checkpoints: one at the end, or where SIGINT or SIGTERM ends the run");
  option("--save-every", flags->save_every, "... and one every so many steps")->check(number_at_least(0));
  option("--save-minutes", flags->save_minutes, "... and one if so many minutes have passed since the last")
      ->check(number_between(0, 1e6));
  option("--keep", flags->keep, "... of which this many are kept; 0: all")->check(CLI::Range(0, 1000000));
  file->take(sub->add_flag("--async-save,!--no-async-save", flags->async_save,
                           "... written in the background while the training goes on, the default"),
             &flags->async_save);
  file->take(
      sub->add_flag("--resume{latest}", flags->resume,
                    "Go on from the newest whole checkpoint of --save; --resume=auto: where there is one")
          ->check(CLI::IsMember({"no", "auto", "latest"})),
      &flags->resume);
  file->take(
      sub->add_flag("--overwrite", flags->overwrite, "Replace the checkpoint of another run in --save"),
      &flags->overwrite);
  option("--init-from", flags->config.init_from,
         "Begin with the parameters of this checkpoint of another run, and a new optimizer");
  option("--init-except", flags->config.init_except,
         "... but not with these: paths or patterns, by commas; --freeze says what is trained");
  option("--init-remap", flags->config.init_remap,
         "... and what it has under the path OLD is that of NEW: OLD=NEW, by commas");
  option("--metrics", flags->log.metrics, "File for metrics, a JSON object a line");
  option("--csv", flags->log.csv, "File for metrics, a table with commas");
  option("--tensorboard", flags->log.tensorboard, "Folder for events of TensorBoard");
  option("--curves", flags->log.curves,
         "File for curves of the losses, drawn at the end: NAME.svg or NAME.png");
  option("--eval-every", flags->eval_every,
         "Evaluate on the held-out part every so many steps; 0: only after the last step")
      ->check(number_at_least(0));
  option("--eval-batches", flags->eval_batches, "... on as many of its batches, from its first on; 0: on all")
      ->check(number_at_least(0));
  option("--patience", flags->patience,
         "... and end after as many evaluations in a row without a lower loss; 0: never")
      ->check(number_at_least(0));
  option("--least-gain", flags->least_gain, "... lower by at least this much")->check(number_between(0, 1e6));
  option("--hash-every", flags->hash_every,
         "Every so many steps, a line for each output of a module, gradient, parameter and tensor of the "
         "optimizer's state, with a hash of all its elements: the same on any mesh that gives the same bits; "
         "0: none")
      ->check(number_at_least(0));
  option("--hash-file", flags->hash_file, "... into this file; empty: with the rest of the output");
  option("--values-of", flags->values_of,
         "At the last step, all elements of one tensor, such as \"gradient norm.weight\"");
  option("--values-file", flags->values_file, "... into this file, as JSON");
  option("--progress", flags->progress,
         "bar (lines where output goes to no terminal), lines, none; auto: bar")
      ->check(CLI::IsMember({"auto", "bar", "lines", "none"}));
  arrange_tables(*file);
  sub->callback([flags, file, &words, &chosen] {
    flags->config.fill_in();
    // Also where a later start of an elastic job has other ranks.
    flags->effective = [of = flags.get(), &text_of = *file, &words] {
      const int given = of->ranks;
      if (const int started = started_ranks(words)) of->ranks = started;
      std::string text = text_of.text();
      of->ranks = given;
      return text;
    };
    if (file->print_asked()) {
      chosen = [file] {
        fmt::print("{}", file->text());
        return 0;
      };
      return;
    }
    check_together(*flags, file->path());
    chosen = [flags, &words] {
      return flags->ranks == 0 ? train_on_a_rank(*flags) : start_ranks(*flags, words);
    };
  });
}

}  // namespace weft::tools
