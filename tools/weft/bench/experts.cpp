#include "experts.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "competitors.hpp"
#include "contest.hpp"
#include "results.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

const std::vector<std::string> kDispatches = {"128x7168", "2048x1024"}, kLayers = {"512"};

// The peers of the same cases: torch, or an MPI's MPI_Alltoallv.
void enter_peer(Contest& contest, const WorkFolder& folder, const Options& o, const std::string& name,
                const std::vector<std::string>& flags) {
  Competitor c;
  if (name == "torch") {
    c.title = "torch Gloo";
    c.start.command = {o.python, o.programs + "/torch_experts.py"};
    c.start.environment["OMP_NUM_THREADS"] = "1";
  } else {
    c = mpi_launcher(o, name);
    if (!c.missing.empty())
      throw Error(ErrorCode::unsupported, fmt::format("bench: experts: {}: {}", c.title, c.missing));
    c.start.command.push_back(program(o, "mpi_experts_" + name));
  }
  c.start.ranks = o.ranks;
  c.start.command.insert(c.start.command.end(), flags.begin(), flags.end());
  contest.enter(folder, c.title, false, std::move(c.start));
}

std::string parts_of_experts(const Contest& contest, const Contestant& ours, bool markdown) {
  std::vector<std::vector<std::string>> dispatches = {{"case", "dispatch us", "bare us", "ratio",
                                                       "combine us", "ratio", "travel us"}},
                                        layers = {{"case", "step us", "dense us", "ratio"}};
  for (std::size_t k = 0; k < contest.cases().size(); ++k) {
    const auto& row = ours.cell(k)->row;
    const auto number = [&](const char* key) { return digits(row.value(key, 0.0)); };
    if (row.contains("bare_us"))
      dispatches.push_back({contest.cases()[k], number("median_us"), number("bare_us"), number("over"),
                            number("combine_us"), number("combine_over"), number("travel_us")});
    else
      layers.push_back({contest.cases()[k], number("median_us"), number("dense_us"), number("over")});
  }
  std::string text;
  for (const auto& table : {dispatches, layers})
    if (table.size() > 1) text += draw_table(table, markdown) + "\n";
  return text;
}

}  // namespace

void bench_experts(const Options& o) {
  if (!o.against.empty()) expect_known("--against", o.against, {"openmpi", "mpich", "intelmpi", "torch"});
  const bool all = o.dispatches.empty() && o.expert_layers.empty();
  const std::vector<std::string>&dispatches = all ? kDispatches : o.dispatches,
        &layers = all ? kLayers : o.expert_layers;
  std::vector<std::string> cases;
  for (const std::string& size : dispatches) cases.push_back("dispatch/" + size);
  for (const std::string& tokens : layers) cases.push_back("layer/" + tokens);
  const WorkFolder folder;
  Contest contest(o, "experts", cases);
  const std::vector<std::string> flags = {"--dispatch", fmt::format("{}", fmt::join(dispatches, ",")),
                                          "--layers", fmt::format("{}", fmt::join(layers, ","))};
  Job::Start start;
  start.ranks = o.ranks;
  start.command = {program(o, "experts_bench")};
  start.command.insert(start.command.end(), flags.begin(), flags.end());
  const Contestant& ours =
      contest.enter(folder, fmt::format("weft, {} ranks", o.ranks), true, std::move(start));
  for (const std::string& name : o.against) enter_peer(contest, folder, o, name, flags);
  contest.run();
  fmt::print("experts: us, median of the better of {} rounds\n\n{}{}{}", o.rounds,
             parts_of_experts(contest, ours, o.markdown),
             o.against.empty() ? "" : contest.times_table("case"), contest.notes());
  if (!o.json.empty()) write_file(o.json, contest.to_json().dump(1) + "\n");
}

}  // namespace weft::bench
