// Proves that a schedule runs to its end: see check_pipeline_schedule().
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "pp/schedule_table.hpp"
#include "weft/base/error.hpp"
#include "weft/pp/schedule.hpp"

namespace weft::pp {

void bad_pipeline_schedule(const PipelineSchedule& s, const std::string& text) {
  throw Error(ErrorCode::bad_argument, fmt::format("schedule \"{}\": {}", s.name, text));
}

void check_pipeline_numbers(const PipelineSchedule& s) {
  constexpr int kMostStages = 4096, kMostMicroBatches = 1 << 16, kMostPasses = 1 << 22;
  if (std::ranges::any_of(s.name, [](unsigned char c) { return c <= ' ' || c == '#' || c == 0x7F; }))
    bad_pipeline_schedule(s,
                          "the name is not one word, and no file could hold it; expected no blanks, no "
                          "'#' and no control characters");
  const auto expect = [&](const char* what, std::int64_t is, std::int64_t most) {
    if (is < 1 || is > most) bad_pipeline_schedule(s, fmt::format("{} {}; expected 1 to {}", is, what, most));
  };
  expect("ranks", s.ranks, kMostStages);
  expect("micro-batches", s.micro_batches, kMostMicroBatches);
  expect("stages", static_cast<std::int64_t>(s.rank_of_stage.size()), kMostStages);
  expect("stages x micro-batches", std::int64_t{s.stages()} * s.micro_batches, kMostPasses);
  for (int stage = 0; stage < s.stages(); ++stage) {
    const int rank = s.rank_of_stage[static_cast<std::size_t>(stage)];
    if (rank < 0 || rank >= s.ranks)
      bad_pipeline_schedule(
          s, fmt::format("stage {} is on rank {}; expected 0 to {}", stage, rank, s.ranks - 1));
  }
  if (s.actions.size() != static_cast<std::size_t>(s.ranks))
    bad_pipeline_schedule(
        s, fmt::format("there are lists of actions of {} ranks; expected {}", s.actions.size(), s.ranks));
  if (!s.memory.empty() && s.memory.size() != s.actions.size())
    bad_pipeline_schedule(
        s, fmt::format("memory has {} numbers; expected one for each of {} ranks", s.memory.size(), s.ranks));
  for (int rank = 0; rank < s.ranks; ++rank) {
    const std::vector<PipelineAction>& list = s.actions[static_cast<std::size_t>(rank)];
    for (int i = 0; i < static_cast<int>(list.size()); ++i) {
      const PipelineAction& a = list[static_cast<std::size_t>(i)];
      const auto wrong = [&](const std::string& why) {
        bad_pipeline_schedule(s, fmt::format("{}: {}", text_of(s, {rank, i}), why));
      };
      if (a.stage < 0 || a.stage >= s.stages()) wrong(fmt::format("there are {} stages", s.stages()));
      if (a.micro_batch < 0 || a.micro_batch >= s.micro_batches)
        wrong(fmt::format("there are {} micro-batches", s.micro_batches));
      if (s.rank_of_stage[static_cast<std::size_t>(a.stage)] != rank)
        wrong(fmt::format("stage {} is on rank {}", a.stage,
                          s.rank_of_stage[static_cast<std::size_t>(a.stage)]));
    }
  }
}

std::string text_of(const PipelineSchedule& s, Place place) {
  return fmt::format(
      "rank {}, action {} ({})", place.rank, place.index + 1,
      to_string(s.actions[static_cast<std::size_t>(place.rank)][static_cast<std::size_t>(place.index)]));
}

ScheduleTable::ScheduleTable(const PipelineSchedule& s)
    : micro_batches_(static_cast<std::size_t>(s.micro_batches)) {
  for (std::vector<Place>& places : places_)
    places.resize(micro_batches_ * static_cast<std::size_t>(s.stages()));
  for (int rank = 0; rank < s.ranks; ++rank) {
    const std::vector<PipelineAction>& list = s.actions[static_cast<std::size_t>(rank)];
    for (int i = 0; i < static_cast<int>(list.size()); ++i) {
      const PipelineAction& a = list[static_cast<std::size_t>(i)];
      Place& place = places_[static_cast<std::size_t>(a.kind)][number(a.stage, a.micro_batch)];
      if (!place)
        place = {rank, i};
      else if (!again_)
        again_ = {rank, i};
    }
  }
}

Peak peak_of(const PipelineSchedule& s, int rank) {
  if (!s.trains()) return {};
  Peak peak;
  int kept = 0;
  const std::vector<PipelineAction>& list = s.actions[static_cast<std::size_t>(rank)];
  for (int i = 0; i < static_cast<int>(list.size()); ++i) {
    const Kind kind = list[static_cast<std::size_t>(i)].kind;
    if (kind == Kind::forward && ++kept > peak.count) peak = {kept, {rank, i}};
    if (kind == Kind::backward || kind == Kind::weight) --kept;
  }
  return peak;
}

namespace {

class ScheduleCheck {
 public:
  explicit ScheduleCheck(const PipelineSchedule& s) : s_(s), table_(s), trains_(s.trains()) {}

  void run() const {
    if (table_.again())
      wrong(fmt::format("{} is there twice: the first is {}", at(table_.again()),
                        at(table_.of(action(table_.again())))));
    for (int stage = 0; stage < s_.stages(); ++stage)
      for (int m = 0; m < s_.micro_batches; ++m) {
        expect_passes(stage, m);
        expect_message(Kind::send_forward, stage, m, stage + 1 < s_.stages() && apart(stage, stage + 1));
        expect_message(Kind::recv_forward, stage, m, stage > 0 && apart(stage - 1, stage));
        expect_message(Kind::send_backward, stage, m, trains_ && stage > 0 && apart(stage - 1, stage));
        expect_message(Kind::recv_backward, stage, m,
                       trains_ && stage + 1 < s_.stages() && apart(stage, stage + 1));
        expect_order_of_passes(stage, m);
      }
    for (int rank = 0; rank < s_.ranks; ++rank) {
      expect_rising(rank);
      expect_memory(rank);
    }
    expect_channels();
    walk(s_, table_);
  }

 private:
  [[noreturn]] void wrong(const std::string& text) const { bad_pipeline_schedule(s_, text); }
  std::string at(Place place) const { return text_of(s_, place); }
  const PipelineAction& action(Place place) const {
    return s_.actions[static_cast<std::size_t>(place.rank)][static_cast<std::size_t>(place.index)];
  }
  int rank_of(int stage) const { return s_.rank_of_stage[static_cast<std::size_t>(stage)]; }
  bool apart(int stage, int other) const { return rank_of(stage) != rank_of(other); }

  [[noreturn]] void missing(Kind kind, int stage, int m, const std::string& why) const {
    wrong(fmt::format("{} is missing on rank {}{}", to_string(PipelineAction{kind, stage, m}), rank_of(stage),
                      why));
  }
  // `later` must come after `earlier`, on one rank.
  void expect_before(Place earlier, Place later, const char* why) const {
    if (earlier.index > later.index)
      wrong(fmt::format("{} comes before {}; {}", at(later), at(earlier), why));
  }

  void expect_passes(int stage, int m) const {
    const auto place = [&](Kind kind) { return table_.of(kind, stage, m); };
    const Place forward = place(Kind::forward), whole = place(Kind::backward), input = place(Kind::input),
                weight = place(Kind::weight);
    if (!forward) missing(Kind::forward, stage, m, "");
    if (!trains_) return;
    if (whole && (input || weight))
      wrong(fmt::format("{} and {}: expected a whole backward pass, or two halves", at(whole),
                        at(input ? input : weight)));
    if (!whole && !input && !weight) missing(Kind::backward, stage, m, ", and so are its halves I and W");
    if (!whole && !input) missing(Kind::input, stage, m, fmt::format("; there is {}", at(weight)));
    if (!whole && !weight) missing(Kind::weight, stage, m, fmt::format("; there is {}", at(input)));
    expect_before(forward, table_.gradient(stage, m), "a backward pass needs its forward pass");
    if (input) expect_before(input, weight, "the weight half needs what the input half leaves");
  }

  // A message is there exactly where two neighbouring stages are on different ranks.
  void expect_message(Kind kind, int stage, int m, bool wanted) const {
    const Place place = table_.of(kind, stage, m);
    const PipelineAction own{kind, stage, m};
    if (place && !wanted)
      wrong(fmt::format("{}: there is no other rank to exchange this message with", at(place)));
    if (!wanted) return;
    const PipelineAction other = other_end(own);
    const Place end = table_.of(other);
    if (!place) missing(kind, stage, m, end ? fmt::format(", the other end of {}", at(end)) : std::string());
    const bool forward = kind == Kind::send_forward || kind == Kind::recv_forward;
    const Place pass = forward ? table_.of(Kind::forward, stage, m) : table_.gradient(stage, m);
    if (sends(kind))
      expect_before(pass, place, "a send follows the pass that makes its message");
    else
      expect_before(place, pass, "a receive is posted before the pass that needs its message");
  }

  // Stages of one rank hand their tensors over.
  void expect_order_of_passes(int stage, int m) const {
    if (stage == 0 || apart(stage - 1, stage)) return;
    expect_before(table_.of(Kind::forward, stage - 1, m), table_.of(Kind::forward, stage, m),
                  "it needs the outputs of the stage before");
    if (trains_)
      expect_before(table_.gradient(stage, m), table_.gradient(stage - 1, m),
                    "it needs the gradient of the next stage");
  }

  // Gradients are added by the number of the micro-batch.
  void expect_rising(int rank) const {
    for (const bool weights : {false, true}) {
      std::vector<Place> last(static_cast<std::size_t>(s_.stages()));
      const auto& list = s_.actions[static_cast<std::size_t>(rank)];
      for (int i = 0; i < static_cast<int>(list.size()); ++i) {
        const PipelineAction& a = list[static_cast<std::size_t>(i)];
        if (a.kind != Kind::backward && a.kind != (weights ? Kind::weight : Kind::input)) continue;
        Place& before = last[static_cast<std::size_t>(a.stage)];
        if (before && action(before).micro_batch > a.micro_batch)
          wrong(fmt::format("{} comes before {}; gradients of a stage are summed by rising micro-batch",
                            at(before), at({rank, i})));
        before = {rank, i};
      }
    }
  }

  void expect_memory(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    if (s_.memory.empty()) wrong(fmt::format("memory is missing; expected {} numbers", s_.ranks));
    const Peak peak = peak_of(s_, rank);
    if (peak.count > s_.memory[r])
      wrong(fmt::format("{} keeps activation number {}; memory allows rank {} to keep {}", at(peak.at),
                        peak.count, rank, s_.memory[r]));
    int posted = 0;
    for (int i = 0; i < static_cast<int>(s_.actions[r].size()); ++i) {
      const PipelineAction& a = s_.actions[r][static_cast<std::size_t>(i)];
      if (receives(a.kind) && ++posted > kPipelineReceivesPosted)
        wrong(fmt::format("{} is receive number {} that is posted and not used yet; expected at most {}",
                          at({rank, i}), posted, kPipelineReceivesPosted));
      if (a.kind == Kind::forward && table_.of(Kind::recv_forward, a.stage, a.micro_batch)) --posted;
      if ((a.kind == Kind::backward || a.kind == Kind::input) &&
          table_.of(Kind::recv_backward, a.stage, a.micro_batch))
        --posted;
    }
  }

  // From a rank to another, sends and receives have one order. Only ranks of neighbouring stages exchange
  // messages.
  void expect_channels() const {
    struct Channel {
      std::vector<Place> sent;
      std::size_t taken = 0;
    };
    std::map<std::pair<int, int>, Channel> channels;  // by sender and receiver
    for (int rank = 0; rank < s_.ranks; ++rank)
      for (int i = 0; const PipelineAction& a : s_.actions[static_cast<std::size_t>(rank)]) {
        if (sends(a.kind)) channels[{rank, rank_of(other_end(a).stage)}].sent.push_back({rank, i});
        ++i;
      }
    for (int rank = 0; rank < s_.ranks; ++rank)
      for (int i = 0; const PipelineAction& a : s_.actions[static_cast<std::size_t>(rank)]) {
        const Place place{rank, i++};
        if (!receives(a.kind)) continue;
        const int from = rank_of(other_end(a).stage);
        Channel& channel = channels[{from, rank}];
        const std::size_t number = channel.taken++;
        const Place send = channel.sent[number];
        if (other_end(action(send)) != a)
          wrong(
              fmt::format("{} and {}: message number {} from rank {} to rank {} is not the same at both "
                          "ends",
                          at(send), at(place), number + 1, from, rank));
      }
  }

  const PipelineSchedule& s_;
  const ScheduleTable table_;
  const bool trains_;
};

}  // namespace
}  // namespace weft::pp

namespace weft {

void check_pipeline_schedule(const PipelineSchedule& schedule) {
  pp::check_pipeline_numbers(schedule);
  pp::ScheduleCheck(schedule).run();
}

}  // namespace weft
