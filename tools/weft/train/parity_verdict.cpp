#include "parity_verdict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace weft::tools {

std::vector<double> differences(const Losses& reference, const Losses& losses) {
  std::vector<double> all;
  for (std::size_t step = 0; step < reference.size(); ++step) {
    const double difference = std::abs(losses[step] - reference[step]) / std::abs(reference[step]);
    // 0 / 0: both losses are 0
    const bool equal = std::isfinite(losses[step]) && losses[step] == reference[step];
    all.push_back(equal                       ? 0
                  : std::isfinite(difference) ? difference
                                              : std::numeric_limits<double>::infinity());
  }
  return all;
}

RunEnds ends_of_run(std::int64_t steps, std::int64_t compared) {
  const std::int64_t middle = compared / 2;
  if (middle == 0) return {0, steps};
  return steps <= middle ? RunEnds{steps, 0} : RunEnds{middle, steps};
}

ParityVerdict verdict_of(std::span<const Losses> losses, const Losses* control, double tolerance) {
  ParityVerdict verdict{.passed = true};
  std::vector<double> reach(losses[0].size(), 0);  // how far the control has been from the reference so far
  if (control != nullptr) {
    const std::vector<double> d = differences(losses[0], *control);
    for (std::size_t step = 0; step < d.size(); ++step)
      reach[step] = std::max(step == 0 ? 0 : reach[step - 1], std::isfinite(d[step]) ? d[step] : 0);
  }
  constexpr double kLeast = 1e-300;  // so that there is a quotient where nothing is allowed
  double furthest = -1;
  bool beyond = false;  // the tolerance
  for (std::size_t mesh = 0; mesh < losses.size(); ++mesh) {
    const std::vector<double> d = differences(losses[0], losses[mesh]);
    for (std::size_t step = 0; step < d.size(); ++step) {
      verdict.worst = std::max(verdict.worst, d[step]);
      const double allowed =
          control == nullptr ? tolerance : std::max(tolerance, kTimesControl * reach[step]);
      if (d[step] > allowed) verdict.passed = false;
      const double part = d[step] / std::max(allowed, kLeast);
      const bool this_beyond = d[step] > tolerance;
      if (beyond ? !this_beyond || part <= furthest : !this_beyond && part <= furthest) continue;
      furthest = part;
      beyond = this_beyond;
      verdict.mesh = mesh;
      verdict.step = static_cast<std::int64_t>(step);
      verdict.difference = d[step];
      verdict.of_control = reach[step];
    }
  }
  return verdict;
}

std::string sentence(const ParityVerdict& v, std::span<const std::string> names, const Losses& reference,
                     const Losses* control, double tolerance) {
  const std::string first = fmt::format("worst difference relative to {}: {:.2e}", names[0], v.worst);
  const char* const end = v.passed ? "passed" : "FAILED";
  if (control == nullptr || v.worst <= tolerance)
    return fmt::format("{}; at most {:g} is allowed: {}", first, tolerance, end);
  const std::vector<double> d = differences(reference, *control);
  const std::string found =
      std::isinf(v.difference) ? fmt::format("has a loss that cannot be compared with that of {}", names[0])
      : v.of_control == 0
          ? fmt::format("differs by {:.2e}; the control did not differ by then", v.difference)
          : fmt::format(
                "is {:.1f} times as far from {} as the control was by then; at most {:.0f} times is "
                "allowed",
                v.difference / v.of_control, names[0], kTimesControl);
  return fmt::format(
      "{}, above {:g}. So {} was trained again with a learning rate 1 + {:.0e} times as high: "
      "that control differs by {:.2e}. At step {}, {} {}: {}",
      first, tolerance, names[0], kControlRate - 1, *std::max_element(d.begin(), d.end()), v.step,
      names[v.mesh], found, end);
}

}  // namespace weft::tools
