#include "other_load.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "base/text/plain_streams.hpp"
#include "competitors.hpp"

namespace weft::bench {
namespace {

constexpr double kLeastShare = 0.1;  // that is reported

// Seconds that the usable cores were not idle since the machine began, by /proc/stat. It includes steal, the
// time that other machines on the same hardware took. 0 if it cannot be read.
double busy_seconds() {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (::sched_getaffinity(0, sizeof usable, &usable) != 0) return 0;
  double ticks = 0;
  FileIn file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    TextIn words(line);
    std::string name;
    words >> name;
    if (!name.starts_with("cpu") || name.size() < 4) continue;
    const int core = std::atoi(name.c_str() + 3);
    if (core >= CPU_SETSIZE || !CPU_ISSET(static_cast<std::size_t>(core), &usable)) continue;
    double user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, softirq = 0, steal = 0;
    words >> user >> nice >> system >> idle >> wait >> irq >> softirq >> steal;
    ticks += user + nice + system + irq + softirq + steal;
  }
  return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double own_seconds() {
  double sum = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage used{};
    ::getrusage(who, &used);
    for (const timeval& t : {used.ru_utime, used.ru_stime})
      sum += static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  }
  return sum;
}

}  // namespace

OtherLoad::OtherLoad() : began_(Clock::now()), busy_(busy_seconds()), own_(own_seconds()) {}

double OtherLoad::share() const {
  const double passed = std::chrono::duration<double>(Clock::now() - began_).count();
  if (!(passed > 0)) return 0;
  const double others = (busy_seconds() - busy_) - (own_seconds() - own_);
  return std::clamp(others / (passed * usable_cores()), 0.0, 1.0);
}

std::string OtherLoad::note() const {
  const double others = share();
  if (others < kLeastShare) return {};
  return fmt::format("other programs took {:.0f} % of the cores meanwhile, so times vary", 100 * others);
}

}  // namespace weft::bench
