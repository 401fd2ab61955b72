// weft check schedule: proves that the pipeline schedule in a file runs to its end, and shows what it costs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>

#include "base/files/new_file.hpp"
#include "commands.hpp"
#include "weft/base/error.hpp"
#include "weft/pp/schedule.hpp"

namespace weft::tools {
namespace {

struct ScheduleFlags {
  std::string file, make, plot;
  int ranks = 4, micro_batches = 8, stages_per_rank = 1;
};

int check_schedule(const ScheduleFlags& flags) {
  if (!flags.make.empty())
    write_pipeline_schedule(make_pipeline_schedule(pipeline_kind(flags.make), flags.ranks,
                                                   flags.micro_batches, flags.stages_per_rank),
                            flags.file);
  const PipelineSchedule s = read_pipeline_schedule(flags.file);
  const PipelineTimeline timeline = simulate_pipeline(s);
  std::size_t actions = 0;
  for (const auto& list : s.actions) actions += list.size();
  fmt::print("schedule \"{}\" runs to its end: {} ranks, {} stages, {} micro-batches, {} actions\n", s.name,
             s.ranks, s.stages(), s.micro_batches, actions);
  fmt::print("bubble {:.1f} % if F, I and W take equally long\n", timeline.bubble * 100);
  for (std::size_t r = 0; r < s.actions.size(); ++r)
    fmt::print("rank {}: keeps at most {} activations, {} messages\n", r, s.memory[r],
               std::ranges::count_if(s.actions[r], [](const PipelineAction& a) {
                 return a.kind >= PipelineAction::Kind::send_forward;
               }));
  if (!flags.plot.empty()) {
    write_new_file(flags.plot, timeline_svg(timeline, s.name), "check schedule: --plot: ");
    fmt::print("wrote {}\n", flags.plot);
  }
  return 0;
}

}  // namespace

void add_check_schedule(CLI::App& check, Body& chosen) {
  auto f = std::make_shared<ScheduleFlags>();
  CLI::App* c = check.add_subcommand(
      "schedule", "Prove that the pipeline schedule in FILE runs to its end, and show its bubble and memory");
  c->add_option("FILE", f->file, "The schedule: docs/pipeline_parallel.md")->required();
  c->add_option("--make", f->make,
                "First write the file: gpipe, 1f1b, interleaved, zero-bubble or forward, for these numbers");
  c->add_option("--ranks", f->ranks, "For --make")->capture_default_str();
  c->add_option("--micro-batches", f->micro_batches, "For --make")->capture_default_str();
  c->add_option("--stages-per-rank", f->stages_per_rank, "For --make")->capture_default_str();
  c->add_option("--plot", f->plot, "Write the simulated timeline to this file, as SVG");
  c->callback([f, &chosen] { chosen = [f] { return check_schedule(*f); }; });
}

}  // namespace weft::tools
