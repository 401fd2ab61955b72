#include "domain.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "competitors.hpp"
#include "contest.hpp"
#include "results.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

const std::vector<std::string> kMaps = {"8x16x16", "32x64x128", "64x32x64", "16x256x256"},
                               kSequences = {"1024", "4096"};

// The fields of a case other than its time: the parts of a step, and their ratios.
std::string parts_of(const Contest& contest, const Contestant& ours, bool markdown) {
  std::vector<std::vector<std::string>> convolutions = {{"case", "step us", "local us", "exchange us",
                                                         "step / the larger"}},
                                        attentions = {{"case", "step us", "one rank us", "gain"}};
  for (std::size_t k = 0; k < contest.cases().size(); ++k) {
    const auto& row = ours.cell(k)->row;
    const auto number = [&](const char* key) { return digits(row.value(key, 0.0)); };
    if (row.contains("serial_us"))
      attentions.push_back({contest.cases()[k], number("median_us"), number("serial_us"), number("gain")});
    else
      convolutions.push_back({contest.cases()[k], number("median_us"), number("local_us"),
                              number("exchange_us"), number("over")});
  }
  std::string text;
  for (const auto& table : {convolutions, attentions})
    if (table.size() > 1) text += draw_table(table, markdown) + "\n";
  return text;
}

}  // namespace

void bench_domain(const Options& o) {
  expect_known("--passes", o.passes, {"forward", "both"});
  expect_known("--dtype", o.dtypes, {"f32"});
  if (!o.against.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("bench: --against \"{}\"; expected none: domain is ours alone",
                            fmt::join(o.against, ",")));
  const bool all = o.maps.empty() && o.sequences.empty();
  const std::vector<std::string>&maps = all ? kMaps : o.maps, &sequences = all ? kSequences : o.sequences;
  std::vector<std::string> cases;
  const auto add = [&](const char* layer, const std::vector<std::string>& sizes) {
    for (const std::string& size : sizes)
      for (const std::string& pass : o.passes) cases.push_back(fmt::format("{}/{}/{}", layer, size, pass));
  };
  add("conv", maps);
  add("attention", sequences);
  const WorkFolder folder;
  Contest contest(o, "domain", cases);
  Job::Start start;
  start.ranks = o.ranks;
  start.command = {program(o, "domain_bench"),
                   "--maps",
                   fmt::format("{}", fmt::join(maps, ",")),
                   "--sequences",
                   fmt::format("{}", fmt::join(sequences, ",")),
                   "--passes",
                   fmt::format("{}", fmt::join(o.passes, ","))};
  const Contestant& ours =
      contest.enter(folder, fmt::format("weft, {} ranks", o.ranks), true, std::move(start));
  contest.run();
  fmt::print("domain: us, median of the better of {} rounds\n\n{}{}", o.rounds,
             parts_of(contest, ours, o.markdown), contest.notes());
  if (!o.json.empty()) write_file(o.json, contest.to_json().dump(1) + "\n");
}

}  // namespace weft::bench
