// Of a transport whose ranks also wait for each other elsewhere than in calls of the group: over links of windows. Not for plug-ins.
#pragma once

#include <functional>
#include <vector>

namespace weft {

class WaitsElsewhere {
 public:
  virtual ~WaitsElsewhere() = default;
  /// Appends the ranks that this rank waits for there. False: it cannot tell at this moment.
  using Awaited = std::function<bool(std::vector<int>&)>;
  /// When peers ask whom this rank waits for (a roll-call), it calls `awaited`, too, and answers only if that can tell. Null: no more. Called by
  /// the owner of the group, who calls `awaited` as well.
  virtual void also_awaits(Awaited awaited) = 0;
};

}  // namespace weft
