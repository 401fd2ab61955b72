#include "measure.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace weft::bench {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Returns the seconds of one run.
double check(const Prepared& p) {
  if (p.reset) p.reset();
  const auto start = Clock::now();
  for (int k = 0; k < p.cycle; ++k) p.run();
  const double took = seconds_since(start) / p.cycle;
  if (const std::string problem = p.verify(); !problem.empty()) throw std::runtime_error(problem);
  return took;
}

}  // namespace

Times times_of(std::vector<double>& us) {
  if (us.empty()) return {};
  std::sort(us.begin(), us.end());
  return {us[(us.size() - 1) / 2], us[us.size() * 99 / 100], static_cast<std::int64_t>(us.size()), 1};
}

Times measure(const Prepared& p, const Agree& agree, double seconds) {
  // The first three runs do not count, however long they take. The first pays for memory and code that are
  // made once. The second does so, too, if the results of two runs exist at the same time. The third may
  // prepare data for repeated use (packed weights).
  constexpr int kUncounted = 3;
  double us = check(p) * 1e6;  // one run
  for (int k = 1; k < kUncounted; ++k) {
    const auto start = Clock::now();
    p.run();
    us = seconds_since(start) * 1e6;
  }
  for (std::int64_t block = agree(us >= seconds * 1e6 ? 0 : 1); block != 0;) {
    const auto start = Clock::now();
    for (std::int64_t k = 0; k < block; ++k) p.run();
    const double took = seconds_since(start);
    us = took * 1e6 / static_cast<double>(block);
    block = agree(took >= seconds / 5 ? 0 : 2 * block);
  }
  const auto enough = agree(static_cast<std::int64_t>(std::clamp(2e6 * seconds / us, 2.0, 8.0)));
  const std::int64_t runs = agree(static_cast<std::int64_t>(std::clamp(10 / us, 1.0, 20.0)));
  const std::int64_t batch = agree(
      static_cast<std::int64_t>(std::clamp(seconds * 1e6 / 4 / (us * static_cast<double>(runs)), 4.0, 16.0)));
  std::vector<double> samples;
  const auto begin = Clock::now();
  do {
    if (enough == 8) p.run();  // after agree(), which may have cooled something
    for (std::int64_t s = 0; s < (enough == 8 ? batch : enough); ++s) {
      const auto start = Clock::now();
      for (std::int64_t k = 0; k < runs; ++k) p.run();
      samples.push_back(seconds_since(start) * 1e6 / static_cast<double>(runs));
    }
  } while (agree(seconds_since(begin) < seconds || samples.size() < static_cast<std::size_t>(enough)) != 0);
  Times t = times_of(samples);
  t.runs = runs;
  if (p.reset) check(p);
  return t;
}

}  // namespace weft::bench
