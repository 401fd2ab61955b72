// Who holds up a call, by what the ranks of its group say of themselves: for time-outs and warnings.
//
// A rank that waits for another one is not to blame if that one waits, too. So the ranks ask each other whom
// they wait for (a roll-call), and from the rank whose deadline has passed the way leads, from one that is
// waited for to those it waits for, to who does not answer: it is stopped, or it computes and has not come.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {

/// A rank that waits answers within this time, however long its naps are.
inline constexpr auto kRollCallPatience = std::chrono::milliseconds(300);
/// Answers are of another time then.
inline constexpr auto kRollCallStale = kRollCallPatience + std::chrono::seconds(1);
/// One roll-call serves all calls that are due within this time after it. Later ones ask anew: a rank that
/// answered for a warning may have gone on or been stopped since.
inline constexpr auto kRollCallFresh = std::chrono::milliseconds(20);

/// When a rank's roll-call began and ended, and for which call.
class RollCallTimes {
 public:
  /// Whether a call that is due needs a new one. The one that began for it goes on until it is asked again,
  /// however late that is: its caller may look rarely. One of another call, which may be over, serves it for
  /// a while.
  bool due(Op op, std::uint64_t call, Clock::time_point now) const {
    if (!begun_) return true;
    if (ended_) return now - *ended_ >= kRollCallFresh;
    return (op != op_ || call != call_) && now - *begun_ >= kRollCallStale;
  }
  void begin(Op op, std::uint64_t call, Clock::time_point now) {
    op_ = op;
    call_ = call;
    begun_ = now;
    ended_.reset();
  }
  /// Further answers may come.
  bool patient(Clock::time_point now) const { return begun_ && now - *begun_ < kRollCallPatience; }
  void end(Clock::time_point now) {
    if (!ended_) ended_ = now;
  }
  /// There are answers, and they are not of another time.
  bool counts(Clock::time_point now) const { return begun_ && (!ended_ || now - *ended_ < kRollCallStale); }

 private:
  Op op_ = Op::none;
  std::uint64_t call_ = 0;
  std::optional<Clock::time_point> begun_, ended_;
};

/// What a rank has said, or has not.
enum class Answer { no, yes, stopped };  ///< stopped: the system says that it will not answer

struct HoldUp {
  std::vector<int> ranks;  ///< in order; empty: nobody in particular, as where ranks wait in a circle
  bool silent = true;      ///< they do not answer; false: they do, and wait for nobody in this group
  bool settled = true;     ///< further answers change nothing
  std::vector<int> ends;   ///< those that answer, and wait for nobody in this group
};

/// `awaited`: whom rank `self` waits for. `answer(r)`; where that is yes, `waits(r, q)`: for rank q.
template <class AnswerOf, class Waits>
HoldUp who_holds_up(int self, int size, std::span<const int> awaited, const AnswerOf& answer,
                    const Waits& waits) {
  HoldUp found;
  std::vector<int> way(awaited.begin(), awaited.end());
  std::vector<bool> seen(static_cast<std::size_t>(size));
  seen[static_cast<std::size_t>(self)] = true;
  for (const int r : awaited) seen[static_cast<std::size_t>(r)] = true;
  for (std::size_t i = 0; i < way.size(); ++i) {
    const int r = way[i];
    if (r == self) continue;
    const Answer said = answer(r);
    if (said != Answer::yes) {
      found.ranks.push_back(r);
      if (said == Answer::no) found.settled = false;
      continue;
    }
    bool any = false;
    for (int q = 0; q < size; ++q) {
      if (q == r || !waits(r, q)) continue;
      any = true;
      if (!seen[static_cast<std::size_t>(q)]) way.push_back(q);
      seen[static_cast<std::size_t>(q)] = true;
    }
    if (!any) found.ends.push_back(r);
  }
  std::sort(found.ends.begin(), found.ends.end());
  if (found.ranks.empty()) {
    found.silent = false;
    found.ranks = found.ends;
  }
  std::sort(found.ranks.begin(), found.ranks.end());
  return found;
}

/// `awaited` without those that `found` says are innocent; empty where none of them is to blame.
std::vector<int> to_blame(std::span<const int> awaited, const HoldUp& found);

/// What is said of a call: `simple(ranks)` says of ranks it waits for what they have not done; the rest is
/// who is to blame beyond them. Leaves in `awaited` whom the error names. `all_answer`: so do ranks that do
/// not wait, but compute.
std::string tell(std::vector<int>& awaited, const HoldUp& found,
                 const std::function<std::string(std::span<const int>)>& simple, bool all_answer = false);

}  // namespace weft
