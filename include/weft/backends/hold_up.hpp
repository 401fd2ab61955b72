// Finds the rank that holds up a call, from the reports of the ranks of its group. Time-outs and warnings use
// it.
//
// A rank for which other ranks wait is not to blame if it waits itself. So the ranks ask each other for which
// ranks they wait (a roll-call). The search begins at the rank whose deadline has passed. It follows the
// answers from rank to rank until it finds a rank that does not answer. That rank is stopped, or it computes
// and has not arrived.
//
// Backend::ask() sends the questions, and Backend::answer() sends the answers. Transports whose ranks share
// no memory use RollCallMessages for both. Pure functions; any thread.
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

/// A waiting rank answers within this time, even if it sleeps between its polls.
inline constexpr auto kRollCallPatience = std::chrono::milliseconds(300);
/// Answers that are older than this no longer count.
inline constexpr auto kRollCallStale = kRollCallPatience + std::chrono::seconds(1);
/// One roll-call serves all calls that need one within this time after it. Later calls ask again. A rank that
/// answered may have continued, or may have been stopped, since then.
inline constexpr auto kRollCallFresh = std::chrono::milliseconds(20);

/// The begin and the end of a rank's roll-call, and the call for which it was. Not thread-safe.
class RollCallTimes {
 public:
  /// Returns whether a call whose deadline has passed needs a new roll-call. A roll-call that was begun for
  /// this call stays open until the call asks again, however late, because the call's thread may poll rarely.
  /// A roll-call that was begun for another call serves this call for a limited time, because that other call
  /// may have ended.
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
  /// Whether more answers may still arrive.
  bool patient(Clock::time_point now) const { return begun_ && now - *begun_ < kRollCallPatience; }
  void end(Clock::time_point now) {
    if (!ended_) ended_ = now;
  }
  /// Whether there are answers that are recent enough.
  bool counts(Clock::time_point now) const { return begun_ && (!ended_ || now - *ended_ < kRollCallStale); }

 private:
  Op op_ = Op::none;
  std::uint64_t call_ = 0;
  std::optional<Clock::time_point> begun_, ended_;
};

/// Whether a rank has answered the roll-call.
enum class Answer { no, yes, stopped };  ///< stopped: the system reports that the rank will not answer

struct HoldUp {
  /// in ascending order; empty: no particular rank, for example if ranks wait in a circle
  std::vector<int> ranks;
  /// true: these ranks do not answer; false: they answer, and wait for nobody in this group
  bool silent = true;
  bool settled = true;    ///< further answers change nothing
  std::vector<int> ends;  ///< the ranks that answer and wait for nobody in this group
};

/// Finds the ranks that hold up rank `self`, which waits for the ranks `awaited`. `answer(r)` returns the
/// Answer of rank r, which is another rank. `waits(r, q)` returns whether rank r waits for rank q, in any
/// call. It is called only if the Answer of r is `yes`, and for `self`: a rank that waits for `self` is held
/// up by those for whom `self` waits in its other calls.
template <class AnswerOf, class Waits>
HoldUp who_holds_up(int self, int size, std::span<const int> awaited, const AnswerOf& answer,
                    const Waits& waits) {
  HoldUp found;
  std::vector<int> way(awaited.begin(), awaited.end());
  std::vector<bool> seen(static_cast<std::size_t>(size));
  for (const int r : awaited) seen[static_cast<std::size_t>(r)] = true;
  for (std::size_t i = 0; i < way.size(); ++i) {
    const int r = way[i];
    const Answer said = r == self ? Answer::yes : answer(r);
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
    if (!any && r != self) found.ends.push_back(r);
  }
  std::sort(found.ends.begin(), found.ends.end());
  if (found.ranks.empty()) {
    found.silent = false;
    found.ranks = found.ends;
  }
  std::sort(found.ranks.begin(), found.ranks.end());
  return found;
}

/// The ranks of `awaited` that hold up the call; empty if none of them does.
std::vector<int> to_blame(std::span<const int> awaited, const HoldUp& found);

/// Returns the sentence about a call that is held up. `simple(ranks)` gives the part that says what the
/// awaited ranks have not done. The other part of the sentence names the ranks for which the awaited ranks
/// wait. Sets `awaited` to the ranks that the error names. `all_answer`: ranks that compute, and do not wait,
/// answer, too.
std::string tell(std::vector<int>& awaited, const HoldUp& found,
                 const std::function<std::string(std::span<const int>)>& simple, bool all_answer = false);
/// Sets `story` to the sentence about a collective in which all ranks have arrived. Returns the ranks that
/// the error names.
std::vector<int> tell_all_arrived(const HoldUp& found, std::string& story);

}  // namespace weft
