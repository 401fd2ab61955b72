// Random schedules that run to their end: ranks perform passes that are ready, in a random order.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "weft/pp/schedule.hpp"

namespace weft::test {

struct RandomScheduleRange {
  int ranks = 4, stages_per_rank = 3, micro_batches = 8;  ///< the largest
};

/// Stages lie on any ranks, each rank has one at least; each stage splits its backward passes, or does not.
inline PipelineSchedule random_schedule(std::mt19937& random, int ranks, int stages, int micro_batches) {
  using Kind = PipelineAction::Kind;
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  PipelineSchedule s;
  s.name = "random";
  s.ranks = ranks;
  s.micro_batches = micro_batches;
  s.actions.resize(static_cast<std::size_t>(ranks));
  for (int stage = 0; stage < stages; ++stage)
    s.rank_of_stage.push_back(stage < ranks ? stage : below(ranks));
  std::shuffle(s.rank_of_stage.begin(), s.rank_of_stage.end(), random);
  const auto n = static_cast<std::size_t>(stages);
  // The passes that each stage has done. Forward passes come in any order, halves of backward passes by
  // rising number.
  std::vector<std::vector<bool>> forward(n, std::vector<bool>(static_cast<std::size_t>(micro_batches)));
  std::vector<int> inputs(n), weights(n);
  std::vector<bool> splits(n);
  for (std::size_t i = 0; i < n; ++i) splits[i] = below(2) == 0;
  const int favourite = below(3);  // which pass a rank likes to do first
  while (true) {
    std::vector<PipelineAction> ready;
    for (int stage = 0; stage < stages; ++stage) {
      const auto i = static_cast<std::size_t>(stage);
      for (int m = 0; m < micro_batches; ++m) {
        const auto at = static_cast<std::size_t>(m);
        if (!forward[i][at] && (stage == 0 || forward[i - 1][at])) ready.push_back({Kind::forward, stage, m});
        if (m == inputs[i] && forward[i][at] && (stage + 1 == stages || inputs[i + 1] > m) &&
            (splits[i] || weights[i] == m))
          ready.push_back({splits[i] ? Kind::input : Kind::backward, stage, m});
        if (splits[i] && m == weights[i] && inputs[i] > m) ready.push_back({Kind::weight, stage, m});
      }
    }
    if (ready.empty()) return s;
    PipelineAction a = ready[static_cast<std::size_t>(below(static_cast<int>(ready.size())))];
    for (const PipelineAction& other : ready)
      if (favourite == 1 && other.kind != Kind::forward && below(2) == 0) a = other;
    const auto i = static_cast<std::size_t>(a.stage);
    if (a.kind == Kind::forward) forward[i][static_cast<std::size_t>(a.micro_batch)] = true;
    if (a.kind == Kind::input || a.kind == Kind::backward) ++inputs[i];
    if (a.kind == Kind::weight || a.kind == Kind::backward) ++weights[i];
    s.actions[static_cast<std::size_t>(s.rank_of_stage[i])].push_back(a);
  }
}

inline PipelineSchedule random_schedule(std::mt19937& random, const RandomScheduleRange& range = {}) {
  const auto from_one = [&](int n) { return 1 + static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int ranks = from_one(range.ranks);
  const int stages = ranks + from_one(ranks * (range.stages_per_rank - 1) + 1) - 1;
  return with_messages(random_schedule(random, ranks, stages, from_one(range.micro_batches)));
}

}  // namespace weft::test
