#include "elastic_mesh.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "weft/base/error.hpp"

namespace weft::tools {

int fit_mesh(TrainConfig& config, int ranks) {
  std::optional<std::string> refused;
  const auto fits = [&](int tp, int domain) {
    const int other = tp * config.ep * config.pp * domain;
    for (int dp = std::min(ranks / other, config.dp == -1 ? ranks : config.dp); dp >= 1; --dp) {
      TrainConfig smaller = config;
      smaller.dp = dp;
      smaller.tp = tp;
      smaller.domain = domain;
      try {
        smaller.check(dp * other);
      } catch (const Error& e) {
        refused = e.what();
        continue;
      }
      config.dp = dp;
      config.tp = tp;
      config.domain = domain;
      return dp * other;
    }
    return 0;
  };
  for (int domain = config.domain; domain >= 1; --domain)
    for (int tp = config.tp; tp >= 1; --tp)
      if (const int used = fits(tp, domain); used > 0) return used;
  const char* const s = ranks == 1 ? "" : "s";
  bad_training(refused ? fmt::format("no mesh fits {} rank{}: {}", ranks, s, *refused)
                       : fmt::format("no mesh fits {} rank{}; expected at least ep {} x pp {}", ranks, s,
                                     config.ep, config.pp));
}

}  // namespace weft::tools
