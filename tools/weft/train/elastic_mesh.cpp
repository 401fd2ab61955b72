#include "elastic_mesh.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "weft/base/error.hpp"

namespace weft::tools {

int fit_mesh(TrainConfig& config, int ranks) {
  std::optional<std::string> refused;
  for (int tp = config.tp; tp >= 1; --tp) {
    const int other = tp * config.ep * config.pp;
    for (int dp = std::min(ranks / other, config.dp == -1 ? ranks : config.dp); dp >= 1; --dp) {
      TrainConfig smaller = config;
      smaller.dp = dp;
      smaller.tp = tp;
      try {
        smaller.check(dp * other);
      } catch (const Error& e) {
        refused = e.what();
        continue;
      }
      config.dp = dp;
      config.tp = tp;
      return dp * other;
    }
  }
  const char* const s = ranks == 1 ? "" : "s";
  bad_training(refused ? fmt::format("no mesh fits {} rank{}: {}", ranks, s, *refused)
                       : fmt::format("no mesh fits {} rank{}; expected at least ep {} x pp {}", ranks, s,
                                     config.ep, config.pp));
}

}  // namespace weft::tools
