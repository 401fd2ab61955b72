// The built-in transport with a part of what it can hidden, so that the rest is composed.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft::test {

/// `shm` that says it has the operations `ops` only, reduces `reduces` only, and in an order of its own where
/// `canonical` is false. A call of another kind that reaches it fails.
struct Mask {
  OpSet ops = 0;
  std::array<DTypeSet, kReduceKindCount> reduces{};
  bool canonical = false;
};
Traits traits_of(const Mask& mask);
BackendFactory masked(const Mask& mask);

/// It has nothing but send and recv.
Mask messages_only();
/// It has nothing but all_to_all_v.
Mask all_to_all_v_only();
/// The abilities of many transports: a few collectives, sum, min and max of a few dtypes, messages.
Mask some();

}  // namespace weft::test
