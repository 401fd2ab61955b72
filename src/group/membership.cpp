#include <utility>

#include "store/rendezvous.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

Membership Membership::from_env(Context& context, Duration deadline) {
  context.check_fork("Membership::from_env");
  Rendezvous place = meet_by_env(context, Deadline::after(deadline));
  Membership m;
  m.process_rank = 0;  // one rank per process
  m.store = std::move(place.store);
  m.rank = place.rank;
  m.size = place.size;
  m.deadline = deadline;
  return m;
}

}  // namespace weft
