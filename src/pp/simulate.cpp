// Walks through schedules, and what the walk tells: actions that wait for each other, times, pictures.
#include <fmt/format.h>

#include <algorithm>

#include "pp/schedule_table.hpp"
#include "weft/base/error.hpp"
#include "weft/pp/schedule.hpp"

namespace weft {
namespace pp {
namespace {

// Performs actions rank by rank, as far as each rank gets, until all lists are done.
class ScheduleWalk {
 public:
  ScheduleWalk(const PipelineSchedule& s, const ScheduleTable& table, const PipelineCosts& costs)
      : s_(s), table_(table), costs_(costs) {
    for (const std::vector<PipelineAction>& list : s.actions) {
      ends_.emplace_back(list.size(), -1.0);
      todo_ += list.size();
    }
    next_.resize(s.actions.size());
    now_.resize(s.actions.size());
    sent_.resize(s.actions.size());
  }

  std::vector<WalkStep> run() {
    while (steps_.size() < todo_) {
      const std::size_t before = steps_.size();
      for (int rank = 0; rank < s_.ranks; ++rank)
        while (perform(rank)) {}
      if (steps_.size() == before) throw_cycle();
    }
    return std::move(steps_);
  }

 private:
  bool done(Place p) const { return end(p) >= 0; }
  double end(Place p) const {
    return ends_[static_cast<std::size_t>(p.rank)][static_cast<std::size_t>(p.index)];
  }
  const PipelineAction& action(Place p) const {
    return s_.actions[static_cast<std::size_t>(p.rank)][static_cast<std::size_t>(p.index)];
  }

  // The action of another rank for which this action waits; no place if it waits for none.
  Place awaited(Place place) const {
    const PipelineAction& a = action(place);
    if (sends(a.kind)) {
      const std::vector<Place>& sent = sent_[static_cast<std::size_t>(place.rank)];
      if (sent.size() < static_cast<std::size_t>(kPipelineSendsInFlight)) return {};
      return table_.of(other_end(action(sent[sent.size() - kPipelineSendsInFlight])));
    }
    if (receives(a.kind) || a.kind == Kind::weight) return {};
    const Place receive =
        table_.of(a.kind == Kind::forward ? Kind::recv_forward : Kind::recv_backward, a.stage, a.micro_batch);
    return receive ? table_.of(other_end(action(receive))) : Place{};
  }

  double cost(Kind kind) const {
    switch (kind) {
      case Kind::forward: return costs_.forward;
      case Kind::backward: return costs_.input + costs_.weight;
      case Kind::input: return costs_.input;
      case Kind::weight: return costs_.weight;
      default: return 0;
    }
  }

  bool perform(int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const Place place{rank, next_[r]};
    if (static_cast<std::size_t>(next_[r]) == s_.actions[r].size()) return false;
    const Place first = awaited(place);
    if (first && !done(first)) return false;
    const PipelineAction& a = action(place);
    const bool arrives = first && computes(a.kind);
    const double begin = first ? std::max(now_[r], end(first) + (arrives ? costs_.message : 0)) : now_[r];
    now_[r] = begin + cost(a.kind);
    ends_[r][static_cast<std::size_t>(next_[r]++)] = now_[r];
    if (sends(a.kind)) sent_[r].push_back(place);
    steps_.push_back({place, begin, now_[r]});
    return true;
  }

  // Every rank that is not done waits for an action that another such rank has not reached.
  [[noreturn]] void throw_cycle() const {
    std::vector<int> order(s_.actions.size(), -1);
    std::vector<std::string> parts;
    int rank = 0;
    while (static_cast<std::size_t>(next_[static_cast<std::size_t>(rank)]) ==
           s_.actions[static_cast<std::size_t>(rank)].size())
      ++rank;
    while (order[static_cast<std::size_t>(rank)] < 0) {
      order[static_cast<std::size_t>(rank)] = static_cast<int>(parts.size());
      const Place place{rank, next_[static_cast<std::size_t>(rank)]};
      const Place other = awaited(place);
      parts.push_back(fmt::format("{} waits for {}", text_of(s_, place), text_of(s_, other)));
      rank = other.rank;
    }
    std::string text;
    for (std::size_t i = static_cast<std::size_t>(order[static_cast<std::size_t>(rank)]); i < parts.size();
         ++i)
      text += fmt::format("{}{}", text.empty() ? "" : ", and ", parts[i]);
    bad_pipeline_schedule(s_, "a cycle: " + text);
  }

  const PipelineSchedule& s_;
  const ScheduleTable& table_;
  const PipelineCosts costs_;
  std::size_t todo_ = 0;
  std::vector<std::vector<double>> ends_;  // by rank and action; below 0: not done yet
  std::vector<int> next_;
  std::vector<double> now_;
  std::vector<std::vector<Place>> sent_;
  std::vector<WalkStep> steps_;
};

}  // namespace

std::vector<WalkStep> walk(const PipelineSchedule& s, const ScheduleTable& table,
                           const PipelineCosts& costs) {
  return ScheduleWalk(s, table, costs).run();
}

}  // namespace pp

PipelineTimeline simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  for (const double cost : {costs.forward, costs.input, costs.weight, costs.message})
    if (!(cost >= 0 && cost < 1e9))
      pp::bad_pipeline_schedule(schedule, fmt::format("a cost is {}; expected 0 to 1e9", cost));
  check_pipeline_schedule(schedule);
  PipelineTimeline timeline;
  timeline.ranks.resize(schedule.actions.size());
  double busy = 0;
  for (const pp::WalkStep& step : pp::walk(schedule, pp::ScheduleTable(schedule), costs)) {
    const auto rank = static_cast<std::size_t>(step.place.rank);
    const PipelineAction& a = schedule.actions[rank][static_cast<std::size_t>(step.place.index)];
    if (!pp::computes(a.kind)) continue;
    timeline.ranks[rank].push_back({a, step.begin, step.end});
    timeline.length = std::max(timeline.length, step.end);
    busy += step.end - step.begin;
  }
  if (timeline.length > 0) timeline.bubble = 1 - busy / (timeline.length * schedule.ranks);
  return timeline;
}

std::string timeline_svg(const PipelineTimeline& timeline, std::string_view title) {
  constexpr int kLeft = 60, kTop = 40, kRow = 28, kBox = 22, kWidth = 1100, kTextWidth = 14;
  const int height = kTop + kRow * static_cast<int>(timeline.ranks.size()) + 12;
  const double scale = timeline.length > 0 ? kWidth / timeline.length : 0;
  std::string escaped;
  for (const char c : title) escaped += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
      "<text x=\"{2}\" y=\"20\" font-size=\"13\">{3} (bubble {4:.1f} %)</text>\n",
      kLeft + kWidth + 20, height, kLeft, escaped, timeline.bubble * 100);
  for (std::size_t r = 0; r < timeline.ranks.size(); ++r) {
    const int y = kTop + kRow * static_cast<int>(r);
    svg += fmt::format("<text x=\"8\" y=\"{}\">rank {}</text>\n", y + 15, r);
    for (const PipelineTimeline::Span& span : timeline.ranks[r]) {
      const char* const colour = span.action.kind == pp::Kind::forward    ? "#9ecae1"
                                 : span.action.kind == pp::Kind::backward ? "#a1d99b"
                                 : span.action.kind == pp::Kind::input    ? "#c7e9c0"
                                                                          : "#fdae6b";
      const double x = kLeft + span.begin * scale, width = (span.end - span.begin) * scale;
      svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\" stroke=\"white\">"
          "<title>{}</title></rect>\n",
          x, y, width, kBox, colour, to_string(span.action));
      if (width >= kTextWidth)
        svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x + width / 2,
                           y + 15, span.action.micro_batch);
    }
  }
  return svg + "</svg>\n";
}

}  // namespace weft
