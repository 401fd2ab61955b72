// weft run --elastic: a job that is started again after a rank has failed. For use by one thread.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher.hpp"
#include "supervisor.hpp"

namespace weft::tools {

/// Reads "2:4". Throws bad_argument that says what it expects of `flag`, the name of the option.
Elastic elastic_from_text(std::string_view flag, const std::string& text);
/// The ranks of the first start: `ranks`, or the most if `ranks` is 0. Throws bad_argument unless
/// least <= ranks <= most.
int first_ranks(std::string_view flag, const Elastic& elastic, int ranks);

/// The starts that have failed since the job last got further: after these it is decided whether to start
/// again.
class FailedStarts {
 public:
  explicit FailedStarts(Elastic elastic) : elastic_(elastic) {}
  /// `ended`: a start that a rank's failure ended, in the order of the starts.
  void add(const StartEnd& ended);
  /// Returns whether to give up: the same rank ended the last kSameRank starts, or the last kAnyRank starts
  /// ended, and none got further than the starts before them.
  bool hopeless() const;
  /// Ranks of the next start: as many as there are, without those that died in the last start.
  int next_ranks() const;
  /// Lines that name the ranks that died in these starts: how each ended, at which step, its last lines.
  std::vector<std::string> report() const;

 private:
  static constexpr std::size_t kSameRank = 3, kAnyRank = 10;

  const Elastic elastic_;
  std::int64_t furthest_ = -1;  // the highest step of any start
  int died_ = 0;                // ranks of the last start
  std::vector<StartEnd> ends_;  // those that got no further, at most kAnyRank
};

/// Calls `start` until a start does not end with a rank's failure, or FailedStarts is hopeless; says on
/// standard error what comes next. Returns the exit status of the last start.
int run_elastic(const LaunchOptions& options, const std::function<StartEnd(const Start&)>& start);

}  // namespace weft::tools
