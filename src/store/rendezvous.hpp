// The place at which the ranks of a job meet, and the rank of this process.
#pragma once

#include <memory>

#include "weft/base/clock.hpp"
#include "weft/host/context.hpp"
#include "weft/store/store.hpp"

namespace weft {

struct Rendezvous {
  std::shared_ptr<Store> store;
  int rank = 0;
  int size = 1;
};

/// Implements Membership::from_env() (weft/group/process_group.hpp).
Rendezvous meet_by_env(Context& context, Deadline deadline);

}  // namespace weft
