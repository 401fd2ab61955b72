// The built-in transport with some of its operations hidden, so that weft composes them.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft::test {

/// `shm` with traits that state only the operations `ops` and the reductions `reduces`, and, if `canonical`
/// is false, an order of its own. A call of another kind that reaches it fails.
struct Mask {
  OpSet ops = 0;
  std::array<DTypeSet, kReduceKindCount> reduces{};
  bool canonical = false;
};
Traits traits_of(const Mask& mask);
BackendFactory masked(const Mask& mask);

/// It has only send and recv.
Mask messages_only();
/// It has only all_to_all_v.
Mask all_to_all_v_only();
/// The abilities of many transports: a few collectives, sum, min and max of a few dtypes, messages.
Mask some();

}  // namespace weft::test
