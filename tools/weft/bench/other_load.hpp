// How much of the cores other programs take while a benchmark runs. One thread.
#pragma once

#include <string>

#include "weft/base/clock.hpp"

namespace weft::bench {

/// Measures from its construction on, on the cores that this process may use.
class OtherLoad {
 public:
  OtherLoad();
  /// The part of the cores that neither this process nor its children took, 0 to 1. The children have ended.
  double share() const;
  /// "other programs took 40 % of the cores meanwhile, so times vary"; empty below a tenth.
  std::string note() const;

 private:
  const Clock::time_point began_;
  const double busy_, own_;  // seconds
};

}  // namespace weft::bench
