#include "elastic.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/parse_number.hpp"
#include "processes.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr int kMostRanksOfElastic = 256;  // as many as weft run takes

std::string ranks_in_words(int ranks) { return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"); }

}  // namespace

Elastic elastic_from_text(std::string_view flag, const std::string& text) {
  const std::size_t colon = std::min(text.find(':'), text.size());
  const auto least = parse_integer<int>(std::string_view(text).substr(0, colon));
  const auto most = parse_integer<int>(std::string_view(text).substr(std::min(colon + 1, text.size())));
  if (!least || !most || *least < 1 || *most < *least || *most > kMostRanksOfElastic)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{} is \"{}\"; expected MIN:MAX, two numbers of ranks from 1 to {}, MIN not above "
                    "MAX, as in 2:4",
                    flag, text, kMostRanksOfElastic));
  return {*least, *most};
}

int first_ranks(std::string_view flag, const Elastic& elastic, int ranks) {
  if (ranks == 0) return elastic.most;
  if (ranks < elastic.least || ranks > elastic.most)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected {} to {}, as --elastic has it", flag,
                                                     ranks, elastic.least, elastic.most));
  return ranks;
}

void FailedStarts::add(const StartEnd& ended) {
  died_ = static_cast<int>(ended.deaths.size());
  if (ended.step > furthest_) {
    furthest_ = ended.step;
    ends_.clear();
  } else {
    ends_.push_back(ended);
  }
}

bool FailedStarts::hopeless() const {
  if (ends_.size() >= kAnyRank) return true;
  if (ends_.size() < kSameRank) return false;
  const int rank = ends_.back().deaths.front().rank;
  return std::all_of(ends_.end() - kSameRank, ends_.end(),
                     [&](const StartEnd& e) { return e.deaths.front().rank == rank; });
}

int FailedStarts::next_ranks() const { return std::max(elastic_.least, elastic_.most - died_); }

std::vector<std::string> FailedStarts::report() const {
  std::vector<std::string> lines{fmt::format(
      "the job ends: {} starts in a row ended with a failed rank, and got no further", ends_.size())};
  for (const StartEnd& end : ends_) {
    const std::string where =
        end.step < 0 ? "no step was reported" : fmt::format("{} steps were done", end.step);
    for (const RankDeath& death : end.deaths) {
      lines.push_back(fmt::format("start {}, {}: rank {} (pid {}) {} after {:.1f} s; {}", end.number,
                                  ranks_in_words(end.ranks), death.rank, death.pid, death.how,
                                  std::chrono::duration<double>(end.lasted).count(), where));
      for (const std::string& line : death.last_lines)
        lines.push_back(fmt::format("  rank {} said: {}", death.rank, line));
    }
  }
  return lines;
}

int run_elastic(const LaunchOptions& options, const std::function<StartEnd(const Start&)>& start) {
  FailedStarts failed(*options.elastic);
  Start next{.ranks = options.ranks, .number = 0, .job_ends = job_end(options)};
  for (;; ++next.number) {
    const StartEnd end = start(next);
    if (end.deaths.empty()) return end.status;
    failed.add(end);
    if (failed.hopeless()) {
      for (const std::string& line : failed.report()) say(line);
      return end.status;
    }
    if (next.job_ends.passed()) {
      say(fmt::format("the job did not end within {:g} s: there is no start {}",
                      std::chrono::duration<double>(options.timeout).count(), next.number + 1));
      return kTimedOut;
    }
    next.ranks = failed.next_ranks();
    say(fmt::format("start {} of the job, on {}", next.number + 1, ranks_in_words(next.ranks)));
  }
}

}  // namespace weft::tools
