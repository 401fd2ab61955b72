// The inline path: the payload has arrived with the arrival line, so there is no further synchronisation.
#pragma once

#include "backends/shm/collectives/arrivals.hpp"
#include "backends/shm/collectives/call.hpp"

namespace weft::shm {

class InlinePath {
 public:
  InlinePath(const Group& group, Arrivals& arrivals, Operands& operands)
      : group_(group), arrivals_(arrivals), operands_(operands) {}
  void plan(OpState& s) const noexcept { state(s).phase = Phase::inlined; }
  /// Does the whole call. Never returns `pending`.
  Step step(OpState& s) noexcept;
  bool missing(const OpState&, int) const noexcept { return false; }

 private:
  [[gnu::cold, gnu::noinline]] void raise_damaged(const OpState& s, int r, std::int64_t offset,
                                                  std::int64_t count) const noexcept;
  const Group& group_;
  Arrivals& arrivals_;
  Operands& operands_;
};

}  // namespace weft::shm
