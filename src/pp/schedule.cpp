// Makes schedules: a simulation in which each rank takes the next action by the rule of its kind, when that
// action is ready. A schedule that was made so cannot be blocked.
#include "weft/pp/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <optional>

#include "pp/schedule_table.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using pp::Kind;

constexpr std::array kPipelineKinds{PipelineKind::gpipe, PipelineKind::one_f_one_b, PipelineKind::interleaved,
                                    PipelineKind::zero_bubble, PipelineKind::forward_only};

// The passes that one rank has still to do.
struct RankPlan {
  std::deque<PipelineAction> forwards, backwards, weights;  // each in the order in which it must be done
  int in_flight = 0, cap = 0;  // forward passes whose backward pass (B or I) has not begun; the most of them
  int free_at = 0;
};

class ScheduleMaker {
 public:
  ScheduleMaker(PipelineKind kind, int ranks, int micro_batches, int per_rank)
      : kind_(kind), ranks_(ranks), micro_batches_(micro_batches), per_rank_(per_rank) {}

  PipelineSchedule make() {
    if (std::optional<PipelineSchedule> made = attempt(0, true)) return *std::move(made);
    // An interleaved schedule whose last group of micro-batches is not full: ranks do what is ready, with as
    // many passes in flight as that needs.
    for (int extra = 0;; ++extra)
      if (std::optional<PipelineSchedule> made = attempt(extra, false)) return *std::move(made);
  }

 private:
  int stages() const { return ranks_ * per_rank_; }
  bool splits() const { return kind_ == PipelineKind::zero_bubble; }
  int cap(int rank) const {
    switch (kind_) {
      case PipelineKind::one_f_one_b:
      case PipelineKind::zero_bubble: return ranks_ - rank;
      case PipelineKind::interleaved: return (per_rank_ - 1) * ranks_ + 2 * (ranks_ - rank - 1) + 1;
      default: return std::numeric_limits<int>::max() / 2;
    }
  }
  std::size_t number(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * static_cast<std::size_t>(micro_batches_) +
           static_cast<std::size_t>(micro_batch);
  }

  // The passes of a rank: groups of as many micro-batches as there are ranks, within a group stage by stage.
  RankPlan plan(int rank, int extra) const {
    RankPlan p;
    p.cap = cap(rank) + extra;
    for (int first = 0; first < micro_batches_; first += ranks_) {
      const int end = std::min(first + ranks_, micro_batches_);
      for (int chunk = 0; chunk < per_rank_; ++chunk)
        for (int m = first; m < end; ++m) {
          p.forwards.push_back({Kind::forward, chunk * ranks_ + rank, m});
          if (kind_ != PipelineKind::forward_only)
            p.backwards.push_back(
                {splits() ? Kind::input : Kind::backward, (per_rank_ - 1 - chunk) * ranks_ + rank, m});
        }
    }
    return p;
  }

  // When a pass has ended, by stage and micro-batch.
  using Ends = std::vector<int>;
  static constexpr int kNever = std::numeric_limits<int>::max();
  bool forward_ready(const PipelineAction& a, int now) const {
    return a.stage == 0 || forward_end_[number(a.stage - 1, a.micro_batch)] <= now;
  }
  bool backward_ready(const PipelineAction& a, int now) const {
    return forward_end_[number(a.stage, a.micro_batch)] <= now &&
           (a.stage + 1 == stages() || backward_end_[number(a.stage + 1, a.micro_batch)] <= now);
  }

  // The action that the rank begins now; none if it waits. Passes in flight are filled up to the cap first;
  // a strict rank waits for a forward pass rather than do a backward pass before its turn. Rank r has the
  // weight halves of r micro-batches in stock, with which it fills the gap at the end.
  std::optional<PipelineAction> next(int rank, RankPlan& p, int now, bool strict) {
    std::deque<PipelineAction>* from = nullptr;
    const bool wants_forward = !p.forwards.empty() && p.in_flight < p.cap;
    const bool forward = wants_forward && forward_ready(p.forwards.front(), now);
    const bool backward = !p.backwards.empty() && backward_ready(p.backwards.front(), now);
    if (p.weights.size() > static_cast<std::size_t>(rank))
      from = &p.weights;
    else if (strict && wants_forward)
      from = forward ? &p.forwards : nullptr;
    else if (backward)
      from = &p.backwards;
    else if (forward)
      from = &p.forwards;
    else if (p.forwards.empty() && !p.weights.empty())
      from = &p.weights;
    if (from == nullptr) return std::nullopt;
    const PipelineAction a = from->front();
    from->pop_front();
    const int end = now + (a.kind == Kind::backward ? 2 : 1);
    p.free_at = end;
    if (a.kind == Kind::forward) {
      forward_end_[number(a.stage, a.micro_batch)] = end;
      ++p.in_flight;
    } else if (a.kind != Kind::weight) {
      backward_end_[number(a.stage, a.micro_batch)] = end;
      --p.in_flight;
      if (splits()) p.weights.push_back({Kind::weight, a.stage, a.micro_batch});
    }
    return a;
  }

  std::optional<PipelineSchedule> attempt(int extra, bool strict) {
    PipelineSchedule s;
    s.name = name(kind_);
    s.ranks = ranks_;
    s.micro_batches = micro_batches_;
    s.actions.resize(static_cast<std::size_t>(ranks_));
    for (int stage = 0; stage < stages(); ++stage) s.rank_of_stage.push_back(stage % ranks_);
    std::vector<RankPlan> plans;
    for (int r = 0; r < ranks_; ++r) plans.push_back(plan(r, extra));
    const auto passes = static_cast<std::size_t>(stages()) * static_cast<std::size_t>(micro_batches_);
    forward_end_.assign(passes, kNever);
    backward_end_.assign(passes, kNever);
    std::size_t left = passes * (kind_ == PipelineKind::forward_only ? 1 : splits() ? 3 : 2);
    for (int now = 0; left > 0; ++now) {
      bool moves = false;
      for (std::size_t r = 0; r < plans.size(); ++r) {
        if (plans[r].free_at <= now)
          if (const std::optional<PipelineAction> a = next(static_cast<int>(r), plans[r], now, strict)) {
            s.actions[r].push_back(*a);
            --left;
          }
        moves = moves || plans[r].free_at > now;
      }
      if (!moves && left > 0) return std::nullopt;
    }
    return with_messages(std::move(s));
  }

  const PipelineKind kind_;
  const int ranks_, micro_batches_, per_rank_;
  Ends forward_end_, backward_end_;
};

}  // namespace

std::string_view name(PipelineKind kind) noexcept {
  switch (kind) {
    case PipelineKind::gpipe: return "gpipe";
    case PipelineKind::one_f_one_b: return "1f1b";
    case PipelineKind::interleaved: return "interleaved";
    case PipelineKind::zero_bubble: return "zero-bubble";
    case PipelineKind::forward_only: return "forward";
  }
  return "";
}

PipelineKind pipeline_kind(std::string_view asked) {
  std::string names;
  for (const PipelineKind kind : kPipelineKinds) {
    if (asked == name(kind)) return kind;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", name(kind));
  }
  throw Error(ErrorCode::bad_argument,
              fmt::format("pipeline: the schedule is \"{}\"; expected one of {}", asked, names));
}

bool PipelineSchedule::trains() const noexcept {
  return std::ranges::any_of(actions, [](const std::vector<PipelineAction>& list) {
    return std::ranges::any_of(list, [](const PipelineAction& a) {
      return a.kind == Kind::backward || a.kind == Kind::input || a.kind == Kind::weight;
    });
  });
}

PipelineSchedule make_pipeline_schedule(PipelineKind kind, int ranks, int micro_batches,
                                        int stages_per_rank) {
  PipelineSchedule empty;  // for its numbers
  empty.name = name(kind);
  empty.ranks = ranks;
  empty.micro_batches = micro_batches;
  if (ranks > 0 && stages_per_rank > 0 && ranks <= 4096 && stages_per_rank <= 4096) {
    for (int stage = 0; stage < ranks * stages_per_rank; ++stage)
      empty.rank_of_stage.push_back(stage % ranks);
    empty.actions.resize(static_cast<std::size_t>(ranks));
  }
  const bool several = kind == PipelineKind::interleaved, any = kind == PipelineKind::forward_only;
  if (stages_per_rank < 1 || (several && stages_per_rank < 2) || (!several && !any && stages_per_rank != 1))
    pp::bad_pipeline_schedule(empty, fmt::format("{} stages a rank; expected {}", stages_per_rank,
                                                 several ? "2 or more"
                                                 : any   ? "1 or more"
                                                         : "1"));
  pp::check_pipeline_numbers(empty);
  return ScheduleMaker(kind, ranks, micro_batches, stages_per_rank).make();
}

// For the messages from one rank to another, in the order of their sends: the computation of the receiver in
// front of which each receive is posted. It is the one before the pass that needs the message, or an earlier
// one that a later message needs: receives have the order of the sends.
PipelineSchedule with_messages(PipelineSchedule s) {
  pp::check_pipeline_numbers(s);
  const pp::ScheduleTable table(s);
  using Posts = std::vector<std::vector<PipelineAction>>;  // by computation of the receiver
  std::vector<Posts> posts(s.actions.size());
  std::vector<std::vector<PipelineAction>> computations(s.actions.size());
  for (std::size_t r = 0; r < s.actions.size(); ++r) {
    posts[r].resize(s.actions[r].size() + 1);
    for (const PipelineAction& a : s.actions[r])
      if (pp::computes(a.kind)) computations[r].push_back(a);
    if (computations[r].size() != s.actions[r].size())
      pp::bad_pipeline_schedule(s, "it has messages already; expected computations alone");
  }
  // The message that a pass sends; none at the ends, and between stages of one rank.
  const auto message = [&](const PipelineAction& a) -> std::optional<PipelineAction> {
    const bool forward = a.kind == Kind::forward;
    if (a.kind == Kind::weight) return std::nullopt;
    const int to = forward ? a.stage + 1 : a.stage - 1;
    if (to < 0 || to >= s.stages()) return std::nullopt;
    const auto rank = [&](int stage) { return s.rank_of_stage[static_cast<std::size_t>(stage)]; };
    if (rank(to) == rank(a.stage)) return std::nullopt;
    return PipelineAction{forward ? Kind::send_forward : Kind::send_backward, a.stage, a.micro_batch};
  };
  for (const std::vector<PipelineAction>& list : computations) {
    std::vector<int> latest(s.actions.size(), std::numeric_limits<int>::max());  // by receiver
    for (auto a = list.rbegin(); a != list.rend(); ++a) {
      const std::optional<PipelineAction> send = message(*a);
      if (!send) continue;
      const PipelineAction receive = pp::other_end(*send);
      const pp::Place needs = receive.kind == Kind::recv_forward
                                  ? table.of(Kind::forward, receive.stage, receive.micro_batch)
                                  : table.gradient(receive.stage, receive.micro_batch);
      if (!needs) continue;  // check_pipeline_schedule() names what is missing
      const auto to = static_cast<std::size_t>(needs.rank);
      latest[to] = std::min(latest[to], std::max(needs.index - 1, 0));
      std::vector<PipelineAction>& at = posts[to][static_cast<std::size_t>(latest[to])];
      at.insert(at.begin(), receive);
    }
  }
  for (std::size_t r = 0; r < s.actions.size(); ++r) {
    s.actions[r].clear();
    for (std::size_t i = 0; i < computations[r].size(); ++i) {
      for (const PipelineAction& receive : posts[r][i]) s.actions[r].push_back(receive);
      s.actions[r].push_back(computations[r][i]);
      if (const std::optional<PipelineAction> send = message(computations[r][i]))
        s.actions[r].push_back(*send);
    }
  }
  if (s.memory.empty())
    for (int r = 0; r < s.ranks; ++r) s.memory.push_back(pp::peak_of(s, r).count);
  return s;
}

}  // namespace weft
