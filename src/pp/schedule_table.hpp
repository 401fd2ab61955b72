// Where each action of a schedule is. Private to pp.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "weft/pp/schedule.hpp"

namespace weft::pp {

using Kind = PipelineAction::Kind;
inline constexpr std::size_t kKinds = 8;

inline bool computes(Kind kind) noexcept { return kind <= Kind::weight; }
inline bool receives(Kind kind) noexcept { return kind == Kind::recv_forward || kind == Kind::recv_backward; }
inline bool sends(Kind kind) noexcept { return kind == Kind::send_forward || kind == Kind::send_backward; }

/// Throws bad_argument: `schedule "NAME": TEXT`.
[[noreturn]] void bad_pipeline_schedule(const PipelineSchedule& s, const std::string& text);
/// Throws bad_argument if a number of the schedule, or of one of its actions, is out of range.
void check_pipeline_numbers(const PipelineSchedule& s);

/// A rank and a place in its list.
struct Place {
  int rank = -1, index = -1;
  explicit operator bool() const noexcept { return rank >= 0; }
};
/// "rank 1, action 3 (1F0)"; actions count from 1.
std::string text_of(const PipelineSchedule& s, Place place);

/// The first place of each action; `again` is the first action that is there twice.
class ScheduleTable {
 public:
  /// The numbers of `s` have been checked.
  explicit ScheduleTable(const PipelineSchedule& s);
  Place of(Kind kind, int stage, int micro_batch) const noexcept {
    return places_[static_cast<std::size_t>(kind)][number(stage, micro_batch)];
  }
  Place of(const PipelineAction& a) const noexcept { return of(a.kind, a.stage, a.micro_batch); }
  /// The pass that computes dx of a stage: I, or B.
  Place gradient(int stage, int micro_batch) const noexcept {
    const Place half = of(Kind::input, stage, micro_batch);
    return half ? half : of(Kind::backward, stage, micro_batch);
  }
  /// The pass that computes dw of a stage: W, or B.
  Place weights(int stage, int micro_batch) const noexcept {
    const Place half = of(Kind::weight, stage, micro_batch);
    return half ? half : of(Kind::backward, stage, micro_batch);
  }
  Place again() const noexcept { return again_; }

 private:
  std::size_t number(int stage, int micro_batch) const noexcept {
    return static_cast<std::size_t>(stage) * micro_batches_ + static_cast<std::size_t>(micro_batch);
  }
  std::size_t micro_batches_;
  std::array<std::vector<Place>, kKinds> places_;
  Place again_{};
};

/// The send of which `receive` takes the message, and the reverse.
inline PipelineAction other_end(const PipelineAction& a) noexcept {
  switch (a.kind) {
    case Kind::recv_forward: return {Kind::send_forward, a.stage - 1, a.micro_batch};
    case Kind::send_forward: return {Kind::recv_forward, a.stage + 1, a.micro_batch};
    case Kind::recv_backward: return {Kind::send_backward, a.stage + 1, a.micro_batch};
    default: return {Kind::recv_backward, a.stage - 1, a.micro_batch};
  }
}
/// The largest number of activations that a rank keeps, and where it is reached.
struct Peak {
  int count = 0;
  Place at{};
};
Peak peak_of(const PipelineSchedule& s, int rank);

/// The time of one action in a walk through a schedule.
struct WalkStep {
  Place place;
  double begin, end;
};
/// Performs the actions of all ranks as early as they can be, or throws bad_argument that names actions which
/// wait for each other. The messages of `s` have been checked.
std::vector<WalkStep> walk(const PipelineSchedule& s, const ScheduleTable& table,
                           const PipelineCosts& costs = {});

}  // namespace weft::pp
